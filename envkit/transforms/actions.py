"""Actions the user gives in another form than the env takes, and actions that are not allowed now.

On the way in these transforms turn what the user gives into what the env takes. The forward pass goes
the other way, for recorded data: an env's outputs hold no actions, and pass unchanged.

Conventions
    inner, outer  action as the env takes it, and as the user gives it.
    bin           one of the equal intervals a continuous action is cut into.
    span          sizes of the axes that are flattened into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.arrays import elementwise
from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.data.transition import stepped_rows
from envkit.errors import (
    ArgumentError,
    BatchSizeError,
    MissingKeyError,
    NoParentError,
    SpecError,
    SpecFitError,
    StatisticsError,
)
from envkit.specs import (
    Bounded,
    BoundedContinuous,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from envkit.specs.inputs import ActionInput
from envkit.transforms.core.leafwise import axis_in, box_between, require_negative, reshaped
from envkit.transforms.core.transform import Keys, Transform, as_keys, editable
from envkit.transforms.episodes import EpisodeTransform
from envkit.transforms.values import Number, as_buffer, make_room


class ActionMask(EpisodeTransform):
    """Keep the mask of a discrete action spec at what the env allows now.

    After each reset and step, the options that are set in ``td[mask_key]`` are those random actions are
    drawn from, and those that are in the action spec of the env. Rows that are not stepped or reset
    keep theirs. Random actions of an env around this env, e.g. a `SerialEnv` of such envs, are drawn
    from the allowed options too. For that, both entries keep their names and the mask stays one of 0 and 1; its action
    spec follows when they are drawn.

    Args:
        action_key: the action.
        mask_key: the allowed options, one flag for each: bool, or integers that are 0 and 1.

    Raises:
        MissingKeyError: the action or the mask is absent.
        SpecError: when specs are read: the action is not discrete.
        BatchSizeError: the data has another batch size than the env, so that its rows have no place in
            the spec.

    Example:
        >>> from envkit import ActionMask, TicTacToeEnv
        >>> env = TicTacToeEnv().append_transform(ActionMask(mask_key="mask"))
        >>> td = env.rand_step(env.reset())["next"]
        >>> int(td["mask"].sum())
        8
        >>> int(env.action_spec.mask.sum())
        8
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
                "among options: Categorical, OneHot, MultiCategorical or MultiOneHot. Name such an action with action_key=."
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
            raise NoParentError(
                "ActionMask is in no env, but changes the action spec of one. Put it into a TransformedEnv."
            )
        if mask is None:
            raise self._missing(self.mask_key, new, "Pass mask_key=.")
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
    """A transform for which the user gives a choice, which is converted and refused as envs do; it may draw."""

    only_adds_done = True

    _rule: ActionInput | None = None  # of one row, once specs are read
    _changes_with_use = ("_generator",)
    _generator: torch.Generator | None = None

    def _set_seed(self, seed: int | None) -> None:
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def _rule_for(self, leaf: TensorSpec, batch_dims: int) -> None:
        self._rule = ActionInput(leaf[(0,) * batch_dims], self.out_keys_inv[0])

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        (key,) = self.out_keys_inv
        value = td.get(key, None)
        if self._rule is not None and value is not None:
            td.set(key, self._rule.take(value, td.batch_size, rows=stepped_rows(td)))
        return super()._inv_call(td)


