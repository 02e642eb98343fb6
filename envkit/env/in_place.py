"""Steps whose outcome is read where it was made, for those who look at a step and keep nothing of it.

An env whose data lies in memory anyway may offer them beside `step_and_maybe_reset`, and gives the same values. What
offers them stands with the env; this module says what is promised.

Conventions
    rows    the only batch axis of the env.
    moment  entries of the root or of `next` by key: tensors or arrays, shape ``(rows, *leaf)``. They hold until the
            next call of the env.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from tensordict import TensorDictBase

from envkit.data.paths import Key, Path

__all__ = ["InPlace", "Moment"]

Moment = TensorDictBase | Mapping[Key, Any]


class InPlace(Protocol):
    """Steps of an env; the env may be used in any other way between them."""

    def is_current(self) -> bool:
        """Say whether these are still steps of the env, as it delivers its data; else ask it for others."""
        ...

    def root(self) -> TensorDictBase:
        """Give what is known now, as a TensorDict of its own."""
        ...

    def advance(
        self, actions: Mapping[Path, Any], mask: np.ndarray | None
    ) -> tuple[Moment, Moment]:
        """Step the rows that a mask selects, None all of them, and reset those that end.

        Args:
            actions: by path, of the batch size of the env; in rows that are not stepped they may hold anything.
            mask: bool, shape ``(rows,)``.

        Returns:
            What the step gave, and the root that follows it. Rows that are not stepped show in the former what their
            root holds, with reward 0.
        """
        ...
