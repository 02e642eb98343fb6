"""Actions the user gives in another form than the env takes, and actions that are not allowed now.

Conventions
    inner  action as the env takes it; outer: as the user gives it.
    bin    one of the equal intervals a continuous action is cut into.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.data.arguments import as_bool, as_int
from envkit.data.paths import Key, as_key, as_path
from envkit.data.transition import stepped_rows
from envkit.errors import ArgumentError, BatchSizeError, MissingKeyError, NoParentError, SpecError
from envkit.specs import (
    BoundedContinuous,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)
from envkit.specs.inputs import ActionInput
from envkit.transforms.core.base import Transform, editable
from envkit.transforms.episodes import EpisodeTransform

__all__ = ["ActionDiscretizer", "ActionMask", "DiscreteActionProjection"]


class ActionMask(EpisodeTransform):
    """Keep the mask of a discrete action spec at what the env allows now.

    After each reset and step, the options that are set in ``td[mask_key]`` are those random actions are
    drawn from, and those that are in the action spec of the env. Rows that are not stepped or reset
    keep theirs. Random actions of an env around this env (a `SerialEnv` of such envs, say) are drawn
    from the allowed options too, as long as both entries keep their names and the mask stays one of 0 and 1; its
    action spec follows when they are drawn.

    Args:
        action_key: the action.
        mask_key: the allowed options, one flag for each: bool, or integers that are 0 and 1.

    Raises:
        MissingKeyError: the action or the mask is absent.
        SpecError: when specs are read: the action is not discrete.
        BatchSizeError: the data has another batch size than the env, so that its rows have no place in
            the spec.
    """

    ACCEPTED_SPECS = (OneHot, Categorical, MultiOneHot, MultiCategorical)

    def __init__(self, action_key: Key = "action", mask_key: Key = "action_mask"):
        super().__init__([action_key, mask_key], [])
        self.action_key, self.mask_key = self.in_keys
        self.action_masks = ((self.action_key, self.mask_key),)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        leaf = input_spec["full_action_spec"].get(self.action_key, None)
        if leaf is None:
            raise MissingKeyError(
                f"ActionMask masks {self.action_key!r}, but the env has the actions "
                f"{list(input_spec['full_action_spec'].keys(True, True))}. Pass action_key=."
            )
        if not isinstance(leaf, self.ACCEPTED_SPECS):
            raise SpecError(
                f"ActionMask masks {self.action_key!r}, whose spec is {leaf}, but can only mask a choice "
                "among options: Categorical, OneHot, MultiCategorical or MultiOneHot."
            )
        return input_spec

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        self._allow(next_td, next_td, None)
        return next_td

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        self._allow(td, next_td, td.get(rules.STEP, None))
        return next_td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        self._allow(td, td_reset, self._reset_mask(td, as_path(self.mask_key)[:-1]))
        return td_reset

    def _allow(self, td: TensorDictBase, new: TensorDictBase, rows: torch.Tensor | None) -> None:
        env, mask, kept = self.container, new.get(self.mask_key, None), td.get(self.mask_key, None)
        if env is None:
            raise NoParentError("ActionMask changes the action spec of an env: put it into one.")
        if mask is None:
            raise MissingKeyError(
                f"ActionMask reads {self.mask_key!r}, but the env gives "
                f"{sorted(map(str, new.keys(True, True)))}. Pass mask_key=."
            )
        if new.batch_size != env.batch_size:
            raise BatchSizeError(
                f"ActionMask masks the action spec of an env of batch size {tuple(env.batch_size)}, and "
                f"cannot do so for data of batch size {tuple(new.batch_size)}. Give the env that batch "
                "size, and step all its rows."
            )
        if rows is not None and kept is not None:
            rows = rules.reduce_mask(rows, mask.shape, new.batch_dims)
            mask = rules.choose(rows, mask, kept)
        env.full_action_spec[self.action_key].update_mask(mask)


class _Choosing(Transform):
    """A transform for which the user gives a choice, which is converted and refused as envs do."""

    _rule: ActionInput | None = None  # of one row, once specs are read

    def _rule_for(self, leaf: TensorSpec, batch_dims: int) -> None:
        self._rule = ActionInput(leaf[(0,) * batch_dims], self.out_keys_inv[0])

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        (key,) = self.out_keys_inv
        value = td.get(key, None)
        if self._rule is not None and value is not None:
            td.set(key, self._rule.take(value, td.batch_size, rows=stepped_rows(td)))
        return super()._inv_call(td)


def _chosen(value: torch.Tensor) -> torch.Tensor:
    """Give the place of the largest entry, of bools too."""
    return (value.byte() if value.dtype == torch.bool else value).argmax(-1)


class DiscreteActionProjection(_Choosing):
    """Accept more options than the env has; those it does not have become random ones it has.

    For one policy over envs of several numbers of actions. One-hot or categorical, as the env.

    Args:
        num_actions_effective: number of options of the env.
        max_actions: number of options the user may give.
        action_key: the action.
        include_forward: when called on data, give recorded one-hot actions of the env the size of the
            user's.

    Raises:
        ArgumentError: (a ValueError) ``max_actions`` is smaller.
        SpecError: when specs are read: the env has another number of options.
    """

    only_adds_done = True

    _changes_with_use = ("_generator",)

    def __init__(
        self,
        num_actions_effective: int,
        max_actions: int,
        action_key: Key = "action",
        include_forward: bool = True,
    ):
        super().__init__(in_keys_inv=[action_key])
        self.num_actions_effective = as_int(
            "num_actions_effective",
            num_actions_effective,
            least=1,
            meaning="the options of the env",
        )
        self.max_actions = as_int(
            "max_actions", max_actions, least=1, meaning="the options the user may give"
        )
        if self.max_actions < self.num_actions_effective:
            raise ArgumentError(
                f"max_actions is {max_actions}, but must be at least num_actions_effective, "
                f"{num_actions_effective}."
            )
        self.include_forward = as_bool("include_forward", include_forward)
        self._is_one_hot = True
        self._generator: torch.Generator | None = None

    def _set_seed(self, seed: int | None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        option = _chosen(value) if self._is_one_hot else value
        drawn = torch.randint(
            self.num_actions_effective, option.shape, generator=self._generator, dtype=option.dtype
        ).to(option.device)
        option = torch.where(option < self.num_actions_effective, option, drawn)
        if not self._is_one_hot:
            return option
        return torch.nn.functional.one_hot(option, self.num_actions_effective).to(value.dtype)

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        (key,) = self.in_keys_inv
        value = tensordict.get(key)
        missing = self.max_actions - self.num_actions_effective
        is_short = (
            value.ndim > tensordict.batch_dims and value.shape[-1] + missing == self.max_actions
        )
        if not self.include_forward or not self._is_one_hot or not is_short:
            return tensordict
        return tensordict.set(key, torch.nn.functional.pad(value, (0, missing)))

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        (key,) = self.in_keys_inv
        leaf = action_spec.get(key, None)
        if not isinstance(leaf, OneHot | Categorical) or leaf.n != self.num_actions_effective:
            raise SpecError(
                f"DiscreteActionProjection gives a choice among {self.num_actions_effective} options to "
                f"{key!r}, whose spec is {leaf}. Pass num_actions_effective as the env has it, and "
                "action_key=."
            )
        self._is_one_hot = isinstance(leaf, OneHot)
        lead = leaf.shape[:-1] if self._is_one_hot else leaf.shape
        shape = (*lead, self.max_actions) if self._is_one_hot else lead
        action_spec[key] = type(leaf)(self.max_actions, shape, leaf.device, leaf.dtype)
        self._rule_for(action_spec[key], action_spec.ndim)
        return action_spec

    def extra_repr(self) -> str:
        return (
            f"num_actions_effective={self.num_actions_effective}, max_actions={self.max_actions}, "
            f"action_key={self.in_keys_inv[0]!r}"
        )


def _interval_counts(given: int | Sequence[int] | torch.Tensor) -> int | list[int]:
    """Check a number of bins, or one for each element."""
    listed = given.tolist() if isinstance(given, torch.Tensor | np.ndarray) else given
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        return [
            as_int(f"num_intervals[{number}]", count, least=1, meaning="the bins of that element")
            for number, count in enumerate(listed)
        ]
    return as_int("num_intervals", listed, least=1, meaning="how many bins, or a list of such")


class SamplingStrategy(IntEnum):
    """Where in its bin a discrete action lies."""

    MEDIAN = 0
    LOW = 1
    HIGH = 2
    RANDOM = 3


class ActionDiscretizer(_Choosing):
    """Cut a bounded continuous action into bins; the user gives the number of a bin.

    Args:
        num_intervals: number of bins, for all elements of the action or for each element of its last
            axis.
        action_key: the action of the env.
        out_action_key: name of the action the user gives; the same by default. Under another name, each
            step also writes the continuous action under its own, which is then among the states.
        sampling: which value of the bin is taken; the middle by default. RANDOM draws from the env's
            seed.
        categorical: False: the user gives one-hot bins, those of all elements side by side.

    Raises:
        ArgumentError: (a ValueError) a number of bins is below 1.
        SpecError: when specs are read: the action is not a bounded continuous one, or has another
            number of elements.
    """

    SamplingStrategy = SamplingStrategy
    only_adds_done = True

    low: torch.Tensor
    high: torch.Tensor

    _changes_with_use = ("_generator",)

    def __init__(
        self,
        num_intervals: int | Sequence[int] | torch.Tensor,
        action_key: Key = "action",
        out_action_key: Key | None = None,
        sampling: SamplingStrategy | None = None,
        categorical: bool = True,
    ):
        super().__init__(
            in_keys_inv=[action_key],
            out_keys_inv=[action_key if out_action_key is None else out_action_key],
        )
        self.num_intervals = _interval_counts(num_intervals)
        self.sampling = SamplingStrategy.MEDIAN if sampling is None else SamplingStrategy(sampling)
        self.categorical = as_bool("categorical", categorical)
        self._generator: torch.Generator | None = None
        self.register_buffer("low", torch.zeros(()), persistent=False)
        self.register_buffer("high", torch.zeros(()), persistent=False)

    def _set_seed(self, seed: int | None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def _bins(self, size: int) -> list[int]:
        """Numbers of bins of the ``size`` elements of an action."""
        counts = self.num_intervals
        return [counts] * size if isinstance(counts, int) else counts

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        if not self.low.ndim:
            bins = self._bins(1)[0]
            value = value if self.categorical else _chosen(value)
            width = (self.high - self.low) / bins
            return self.low + width * (value + self._place(value)).to(self.low.dtype)
        bins = self._bins(self.low.shape[-1])
        if not self.categorical:
            value = torch.stack([_chosen(part) for part in value.split(bins, -1)], -1)
        width = (self.high - self.low) / torch.tensor(bins, device=self.low.device)
        return self.low + width * (value + self._place(value)).to(self.low.dtype)

    def _place(self, value: torch.Tensor) -> torch.Tensor | float:
        """Give the place within each bin, from 0 to 1."""
        if self.sampling == SamplingStrategy.RANDOM:
            return torch.rand(value.shape, generator=self._generator).to(value.device)
        places = {
            SamplingStrategy.LOW: 0.0,
            SamplingStrategy.MEDIAN: 0.5,
            SamplingStrategy.HIGH: 1.0,
        }
        return places[self.sampling]

    @property
    def recorded_inputs(self) -> list[Key]:
        return [inner for inner in self.in_keys_inv if inner not in self.out_keys_inv]

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        input_spec = editable(input_spec)
        actions = input_spec["full_action_spec"].clone()
        for key in self.recorded_inputs:
            if actions.get(key, None) is not None:
                input_spec["full_state_spec"][key] = actions[key]
        return super().transform_input_spec(input_spec)

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        (inner,), (outer,) = self.in_keys_inv, self.out_keys_inv
        leaf = action_spec.get(inner, None)
        if not isinstance(leaf, BoundedContinuous):
            raise SpecError(
                f"ActionDiscretizer cuts {inner!r} into bins, but its spec is {leaf}. It must be bounded "
                "and continuous. Pass action_key=."
            )
        size = leaf.shape[-1] if leaf.ndim > action_spec.ndim else 1
        bins = self._bins(size)
        if len(bins) != size:
            raise SpecError(
                f"num_intervals is {bins}, but {inner!r} has shape {tuple(leaf.shape)}. Pass one number "
                "for each element of its last axis, or one for all."
            )
        row = (0,) * action_spec.ndim
        self.low, self.high = leaf.low[row], leaf.high[row]
        del action_spec[inner]
        has_axis = leaf.ndim > action_spec.ndim
        action_spec[outer] = self._cut(leaf, bins) if has_axis else self._cut_one(leaf, *bins)
        self._rule_for(action_spec[outer], action_spec.ndim)
        return action_spec

    def _cut_one(self, leaf: TensorSpec, bins: int) -> TensorSpec:
        """Give the spec of the bins of an action that is one number."""
        if self.categorical:
            return Categorical(bins, leaf.shape, leaf.device)
        return OneHot(bins, (*leaf.shape, bins), leaf.device)

    def _cut(self, leaf: TensorSpec, bins: list[int]) -> TensorSpec:
        if self.categorical:
            return MultiCategorical(bins, leaf.shape, leaf.device)
        return MultiOneHot(bins, (*leaf.shape[:-1], sum(bins)), leaf.device)

    def extra_repr(self) -> str:
        return (
            f"num_intervals={self.num_intervals}, action_key={as_key(as_path(self.in_keys_inv[0]))!r}, "
            f"sampling={self.sampling.name}, categorical={self.categorical}"
        )
