"""Simulators that begin the next episode in the step that ends one.

Such a step returns the first observation of the new episode together with the done flag. Here it is
taken apart: ``next`` belongs to the old episode, and what the simulator said of the new one is kept
for the reset that follows, which then does not touch the simulator.

Conventions
    rows   elements of the batch, bool of shape (*batch,).
    begun  rows whose new episode the simulator has started and that was not asked for yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool
from envkit.data.merging import choose_leaf, merge_rows
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.data.resets import collect_reset_masks
from envkit.data.transition import leaves
from envkit.env.base import EnvBase
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    NoParentError,
    NotCallableError,
    ResetMaskError,
)
from envkit.specs import Composite, Stacked, StackedComposite, TensorSpec, Unbounded
from envkit.transforms.core.transform import Transform, TransformLike
from envkit.transforms.core.transformed_env import TransformedEnv


class _AutoReset(Transform):
    """Keep what a simulator says of episodes it has begun, until a reset asks for it."""

    gives_nan = True  # in place of last observations that were not shown
    remembers_rows = True

    _changes_with_use = ("_rows", "_first")

    def __init__(self) -> None:
        super().__init__()
        self._rows: torch.Tensor | None = None
        self._first: TensorDictBase | None = None

    def _base(self) -> EnvBase:
        """The base env, which must come right before this transform."""
        container = self.container
        if container is None:
            raise NoParentError(
                f"{type(self).__name__} undoes what a simulator does, and works only in an "
                f"environment: TransformedEnv(env, {type(self).__name__}())."
            )
        if not container.steps_first(self):
            raise ArgumentError(
                f"{type(self).__name__} must be the first transform of its env, since it undoes what "
                "the simulator does: use env.insert_transform(0, ...)."
            )
        return container.base_env

    def _ended(self, td: TensorDictBase, next_td: TensorDictBase) -> torch.Tensor:
        """Return which rows have ended in this step; rows that it led on are not at their first observation any more."""
        rows = self._base()._rows_done(next_td)
        stepped = td.get(rules.STEP, None)
        if stepped is None:
            self._rows = self._first = None
            return rows
        if self._rows is not None:
            self._rows = self._rows & ~stepped
        return rows & stepped

    def _keep(self, rows: torch.Tensor, next_td: TensorDictBase, keys: Iterable[Key]) -> None:
        """Remember what ``next_td`` says of the new episodes of some rows."""
        first = next_td.select(*keys, strict=False)
        for key in self._base().done_keys:
            first.set(key, torch.zeros_like(next_td.get(key)))
        if self._first is not None and self._rows is not None:
            first = merge_rows(self._first, first, {(): rows})
            rows = rows | self._rows
        self._rows, self._first = rows, first

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        rows = self._rows
        if rows is None or self._asked(td) is None:
            return td
        for key in self._base().reset_keys:
            mask = td.get(key, None)
            if mask is not None:
                td.set(key, rules.still_to_reset(mask, rows))
        return td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        rows, first, asked = self._rows, self._first, self._asked(td)
        self._rows = self._first = None
        if asked is None or rows is None or first is None:
            return td_reset
        for path, value in leaves(first):
            key = as_key(path)
            shown = td_reset.get(key, None)  # if there are other rows to reset
            td_reset.set(key, value if shown is None else choose_leaf(rows & asked, value, shown))
        left = rows & ~asked
        if bool(left.any()):
            self._rows, self._first = left, first
        return td_reset

    def _asked(self, td: TensorDictBase) -> torch.Tensor | None:
        """Return which rows a reset is asked for; None when it is for all, without a mask."""
        env = self._base()
        masks = collect_reset_masks(td, env.done_levels, env.full_done_spec)
        rows = None
        for mask in masks.values():
            own = rules.reduce_mask(mask, td.batch_size, len(td.batch_size))
            rows = own if rows is None else rows | own
        return rows

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        raise NotCallableError(
            f"{type(self).__name__} works on the steps of an env and cannot be called on data. Put it into a "
            "TransformedEnv."
        )


def _number(name: str, value: float | str) -> float:
    """Take a number that may be NaN or infinite, or its name."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{name} is {value!r}, but must be a number or 'nan'. Pass 0.0, for example."
        ) from error


