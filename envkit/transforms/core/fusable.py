"""Transforms whose arithmetic runs in two places: on the tensors of a TensorDict, and inside a program.

A stateless env compiles its step. `FusableTransform` is what a transform must offer to be compiled into
it: hooks over arrays by path, pure and written in the array API. Here the hooks over TensorDicts are
derived from them, so a transform is written once. Which programs there are, and what crosses their
border, is the env's business (`EnvBase._fuse`).

Conventions
    leaves     the entries of one moment by path; changes: what a hook returns, see `envkit.arrays.leaves`.
    memory     entries at the root that the next step reads.
    constants  numbers and tensors that the arithmetic uses. They are given to a program at every
               call, so they may change; everything else is fixed when it is compiled.
    state      tensors that the arithmetic uses and that what it sees changes, such as running
               statistics of all rows. They are among the constants. A program changes them from step
               to step; what they are after its last one is written back into the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.arrays.leaves import Changes, Leaves
from envkit.data import transition
from envkit.data.paths import Path, take_out
from envkit.transforms.core.transform import Transform

_INWARDS = ("_inv_call", "_reset_env_preprocess")


class LeavesOf(Leaves):
    """The leaves of a TensorDict, read when they are asked for."""

    def __init__(self, td: TensorDictBase):
        self._td = td
        self.batch_dims = td.batch_dims

    def __getitem__(self, path: Path) -> Any:
        value = self._td.get(path, None)
        if value is None:
            raise KeyError(path)
        return value

    def get(self, path: Path, default: Any = None) -> Any:
        return self._td.get(path, default)

    def __iter__(self) -> Iterator[Path]:
        return (path for path, _ in transition.leaves(self._td))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def written(td: TensorDictBase, changes: Changes) -> TensorDictBase:
    """Make changes to the leaves of a TensorDict, in place."""
    for path, leaf in changes.items():
        if leaf is None:
            take_out(td, path)
        else:
            td.set(path, leaf)
    return td


class FusableTransform(Transform):
    """Base of transforms that can run inside the programs of a stateless env.

    A concrete one writes `step_leaves` and `reset_leaves`, and `memory` and `constants` where it has
    any. The hooks are pure, element by element or row by row, and do not look at values to decide what
    to do.

    Example:
        >>> from envkit import FusableTransform, GymEnv
        >>> class Doubled(FusableTransform):
        ...     def step_leaves(self, root, following, constants):
        ...         return {("reward",): 2 * following[("reward",)]}
        >>> env = GymEnv("CartPole-v1").append_transform(Doubled())
        >>> env.rollout(3)["next", "reward"].flatten()
        tensor([2., 2., 2.])
        >>> env.close()
    """

    _twins = (("_step", "step_leaves"), ("_reset", "reset_leaves"))

    # ---------------------------------------------------------------------- for concrete transforms

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        """Transform what a step produced.

        Args:
            root: what the step was given; in a program, the `memory` that is there.
            following: what it produced.
            constants: what `constants` gave, perhaps as arrays of another namespace.

        Returns:
            Changes to ``following``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not write step_leaves. Write it, or write _step and _reset "
            "as in any Transform."
        )

    def reset_leaves(self, fresh: Leaves, constants: Mapping[str, Any]) -> Changes:
        """Transform what a reset produced, all rows; gives changes to ``fresh``.

        Args:
            fresh: what a reset produced, all rows.
            constants: what `constants` gave, perhaps as arrays of another namespace.
        """
        return {}

    def memory(self) -> list[Path]:
        """List the entries at the root that `step_leaves` reads; these are states."""
        return []

    def constants(self) -> dict[str, Any]:
        """Return the numbers and tensors that the hooks use, by name."""
        return {}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that `seen_leaves` changes, by their own names; most have none."""
        return {}

    def seen_leaves(
        self, leaves: Leaves, mask: Any, constants: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return what the state is once it has counted new values; called before the hook that uses it.

        Args:
            leaves: what a step or a reset produced; of a step also its `memory` at the root.
            mask: rows that were stepped or reset, bool, shape (rows,). There may be none.
            constants: what `constants` gave, and the state.

        Returns:
            Changes to the state, in its shapes and dtypes.
        """
        return {}

    def _is_derived_from(self, name: str, value: Any) -> bool:
        """Check whether programs are traced with it: with all but buffers, and what `constants` gives at each call."""
        if name in ("frozen", "training") or name in self._buffers:
            return False
        return value is None or name not in self.constants()

    @property
    def fuses(self) -> bool:
        """Whether the hooks over leaves are all there is to this transform.

        They are not if it has an inverse pass, or if a subclass, or one object, has another hook over TensorDicts.
        """
        return self._is_written_in_leaves

    @property
    def is_pure(self) -> bool:
        return super().is_pure or (self.fuses and not self.state())

    @property
    def stacks(self) -> bool:
        """Whether rows that are their own envs may be stacked for the hooks over leaves.

        Each row then gets the bits that it would get alone. Not so where all rows that are seen change one
        state, or where a constant is learned and data is to keep the graph.
        """
        return self.fuses and not self.state() and not self._learns_constants

    @property
    def sees_rows(self) -> bool:
        """Whether the rows of one env may be shown to the hooks over leaves, outside of programs."""
        counts = type(self).counted is not FusableTransform.counted
        return self.fuses and (counts or not self.state()) and not self._learns_constants

    @property
    def _learns_constants(self) -> bool:
        """Whether a constant is a parameter, so that data is to keep the graph."""
        return any(
            isinstance(value, torch.Tensor) and value.requires_grad
            for value in self.constants().values()
        )

    @property
    def _is_written_in_leaves(self) -> bool:
        """Whether no hook over TensorDicts comes after its twin over leaves, and nothing happens on the way in.

        A hook on the way in that comes after `_is_forward` is one that this property knows nothing of.
        """
        kind, assigned = type(self), vars(self)
        twins = (*self._twins, *((hook, "_is_forward") for hook in _INWARDS))
        return self._is_forward and all(
            _place(kind, ours) <= _place(kind, td) and td not in assigned and ours not in assigned
            for td, ours in twins
        )

    @property
    def _is_forward(self) -> bool:
        """Whether nothing happens on the way in, as far as the settings decide."""
        return not (self.in_keys_inv or self.out_keys_inv)

    def counted(
        self, leaves: Leaves, root: Leaves | None, rows: Sequence[int] | None
    ) -> dict[str, Any]:
        """Change the state by what is seen of all rows of an env, and return the constants of the hook that follows.

        This is how rows that are recorded together pass a transform with state. One that does not write it sees
        TensorDicts.

        Args:
            leaves: what a step or a reset produced, tensors.
            root: memory at the root of the step; None at a reset.
            rows: which rows these are; None: all.
        """
        return self.constants()

    # --------------------------------------------------------------------------- over TensorDicts

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        changes = self.step_leaves(LeavesOf(td), LeavesOf(next_td), self._constants_outside())
        return written(next_td, changes)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return written(td_reset, self.reset_leaves(LeavesOf(td_reset), self._constants_outside()))

    def _constants_outside(self) -> dict[str, Any]:
        """Return what the hooks over leaves use where those over TensorDicts are derived from them."""
        if type(self).state is not FusableTransform.state and self.state():
            raise NotImplementedError(
                f"{type(self).__name__} has state, which changes with what is seen of all rows together. "
                "Derive it from CoupledTransform as well, and write _observe_rows and _call, as VecNorm does."
            )
        return self.constants()


