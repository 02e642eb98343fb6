"""Whether the newest roots that were saved fit the rows that are to go on from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensordict import TensorDictBase

from envkit.data.paths import Key, Path, as_key
from envkit.data.transition import leaves
from envkit.errors import ResumeError

__all__ = ["require_keys", "require_leaves"]


def require_keys(found: TensorDictBase, wanted: Iterable[Key]) -> None:
    """Check that what was saved of a row has the entries of its env.

    Raises:
        ResumeError: it lacks one.
    """
    if missing := [key for key in wanted if found.get(key, None) is None]:
        raise ResumeError(
            f"what was saved lacks {missing}; it has {sorted(map(str, found.keys(True, True)))}. Build the env "
            "that was saved."
        )


def require_leaves(found: TensorDictBase, wanted: Mapping[Path, tuple[int, ...]]) -> None:
    """Check that what was saved has the entries of this env.

    Raises:
        ResumeError: it has others, or other shapes.
    """
    given = {path: tuple(leaf.shape) for path, leaf in leaves(found)}
    if given != dict(wanted):
        told = [
            f"{as_key(path)!r}: {given.get(path)} saved, {wanted.get(path)} here"
            for path in sorted(given.keys() | wanted.keys())
            if given.get(path) != wanted.get(path)
        ]
        raise ResumeError(
            "what was saved has other entries than this env: "
            + "; ".join(told)
            + ". Build the env that was saved."
        )
