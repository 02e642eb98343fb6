"""Where a step goes on its way through transforms, and how its results are shown on the way back."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDictBase

from envkit.env.base import EnvBase
from envkit.errors import FusionError
from envkit.transforms.core.kept_memory import KeptMemory
from envkit.transforms.core.transform import Transform

__all__ = ["Route"]


@dataclass(frozen=True)
class Route:
    """Which env is stepped, and where each transform runs, first to last."""

    base: EnvBase
    stepper: EnvBase
    fused: list[Transform]
    outside: list[Transform]
    is_direct: bool
    """Whether the stepper is one made to run transforms, and runs all there are."""

    @property
    def is_pure(self) -> bool:
        """Whether the transforms outside of the stepper write to no tensor in place, and leave no trace of a call."""
        return all(leaf.is_pure for part in self.outside for leaf in part.flat())

    def shown_next(self, inner: TensorDictBase, done: TensorDictBase) -> TensorDictBase:
        """Show the ``next`` of a step the stepper has done, which was given ``inner``."""
        following = done.get("next")
        if done is inner:
            inner = inner.exclude("next", inplace=True)
        for transform in self.outside:
            following = transform._step(inner, following)
            if isinstance(transform, KeptMemory):
                inner = transform.outwards(inner)
        return following

    def shown_root(self, td: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        """Show what the stepper gave at a reset, which was asked for with ``td``."""
        td = self.inwards(td)
        for transform in self.outside:
            root = transform._reset(td, root)
            if isinstance(transform, KeptMemory):
                td = transform.outwards(td)
        return root

    def inwards(self, td: TensorDictBase) -> TensorDictBase:
        """Give back the memory that travels elsewhere, and leave the rest as it is."""
        for transform in reversed(self.outside):
            if isinstance(transform, KeptMemory):
                td = transform.outwards(td)
        return td

    def require_one_program(self) -> None:
        """Check that steps, transforms included, are one program.

        Raises:
            FusionError: some transforms cannot run inside the program, or the env has none.
        """
        if not hasattr(type(self.stepper), "unroll"):
            raise FusionError(
                f"unroll needs a stateless env, whose steps are one program, but this is a "
                f"{type(self.stepper).__name__} behind transforms. Use "
                "rollout(steps, break_when_any_done=False), which goes step by step."
            )
        outside = [leaf for transform in self.outside for leaf in transform.flat()]
        if outside:
            names = ", ".join(type(leaf).__name__ for leaf in outside)
            raise FusionError(
                f"unroll would pass {names} by: these transforms run outside the programs of the env "
                "(docs/transforms.md says which run inside; all before them must). Use "
                "rollout(steps, break_when_any_done=False), which goes step by step."
            )