class MomentTransform(FusableTransform):
    """Base of fusable transforms that treat resets and steps alike, and see nothing else.

    A concrete one writes `moment_leaves`; the hooks over TensorDicts go through `_call`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import MomentTransform
        >>> class Squares(MomentTransform):
        ...     def moment_leaves(self, leaves, constants):
        ...         return {("square",): leaves[("observation",)] ** 2}
        >>> data = TensorDict(observation=torch.tensor([1.0, 3.0]), batch_size=[2])
        >>> Squares()(data)["square"]
        tensor([1., 9.])
    """

    _twins = tuple((name, "moment_leaves") for name in ("_step", "_call", "_reset"))

    def moment_leaves(self, leaves: Leaves, constants: Mapping[str, Any]) -> Changes:
        """Transform what a reset or a step produced; gives changes to ``leaves``.

        Args:
            leaves: what a reset or a step produced, by path.
            constants: what `constants` gave, perhaps as arrays of another namespace.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not write moment_leaves. Write it, or write _call as in any "
            "Transform."
        )

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        return self.moment_leaves(following, constants)

    def reset_leaves(self, fresh: Leaves, constants: Mapping[str, Any]) -> Changes:
        return self.moment_leaves(fresh, constants)

    _step = Transform._step

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return written(next_td, self.moment_leaves(LeavesOf(next_td), self._constants_outside()))

    _reset = Transform._reset_like_step


def _place(kind: type, name: str) -> int:
    """Return the position, among the bases of a class, of the one that defines ``name``."""
    return next(place for place, base in enumerate(kind.__mro__) if name in vars(base))
