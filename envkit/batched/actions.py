"""Whether the actions of a batch lie in the specs of the sub-envs that get them.

A sub-env may trust what it is given: this is asked before anybody steps. Which options a spec
allows may change with every step, and only the sub-env knows: masks of specs are not looked at.

Conventions
    row   number of a sub-env, 0 .. num_rows - 1.
    rows  array of shape (num_rows, *leaf): the values of one action for all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch

from envkit.batched.metadata import EnvMetaData
from envkit.keys import Path, as_key
from envkit.specs import TensorSpec
from envkit.specs.inputs import InputCheck
from envkit.specs.stacked import Stacked

__all__ = ["ActionChecks", "action_checks"]


class ActionChecks:
    """Tell actions that are outside the spec of their row, for all rows together.

    Args:
        metadata: of each row; they share one layout.
    """

    def __init__(self, metadata: Sequence[EnvMetaData]):
        self._checks = [
            (path, check, rows)
            for found, rows in _runs(metadata)
            for path, check in action_checks(found).items()
        ]

    @property
    def paths(self) -> set[Path]:
        """The actions that are looked at."""
        return {path for path, _, _ in self._checks}

    def require(
        self, actions: Mapping[Path, np.ndarray], stepped: Sequence[int] | None = None
    ) -> None:
        """Check the rows that are to be stepped, None for all.

        Args:
            actions: of each of `paths` the rows; they have the form that the specs say.

        Raises:
            InputError: one lies outside the spec of its row.
        """
        for path, check, rows in self._checks:
            if stepped is None:
                check.require(actions[path][rows.start : rows.stop], rows)
            elif numbers := [row for row in stepped if row in rows]:
                check.require(actions[path][numbers], numbers)


def action_checks(metadata: EnvMetaData) -> dict[Path, InputCheck]:
    """Give the check of each action of one env.

    Actions of varying size, without a dtype, or of a dtype that NumPy lacks have none.
    """
    return {
        path: InputCheck(_without_mask(leaf).to("cpu"), as_key(path))
        for path, leaf in metadata.paths("action").items()
        if leaf.dtype not in (None, torch.bfloat16) and min(leaf.shape, default=0) >= 0
    }


def _runs(metadata: Sequence[EnvMetaData]) -> Iterator[tuple[EnvMetaData, range]]:
    """Part the rows into runs of equal action specs."""
    kinds: list[EnvMetaData] = []

    def kind_of(found: EnvMetaData) -> int:
        for number, known in enumerate(kinds):
            if found is known or found.full_spec("action") == known.full_spec("action"):
                return number
        kinds.append(found)
        return len(kinds) - 1

    start = 0
    for kind, run in groupby(map(kind_of, metadata)):
        stop = start + len(list(run))
        yield kinds[kind], range(start, stop)
        start = stop


def _without_mask(spec: TensorSpec) -> TensorSpec:
    member = spec
    while isinstance(member, Stacked):
        member = member.members[0]  # they are of one class
    if not hasattr(member, "update_mask"):
        return spec
    free = spec.clone()
    free.update_mask(None)  # type: ignore[attr-defined]
    return free