class AutoResetTransform(_AutoReset):
    """Take apart the steps of a simulator that resets itself; see `AutoResetEnv`.

    Args:
        replace: put fill values in the place of the observations of a step that ended an episode, since
            the simulator does not tell the true ones. False leaves those of the new episode there.
        fill_float: fill value of floating-point observations; "nan" or a number.
        fill_int: fill value of integer observations; unsigned ones wrap around.
        fill_bool: fill value of bool observations.

    Observations whose spec does not allow the fill value are declared unbounded.

    Example:
        >>> import gymnasium
        >>> from envkit import AutoResetTransform, GymWrapper, TransformedEnv
        >>> class SelfResetting(gymnasium.Wrapper):
        ...     def step(self, action):
        ...         result = self.env.step(action)
        ...         ended = result[2] or result[3]
        ...         return (self.env.reset()[0], *result[1:]) if ended else result
        >>> cartpole = gymnasium.make("CartPole-v1", max_episode_steps=2)
        >>> env = GymWrapper(SelfResetting(cartpole))
        >>> env = TransformedEnv(env, AutoResetTransform(fill_float=0.0))
        >>> env.rollout(2)["next", "observation"][-1]
        tensor([0., 0., 0., 0.])
        >>> env.close()
    """

    _in_repr = ("replace",)

    def __init__(
        self,
        *,
        replace: bool = True,
        fill_float: float | str = "nan",
        fill_int: int = -1,
        fill_bool: bool = False,
    ):
        super().__init__()
        self.replace = as_bool("replace", replace)
        self.fill_float = _number("fill_float", fill_float)
        self.fill_int = as_int("fill_int", fill_int, least=None, meaning="what integers are there")
        self.fill_bool = as_bool("fill_bool", fill_bool)

    def _fill(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.tensor(self.fill_float).to(dtype)
        if dtype == torch.bool:
            return torch.tensor(self.fill_bool)
        return torch.tensor(self.fill_int).to(dtype)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        rows = self._ended(td, next_td)
        if not bool(rows.any()):
            return next_td
        keys = self._base().observation_keys
        self._keep(rows, next_td, keys)
        if self.replace:
            self._hide(rows, next_td, {as_path(key) for key in keys})
        return next_td

    def _hide(
        self, rows: torch.Tensor, td: TensorDictBase, shown: set[Path], place: Path = ()
    ) -> None:
        """Put fill values in the place of what is ``shown`` of some rows, in each part of an uneven stack too."""
        for path, value in list(leaves(td, place)):
            if isinstance(value, torch.Tensor):
                if path in shown:
                    fill = self._fill(value.dtype).to(value.device).expand(value.shape)
                    td.set(as_key(path[len(place) :]), rules.choose(rows, fill, value))
            elif isinstance(value, LazyStackedTensorDict) and not is_non_tensor(value):
                dim, parts = value.stack_dim, value.tensordicts
                each = rows.unbind(dim) if dim < rows.ndim else [rows] * len(parts)
                for own, part in zip(each, parts, strict=True):
                    self._hide(own, part, shown, path)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        self._base()
        return self._allowed(observation_spec) if self.replace else observation_spec

    def _allowed(self, spec: Any) -> Any:
        """Extend the leaves of a spec to allow the fill value, in each member of a stack too."""
        if isinstance(spec, Stacked | StackedComposite):
            return spec._each(self._allowed)
        if isinstance(spec, Composite):
            return spec._map(self._allowed)
        return spec if spec.dtype is None else _allowing(spec, self._fill(spec.dtype))


def _allowing(leaf: TensorSpec, value: torch.Tensor) -> TensorSpec:
    shape = [max(size, 1) for size in leaf.shape]  # a size may be open
    filled = value.to(leaf.device).expand(shape)
    return (
        leaf if leaf.is_in(filled) else Unbounded(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    )


class VecGymEnvTransform(_AutoReset):
    """Put the true last observations of a self-resetting vector env in their place.

    The base env gives the first observation of the new episode in ``next``, and the true last one under
    ``(final_name, *key)``, both declared in its observation spec. Here the latter becomes ``next``,
    and the former what the following reset gives. The node ``final_name`` disappears.

    Args:
        final_name: node of the true last observations.
        missing_obs_value: what stands for a last observation the base env did not give.

    Raises:
        ResetMaskError: (a RuntimeError) a partial reset is not that of the rows that are done: such
            a simulator resets no other ones.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import Categorical, Composite, EnvBase, TransformedEnv, Unbounded
        >>> class CountsToTwo(EnvBase):
        ...     def __init__(self):
        ...         super().__init__(batch_size=[1])
        ...         final = Composite(count=Unbounded((1, 1)), shape=[1])
        ...         self.observation_spec = Composite(
        ...             count=Unbounded((1, 1)), final=final, shape=[1]
        ...         )
        ...         self.action_spec = Categorical(2, shape=(1, 1))
        ...     def _reset(self, td):
        ...         self.count = torch.zeros(1, 1)
        ...         return TensorDict(
        ...             count=self.count, final={"count": self.count}, batch_size=[1]
        ...         )
        ...     def _step(self, td):
        ...         last = self.count + 1
        ...         self.count = last % 2
        ...         return TensorDict(
        ...             count=self.count,
        ...             final=TensorDict(count=last, batch_size=[1]),
        ...             reward=torch.ones(1, 1),
        ...             terminated=last == 2,
        ...             batch_size=[1],
        ...         )
        ...     def _set_seed(self, seed):
        ...         pass
        >>> env = TransformedEnv(CountsToTwo(), VecGymEnvTransform())
        >>> data = env.rollout(4, break_when_any_done=False)
        >>> data["next", "count"].flatten()
        tensor([1., 2., 1., 2.])
        >>> data["count"].flatten()
        tensor([0., 1., 0., 1.])
    """

    def __init__(self, final_name: str = "final", missing_obs_value: float = torch.nan):
        super().__init__()
        self.final_name = final_name
        self.missing_obs_value = _number("missing_obs_value", missing_obs_value)

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        rows = self._ended(td, next_td)
        if bool(rows.any()):
            shown = self._base().observation_keys
            keys = [key for key in shown if as_path(key)[0] != self.final_name]
            self._keep(rows, next_td, keys)
            for key in keys:
                first = next_td.get(key)
                last = next_td.get((self.final_name, *as_path(key)), None)
                last = torch.full_like(first, self.missing_obs_value) if last is None else last
                next_td.set(key, rules.choose(rows, last, first))
        return self._without_final(next_td)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        return self._without_final(super()._reset(td, td_reset))

    def _without_final(self, td: TensorDictBase) -> TensorDictBase:
        return td.exclude(self.final_name, inplace=True)

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        asked = self._asked(td)
        if asked is None:
            return td
        begun = torch.zeros_like(asked) if self._rows is None else self._rows
        if bool(asked.all()) and not bool(begun.all()):
            self._rows = self._first = None  # all rows begin again, by a real reset
        elif not asked.equal(begun):
            raise ResetMaskError(
                f"rows {asked.nonzero().squeeze(-1).tolist()} are to be reset, but a vector env that "
                "resets by itself can begin again only the rows that are done, here "
                f"{begun.nonzero().squeeze(-1).tolist()}. Pass that mask, or none to reset all."
            )
        return super()._reset_env_preprocess(td)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        self._base()
        if self.final_name in observation_spec.keys():
            del observation_spec[self.final_name]
        return observation_spec


class AutoResetEnv(TransformedEnv):
    """An env whose simulator resets itself, with its steps taken apart.

    ``EnvClass(..., auto_reset=True)`` makes one.

    Args:
        base_env: env whose step gives, with a done flag, the first observation of the new episode.
        transform: more transforms, after the `AutoResetTransform`; or one of these that you made.

    Example:
        >>> import gymnasium
        >>> from envkit import GymWrapper
        >>> class SelfResetting(gymnasium.Wrapper):
        ...     def step(self, action):
        ...         result = self.env.step(action)
        ...         ended = result[2] or result[3]
        ...         return (self.env.reset()[0], *result[1:]) if ended else result
        >>> cartpole = gymnasium.make("CartPole-v1", max_episode_steps=3)
        >>> env = GymWrapper(SelfResetting(cartpole), auto_reset=True)
        >>> data = env.rollout(5, break_when_any_done=False)
        >>> data["next", "done"].flatten()
        tensor([False, False,  True, False, False])
        >>> data["next", "observation"].isnan().any(-1)
        tensor([False, False,  True, False, False])
        >>> env.close()
    """

    def __init__(self, base_env: EnvBase, transform: TransformLike | None = None):
        first = transform if isinstance(transform, _AutoReset) else AutoResetTransform()
        super().__init__(base_env, first)
        if transform is not None and transform is not first:
            self.append_transform(transform)
