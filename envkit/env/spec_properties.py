"""Properties that show a spec in part: one element of the batch, its leaf keys, its only leaf."""

from __future__ import annotations

from typing import Any

from envkit.data.paths import Key, Path, as_key, leaf_paths
from envkit.errors import MissingKeyError
from envkit.specs import Composite, StackedComposite, TensorSpec

__all__ = ["LeafKeys", "SingleSpec", "only_key", "only_leaf", "varies_in_size"]


class SingleSpec(property):
    """A property that shows a spec without the batch axes."""

    def __init__(self, name: str):
        def read(env: Any) -> TensorSpec:
            spec, axes = getattr(env, name), len(env.batch_size)
            return spec[(0,) * axes] if axes else spec

        def write(env: Any, spec: TensorSpec) -> None:
            setattr(env, name, spec.expand(*env.batch_size, *spec.shape))

        doc = f"`{name}` of one element of the batch; what is assigned holds for each element."
        super().__init__(read, write, doc=doc)

    def __get__(self, env: Any, owner: type | None = None) -> TensorSpec:
        return super().__get__(env, owner)


class LeafKeys(property):
    """A property that lists the leaf keys of a full spec."""

    def __init__(self, kind: str):
        name = f"full_{kind}_spec"

        def read(env: Any) -> list[Key]:
            return env._declared.cached(
                f"{kind}_keys", lambda: [as_key(path) for path in leaf_paths(getattr(env, name))]
            )

        super().__init__(read, doc=f"Leaf keys of the {kind} spec.")

    def __get__(self, env: Any, owner: type | None = None) -> list[Key]:
        return super().__get__(env, owner)


def only_key(kind: str, keys: list[Key]) -> Key:
    """Give the only one of the keys of a kind.

    Raises:
        MissingKeyError: (a KeyError) there are several, or none.
    """
    if len(keys) != 1:
        raise MissingKeyError(
            f"env.{kind}_key needs exactly one {kind} entry, but the env has {keys}. "
            f"Use env.{kind}_keys, or name the key you mean."
        )
    return keys[0]


def only_leaf(spec: Composite, ignore: tuple[Path, ...] = ()) -> TensorSpec:
    """Give the leaf of a composite that has only one, those to ``ignore`` apart; else the composite."""
    leaves = [path for path in leaf_paths(spec) if path not in ignore]
    return spec[as_key(leaves[0])] if len(leaves) == 1 else spec


def varies_in_size(spec: TensorSpec) -> bool:
    """Say whether a leaf leaves a size open, -1; composites in a stack may differ from each other."""
    if isinstance(spec, StackedComposite):
        return any(map(varies_in_size, spec.members))
    if isinstance(spec, Composite):
        return any(map(varies_in_size, spec.values()))
    return spec is not None and -1 in spec.shape