def _chosen(value: torch.Tensor) -> torch.Tensor:
    """Return the place of the largest entry, of bools too."""
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

    Example:
        >>> from envkit import DiscreteActionProjection, GymEnv
        >>> env = GymEnv("CartPole-v1")
        >>> env = env.append_transform(DiscreteActionProjection(2, 5))
        >>> env.action_spec.shape
        torch.Size([5])
        >>> env.rollout(3)["action"].shape
        torch.Size([3, 5])
        >>> env.close()
    """

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
                f"{num_actions_effective}. Pass a larger max_actions."
            )
        self.include_forward = as_bool("include_forward", include_forward)
        self._is_one_hot = True

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        option = _chosen(value) if self._is_one_hot else value
        drawn = torch.randint(
            self.num_actions_effective, option.shape, generator=self._generator, dtype=option.dtype
        ).to(option.device)
        option = torch.where(option < self.num_actions_effective, option, drawn)
        if not self._is_one_hot:
            return option
        return torch.nn.functional.one_hot(option, self.num_actions_effective).to(value.dtype)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        (key,) = self.in_keys_inv
        value = tensordict.get(key)
        missing = self.max_actions - self.num_actions_effective
        is_of_env = value.shape[tensordict.batch_dims :][-1:] == (self.num_actions_effective,)
        if not self.include_forward or not self._is_one_hot or not is_of_env:
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


def _interval_counts(num_intervals: int | Sequence[int] | torch.Tensor) -> int | list[int]:
    """Check a number of bins, or one for each element."""
    listed = (
        num_intervals.tolist()
        if isinstance(num_intervals, torch.Tensor | np.ndarray)
        else num_intervals
    )
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


def _sampling(strategy: Any) -> SamplingStrategy:
    try:
        return SamplingStrategy.MEDIAN if strategy is None else SamplingStrategy(strategy)
    except ValueError as error:
        raise ArgumentError(
            f"sampling is {strategy!r}, but must be a SamplingStrategy. Pass ActionDiscretizer.SamplingStrategy.RANDOM, or "
            f"another one of {', '.join(SamplingStrategy.__members__)}."
        ) from error


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

    Example:
        >>> import torch
        >>> from envkit import ActionDiscretizer, GymEnv
        >>> discretizer = ActionDiscretizer(5, out_action_key="bin")
        >>> env = GymEnv("Pendulum-v1").append_transform(discretizer)
        >>> td = env.step(env.reset().set("bin", torch.tensor([4])))
        >>> td["action"]
        tensor([1.6000])
        >>> env.close()
    """

    SamplingStrategy = SamplingStrategy

    low: torch.Tensor
    high: torch.Tensor

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
        self.sampling = _sampling(sampling)
        self.categorical = as_bool("categorical", categorical)
        self.register_buffer("low", torch.zeros(()), persistent=False)
        self.register_buffer("high", torch.zeros(()), persistent=False)

    def _bins(self, size: int) -> list[int]:
        """Numbers of bins of the ``size`` elements of an action."""
        counts = self.num_intervals
        return [counts] * size if isinstance(counts, int) else counts

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        has_axis = self.low.ndim > 0
        bins = self._bins(self.low.shape[-1] if has_axis else 1)
        if not self.categorical:
            parts = [_chosen(part) for part in value.split(bins, -1)]
            value = torch.stack(parts, -1) if has_axis else parts[0]
        counts = torch.tensor(bins if has_axis else bins[0], device=self.low.device)
        width = (self.high - self.low) / counts
        return self.low + width * (value + self._place(value)).to(self.low.dtype)

    def _place(self, value: torch.Tensor) -> torch.Tensor | float:
        """Return the place within each bin, from 0 to 1."""
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
        """Return the spec of the bins of an action that is one number."""
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


