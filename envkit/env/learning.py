"""Run an env so that what its transforms learn stands still, as running averages do while a policy is judged.

A transform that learns says so with `Transform.learns`, and looks at ``self.frozen`` before it learns. That is the whole
declaration, for transforms of users too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["not_learning"]


@contextmanager
def not_learning(env: Any, *, update_stats: bool = False) -> Iterator[None]:
    """Freeze the transforms of an env that learn, those in sub-envs too, and let them learn again afterwards.

    Args:
        env: any env. A pool that has not started yet is started.
        update_stats: True does nothing.
    """
    if update_stats:
        yield
        return
    before = env._swap_frozen(True)
    try:
        yield
    finally:
        if not env.is_closed:
            env._swap_frozen(before)