class _ActionForm(Transform):
    """Base of transforms that give an action another form.

    Args:
        in_keys_inv: actions of the env; ``"action"`` by default.
        out_keys_inv: the user's names of them; the same by default.
        in_keys, out_keys: actions of recorded data that `forward` changes; those of the env by default.
    """

    only_adds_done = True

    def __init__(self, in_keys_inv: Keys, out_keys_inv: Keys, in_keys: Keys, out_keys: Keys):
        inner = ["action"] if in_keys_inv is None else as_keys(in_keys_inv)
        recorded = (inner or ["action"]) if in_keys is None else as_keys(in_keys)
        super().__init__(recorded, out_keys, inner, out_keys_inv)

    @property
    def _declared_keys(self) -> list[Key]:
        return []  # out_keys are those of recorded data

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        return next_td

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Turn the actions of recorded data, as the env took them, into those of the user."""
        return self._convert(tensordict, self.in_keys, self.out_keys, self._apply_transform)

    def _leaf_given(self, key: Key, leaf: TensorSpec, batch_dims: int) -> TensorSpec:
        """Return which actions the user gives, for those of ``leaf`` that the env takes."""
        raise NotImplementedError

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        for inner, outer in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            leaf = action_spec.get(inner, None)
            if leaf is None:
                raise MissingKeyError(
                    f"{type(self).__name__} changes the action {inner!r}, but the env has "
                    f"{list(action_spec.keys(True, True))}. Name one of these with in_keys_inv=."
                )
            if inner != outer:
                del action_spec[inner]
            action_spec[outer] = self._leaf_given(inner, leaf, action_spec.ndim)
        return action_spec


# -------------------------------------------------------------------------------------------- scale


def _require_one_shape(**numbers: torch.Tensor) -> None:
    """Check that two tensors of numbers have one shape, unless one of them is a single number."""
    sizes = {name: tuple(value.shape) for name, value in numbers.items()}
    if () not in sizes.values() and len(set(sizes.values())) > 1:
        raise ArgumentError(
            f"ActionScaling was given numbers of the shapes {sizes}. Pass a single number, or tensors of one shape."
        )


class ActionScaling(_ActionForm):
    """Let the user give actions between -1 and 1, which become those of the env.

    The env is given ``action * scale + loc``; forward computes ``(action - loc) / scale``. Without numbers
    they are those of the action's bounds: the middle, and half the width.

    Args:
        in_keys_inv, out_keys_inv: the action of the env, ``"action"`` by default, and the user's name of
            it. An empty list changes recorded data only, and needs numbers.
        in_keys, out_keys: the action of recorded data, which forward changes; that of the env by default.
        loc, scale: numbers, or tensors of one shape that broadcast to the action; both or none.
        standard_normal: False: the user gives actions between 0 and 1.

    Raises:
        ArgumentError: (a ValueError) only one of ``loc`` and ``scale``, tensors of two shapes, a scale of
            zero, more than one action, or no action and no numbers.
        SpecFitError: (a RuntimeError) when specs are read: there are no numbers, and the action is not
            continuous with finite bounds.
        StatisticsError: (a RuntimeError) without numbers, data comes before the specs of an env were read.

    Example:
        >>> from envkit import ActionScaling, GymEnv
        >>> env = GymEnv("Pendulum-v1").append_transform(ActionScaling())
        >>> env.action_spec.space.high, env.base_env.action_spec.space.high
        (tensor([1.]), tensor([2.]))
        >>> env.close()
    """

    _in_repr = ("loc", "scale", "standard_normal")

    computes_only = True
    loc: torch.Tensor | None
    scale: torch.Tensor | None

    def __init__(
        self,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        *,
        loc: Number | None = None,
        scale: Number | None = None,
        standard_normal: bool = True,
    ):
        super().__init__(in_keys_inv, out_keys_inv, in_keys, out_keys)
        if len(self.in_keys_inv) > 1 or len(self.in_keys) > 1:
            raise ArgumentError(
                f"ActionScaling was given the actions {self.in_keys_inv or self.in_keys}, but scales one. "
                "Use one ActionScaling for each."
            )
        if (loc is None) != (scale is None):
            raise ArgumentError(
                f"ActionScaling has loc={loc} and scale={scale}. Pass both or none."
            )
        if not self.in_keys_inv and loc is None:
            raise ArgumentError(
                "ActionScaling with in_keys_inv=[] has no action whose bounds say how to scale. Pass loc= "
                "and scale=."
            )
        self.standard_normal = as_bool("standard_normal", standard_normal)
        self._from_bounds = loc is None
        self.register_buffer("loc", None if loc is None else as_buffer("loc", loc))
        self.register_buffer("scale", None if scale is None else as_buffer("scale", scale))
        if self.loc is not None and self.scale is not None:
            _require_one_shape(loc=self.loc, scale=self.scale)
        if self.scale is not None and bool((self.scale == 0).any()):
            raise ArgumentError(
                f"scale is {self.scale}, but must not be zero, because values are divided by it. Pass other numbers."
            )

    @classmethod
    def from_stats(
        cls,
        *,
        mean: torch.Tensor | None = None,
        std: torch.Tensor | None = None,
        low: torch.Tensor | None = None,
        high: torch.Tensor | None = None,
        eps: float = 1e-6,
        **kwargs: Any,
    ) -> ActionScaling:
        """Make one of the statistics of recorded actions.

        Args:
            mean, std: these become ``loc`` and ``scale``; or
            low, high: their middle and half their distance do.
            eps: least scale.
            **kwargs: see the class.

        Raises:
            ArgumentError: (a ValueError) neither pair is given, both are, or half of one; or they have two
                shapes.

        Example:
            >>> import torch
            >>> from envkit import ActionScaling
            >>> low, high = torch.tensor([0.0]), torch.tensor([10.0])
            >>> ActionScaling.from_stats(low=low, high=high).normalize(torch.tensor([7.5]))
            tensor([0.5000])
        """
        pairs = [pair for pair in ((mean, std), (low, high)) if pair != (None, None)]
        if len(pairs) != 1 or None in pairs[0]:
            raise ArgumentError(
                "from_stats needs mean and std, or low and high, and got "
                f"mean={mean}, std={std}, low={low}, high={high}. Pass one of the two pairs, whole."
            )
        first, second = (torch.as_tensor(number) for number in pairs[0])
        names = ("low", "high") if mean is None else ("mean", "std")
        _require_one_shape(**dict(zip(names, (first, second), strict=True)))
        if mean is None:
            first, second = (second + first) / 2, (second - first) / 2
        return cls(loc=first, scale=second.clamp_min(eps), **kwargs)

    @property
    def initialized(self) -> bool:
        """Whether there are numbers."""
        return self.loc is not None

    def _numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.loc is None or self.scale is None:
            raise StatisticsError(
                "ActionScaling has no loc and scale yet. Pass them, or put it into a TransformedEnv whose "
                "action has bounds."
            )
        return self.loc, self.scale

    def normalize(self, action: torch.Tensor) -> torch.Tensor:
        """Turn an action of the env into one of the user.

        Args:
            action: shape ``(*batch, *event)``.

        Raises:
            ArgumentError: (a ValueError) ``loc`` or ``scale`` would give it another shape.

        Example:
            >>> import torch
            >>> from envkit import ActionScaling
            >>> ActionScaling(loc=1.0, scale=2.0).normalize(torch.tensor([5.0]))
            tensor([2.])
        """
        self._require_shape(action)
        value = elementwise.standardised(action, *self._numbers())
        return value if self.standard_normal else (value + 1) / 2

    def denormalize(self, action: torch.Tensor) -> torch.Tensor:
        """Turn an action of the user into one of the env; see `normalize`.

        Args:
            action: shape ``(*batch, *event)``.

        Example:
            >>> import torch
            >>> from envkit import ActionScaling
            >>> ActionScaling(loc=1.0, scale=2.0).denormalize(torch.tensor([2.0]))
            tensor([5.])
        """
        self._require_shape(action)
        value = action if self.standard_normal else action * 2 - 1
        return elementwise.scaled(value, *self._numbers())

    def _require_shape(self, action: torch.Tensor) -> None:
        """Refuse numbers that would give the action another shape."""
        for name, numbers in zip(("loc", "scale"), self._numbers(), strict=True):
            if numbers.ndim and not _fits(numbers.shape, action.shape):
                raise ArgumentError(
                    f"ActionScaling has {name} of shape {tuple(numbers.shape)}, but the action has shape "
                    f"{tuple(action.shape)}. Pass numbers that broadcast to the action's last axes."
                )

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self.normalize(value)

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return self.denormalize(value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        make_room(self, ("loc", "scale"), state_dict, prefix)
        if self._from_bounds and self.loc is not None:  # before the bounds were read there are none
            state_dict.setdefault(prefix + "loc", self.loc)
            state_dict.setdefault(prefix + "scale", self.scale)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]

    def _leaf_given(self, key: Key, leaf: TensorSpec, batch_dims: int) -> TensorSpec:
        box = _finite_box(leaf)
        if not self._from_bounds:
            if box is None:
                return Unbounded(leaf.shape, leaf.device, leaf.dtype)
            return box_between(*(self.normalize(end).to(leaf.dtype) for end in (box.low, box.high)))
        if box is None:
            raise SpecFitError(
                f"ActionScaling scales {key!r} by its bounds, but its spec is {leaf}, which is not continuous "
                "with finite bounds. Pass loc= and scale=."
            )
        middle = (box.high + box.low) / 2, (box.high - box.low) / 2
        self.loc, self.scale = (_of_one_row(number, batch_dims) for number in middle)
        least = -1.0 if self.standard_normal else 0.0
        return Bounded(least, 1.0, leaf.shape, leaf.device, leaf.dtype)


def _fits(shape: torch.Size, action: torch.Size) -> bool:
    """Check whether numbers of a shape broadcast to an action, and leave its shape as it is."""
    pairs = zip(reversed(shape), reversed(action), strict=False)
    return len(shape) <= len(action) and all(size in (1, of_action) for size, of_action in pairs)


def _finite_box(leaf: TensorSpec) -> BoundedContinuous | None:
    """Return a leaf that is a box with finite bounds; None where it is not."""
    if not isinstance(leaf, BoundedContinuous):
        return None
    largest = torch.finfo(leaf.dtype).max
    ends = (leaf.low, leaf.high)
    return leaf if all(bool((end.abs() < largest).all()) for end in ends) else None


def _of_one_row(number: torch.Tensor, batch_dims: int) -> torch.Tensor:
    """Return the numbers of one row where all rows have the same, so that they fit any batch."""
    rows = number.flatten(0, batch_dims - 1) if batch_dims else number[None]
    return rows[0].clone() if bool((rows == rows[:1]).all()) else number


# -------------------------------------------------------------------------------------------- shape


class FlattenAction(_ActionForm):
    """Let the user give an action with the axes from ``first_dim`` to ``last_dim`` in one.

    Args:
        first_dim, last_dim: axes of the action of the env, negative.
        in_keys_inv, out_keys_inv: actions of the env, ``"action"`` by default, and the user's names of them.
        in_keys, out_keys: actions of recorded data, which forward changes; those of the env by default.
        allow_positive_dim: accept axes that count from the first one after the batch.
        action_shape: sizes of the flattened axes, where there is no env that says them.

    Raises:
        ArgumentError: (a ValueError) an axis is not negative and that is not allowed, or ``last_dim``
            comes before ``first_dim``.
        SpecFitError: (a RuntimeError) when specs are read: an action has no such axes, or spells choices.
        StatisticsError: (a RuntimeError) the sizes of the axes are not known.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import FlattenAction
        >>> data = TensorDict(action=torch.zeros(4, 2, 3), batch_size=[4])
        >>> FlattenAction(action_shape=(2, 3))(data)["action"].shape
        torch.Size([4, 6])
    """

    _in_repr = ("first_dim", "last_dim")

    computes_only = True

    def __init__(
        self,
        first_dim: int = -2,
        last_dim: int = -1,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
        allow_positive_dim: bool = False,
        *,
        action_shape: Sequence[int] | None = None,
    ):
        super().__init__(in_keys_inv, out_keys_inv, in_keys, out_keys)
        allowed = {"allow_positive": allow_positive_dim}
        self.first_dim = require_negative("first_dim", first_dim, **allowed)
        self.last_dim = require_negative("last_dim", last_dim, **allowed)
        if (first_dim < 0) == (last_dim < 0) and last_dim < first_dim:
            raise ArgumentError(
                f"last_dim is {last_dim}, but must not come before first_dim, {first_dim}. Exchange them."
            )
        self.action_shape = None if action_shape is None else tuple(action_shape)
        self._spans: dict[Path, tuple[int, ...]] = {}

    def _axes(self, batch_dims: int) -> tuple[int, int]:
        return axis_in(self.first_dim, batch_dims), axis_in(self.last_dim, batch_dims)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Flatten the actions of recorded data."""
        first, last = self._axes(tensordict.batch_dims)
        return self._convert(
            tensordict,
            self.in_keys,
            self.out_keys,
            lambda value: elementwise.flattened(value, first, last),
        )

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        # counted from the end, the flat axis is where the last of the span will
        first, last = self._axes(td.batch_dims)
        axis = last if last < 0 else first
        for inner, outer in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            span = self._span(inner)
            self._convert(
                td, [outer], [inner], lambda value, span=span: value.unflatten(axis, span)
            )
        return td

    def _span(self, key: Key) -> tuple[int, ...]:
        span = self._spans.get(as_path(key), self.action_shape)
        if span is None:
            raise StatisticsError(
                f"FlattenAction does not know which shape {key!r} has in the env. Pass action_shape=, or put "
                "it into a TransformedEnv."
            )
        return span

    def _leaf_given(self, key: Key, leaf: TensorSpec, batch_dims: int) -> TensorSpec:
        first, last = self._axes(batch_dims)
        spells = leaf.is_choice and (leaf._encoding_ndim or getattr(leaf, "mask", None) is not None)
        if spells or -leaf.ndim + batch_dims > min(first, last) or max(first, last) >= leaf.ndim:
            raise SpecFitError(
                f"FlattenAction flattens the axes {self.first_dim} to {self.last_dim} of {key!r}, but its "
                f"spec is {leaf}, with {batch_dims} axes of the batch. The axes must be there, and must not "
                "spell or mask choices."
            )
        sizes = tuple(leaf.shape)
        self._spans[as_path(key)] = sizes[first % leaf.ndim : last % leaf.ndim + 1]
        return reshaped(leaf, lambda value: elementwise.flattened(value, first, last))


# ---------------------------------------------------------------------------------------- structure


class MeanActionSelector(Transform):
    """Let a policy over Gaussian beliefs act in an env: observations become beliefs, actions their means.

    ``observation`` is shown as ``("observation", "mean")``, with a covariance of zeros in
    ``("observation", "var")``; of the policy's action the env takes ``("action", "mean")``. The action
    spec stays that of the mean; a plain action is taken as it is.

    Args:
        observation_key: the observation, of shape ``(*batch, n)``; its covariance is ``(*batch, n, n)``.
        action_key: the action of the env.

    Raises:
        SpecFitError: (a RuntimeError) when specs are read: there is no such observation, or it has no axis.

    Example:
        >>> from envkit import GymEnv, MeanActionSelector
        >>> env = GymEnv("Pendulum-v1").append_transform(MeanActionSelector())
        >>> td = env.reset()
        >>> td["observation", "mean"].shape, td["observation", "var"].shape
        (torch.Size([3]), torch.Size([3, 3]))
        >>> env.close()
    """

    only_adds_done = True

    def __init__(self, observation_key: str = "observation", action_key: str = "action"):
        super().__init__()
        self.observation_key = observation_key
        self.action_key = action_key

    def _belief(self, key: str) -> tuple[Path, Path]:
        return (*as_path(key), "mean"), (*as_path(key), "var")

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        value = next_td.get(self.observation_key)
        mean, var = self._belief(self.observation_key)
        covariance = value.new_zeros((*value.shape, value.shape[-1]))
        del next_td[self.observation_key]
        return next_td.set(mean, value).set(var, covariance)

    _reset = Transform._reset_like_step

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        given = td.get(self.action_key, None)
        if not isinstance(given, TensorDictBase):
            return td
        return td.set(self.action_key, given.get("mean"))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        leaf = observation_spec.get(self.observation_key, None)
        if not isinstance(leaf, TensorSpec) or leaf.ndim <= observation_spec.ndim:
            raise SpecFitError(
                f"MeanActionSelector makes a belief of {self.observation_key!r}, whose spec is {leaf}. It "
                "must have an axis besides the batch. Pass observation_key=."
            )
        mean, var = self._belief(self.observation_key)
        size = leaf.shape[-1]
        del observation_spec[self.observation_key]
        observation_spec[mean] = leaf
        observation_spec[var] = Unbounded((*leaf.shape, size), leaf.device, leaf.dtype)
        return observation_spec
