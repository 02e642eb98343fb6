"""Several transforms one after the other, and plain functions as transforms.

`Compose` decides the order: forward hooks run first to last, those on the way in run last to first.
It does not know environments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast, overload

import torch
from tensordict import TensorDictBase
from torch import nn

from envkit import rules
from envkit.data.paths import Key, as_path
from envkit.errors import ArgumentError, ArgumentTypeError, TransformIndexError, TransformOwnerError
from envkit.lazy_imports import late
from envkit.specs import Composite
from envkit.transforms.core.transform import Transform, TransformLike

_HOOKS = ("_call", "_step", "_reset", "_inv_call", "_reset_env_preprocess")


class CallableTransform(Transform):
    """A function ``td -> td`` as a transform: run on what a reset and what each step produced.

    It must not add entries, since it declares none.

    Args:
        function: takes the TensorDict of the new moment, and returns it changed or another one.
    """

    def __init__(self, function: Callable[[TensorDictBase], TensorDictBase]):
        super().__init__()
        self.function = function
        self._keeps_flags = False  # as its first call has shown

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        flags = {} if self._keeps_flags else _flags_of(next_td)
        try:
            out = self.function(next_td)
        except Exception as error:
            error.add_note(f"{_name_of(self.function)} was called as a transform: {_HOW_CALLED}")
            raise
        if not isinstance(out, TensorDictBase):
            raise ArgumentError(
                f"the function {_name_of(self.function)} that is used as a transform returned "
                f"{type(out).__name__}, but must return a TensorDict. Return the one that it was called with, or a new one."
            )
        for key, dtype in flags.items():
            if (leaf := out.get(key, None)) is not None and leaf.dtype != dtype:
                raise ArgumentError(
                    f"the function {_name_of(self.function)} that is used as a transform changed {key!r} from {dtype} to "
                    f"{leaf.dtype}. {_HOW_CALLED}"
                )
        self._keeps_flags = True
        return out

    _reset = Transform._reset_like_step

    def extra_repr(self) -> str:
        """Show the function."""
        return _name_of(self.function)


_HOW_CALLED = (
    "A function is called with the TensorDict of the new moment, done flags and reward included. Return it with an "
    "entry changed: td.set('observation', td['observation'] / 2)."
)


def _flags_of(td: TensorDictBase) -> dict[Key, torch.dtype]:
    """Return the dtypes of done flags by key."""
    flags: Any = [key for key in td.keys(True, True) if as_path(key)[-1] in rules.DONE_LEAVES]
    return {key: td.get(key).dtype for key in flags}


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def as_transform(value: Any) -> Transform:
    """Take a transform as it is, and wrap a function ``td -> td``.

    Raises:
        ArgumentError: it is neither.
        ArgumentTypeError: (a TypeError) it is a transform of TorchRL's, other than a primer. Called as a
            function it would change data and no specs, and see neither resets nor steps. Or a class.
    """
    if isinstance(value, Transform):
        return value
    if _is_torchrl(value):
        return late("from_torchrl_transform")(value)
    if not callable(value):
        several = isinstance(value, list | tuple | nn.ModuleList)
        fix = (
            "Put several into one: Compose(t1, t2)."
            if several
            else "Pass StepCounter(), for example."
        )
        raise ArgumentError(
            f"a transform is {value!r}, of type {type(value).__name__}, but must be a Transform or a function of a "
            f"TensorDict. {fix}"
        )
    if isinstance(value, type) and issubclass(value, Transform):
        raise ArgumentTypeError(
            f"{value.__name__} is a class, but must be a transform. Make one: {value.__name__}()."
        )
    function: Callable[..., Any] = value
    return CallableTransform(function)


def _is_torchrl(value: object) -> bool:
    return any(
        kind.__name__ == "Transform" and kind.__module__.startswith("torchrl.envs.")
        for kind in type(value).__mro__
    )


class _Members(nn.ModuleList):
    """The transforms of a `Compose`, whose edits are those of the Compose.

    Args:
        owner: the Compose.
    """

    def __init__(self, owner: Compose):
        super().__init__()
        vars(self)["_owner_ref"] = weakref.ref(owner)

    @property
    def _owner(self) -> Compose:
        owner = vars(self)["_owner_ref"]()
        assert owner is not None
        return owner

    def _get_name(self) -> str:
        return "ModuleList"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_owner_ref"}

    def __setitem__(self, index: int, module: Any) -> None:
        owner = self._owner
        index = index + len(owner) if index < 0 else index
        transform = as_transform(module)
        if transform is owner[index]:
            return
        owner.insert(index, transform)
        owner.pop(index + 1)

    def __delitem__(self, index: int | slice) -> None:
        for place in sorted(range(len(self))[index] if isinstance(index, slice) else [index])[::-1]:
            self._owner.pop(place)

    def __iadd__(self, modules: Any) -> Self:
        return self.extend(modules)

    def append(self, module: Any) -> Self:
        self._owner.append(module)
        return self

    def insert(self, index: int, module: Any) -> None:
        self._owner.insert(index, module)

    def extend(self, modules: Any) -> Self:
        for module in list(modules):
            self._owner.append(module)
        return self

    def pop(self, key: int | slice = -1) -> Any:
        return self._owner.pop(cast(int, key))


class Compose(Transform):
    """A sequence of transforms.

    Args:
        *args: transforms or functions ``td -> td``, or one list of them.
        transforms: the list, as a keyword; None where they are positional.

    Raises:
        ArgumentError: (a ValueError) an item is not callable.
        TransformIndexError: (an IndexError and a ValueError) an index is out of range.

    Example:
        >>> from envkit import Compose, GymEnv, RewardSum, StepCounter
        >>> env = GymEnv("CartPole-v1").append_transform(Compose(RewardSum(), StepCounter()))
        >>> env.rollout(3)["next", "step_count"].flatten()
        tensor([1, 2, 3])
        >>> env.close()
    """

    transforms: nn.ModuleList

    @overload
    def __init__(self, *args: TransformLike | Sequence[TransformLike]): ...

    @overload
    def __init__(self, *, transforms: Sequence[TransformLike]): ...

    def __init__(self, *args: Any, transforms: Any = None):
        super().__init__()
        if args and transforms is not None:
            raise ArgumentError(
                f"{len(args)} transforms and transforms={transforms!r} were given. Pass all of them one way."
            )
        transforms = args if transforms is None else tuple(transforms)
        if len(transforms) == 1 and isinstance(transforms[0], list | tuple):
            transforms = tuple(transforms[0])
        super().__setattr__("transforms", _Members(self))
        for transform in transforms:
            self.insert(len(self), transform)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; ``transforms`` are put in the place of those that are there."""
        if name != "transforms":
            super().__setattr__(name, value)
            return
        transforms = [as_transform(one) for one in value]
        while len(self):
            self.pop()
        for transform in transforms:
            self.insert(len(self), transform)

    # ---------------------------------------------------------------------------------- the sequence

    def append(self, transform: TransformLike) -> None:
        """Add a transform at the end, in place; of a Compose, its members.

        Args:
            transform: a transform without an env, or a function ``td -> td``.

        Example:
            >>> from envkit import Compose, RewardSum, StepCounter
            >>> transforms = Compose(RewardSum())
            >>> transforms.append(StepCounter())
            >>> len(transforms)
            2
        """
        transform = as_transform(transform)
        if not isinstance(transform, Compose):
            self.insert(len(self), transform)
            return
        transform._require_unowned()
        for member in list(transform):
            member.reset_parent()
            self.insert(len(self), member)

    def insert(self, index: int, transform: TransformLike) -> None:
        """Add a transform before the one at ``index``, in place; a negative one counts from the end.

        Args:
            index: from ``-len`` to ``len``.
            transform: a transform without an env, or a function ``td -> td``.

        Example:
            >>> from envkit import Compose, RewardSum, StepCounter
            >>> transforms = Compose(RewardSum())
            >>> transforms.insert(0, StepCounter())
            >>> [type(transform).__name__ for transform in transforms]
            ['StepCounter', 'RewardSum']
        """
        if not -len(self) <= index <= len(self):
            raise TransformIndexError(
                f"index is {index}, but there are {len(self)} transforms. Pass one from {-len(self)} to "
                f"{len(self)}; {len(self)} adds it at the end."
            )
        transform = as_transform(transform)
        transform._belong_to(self)
        index = index + len(self) if index < 0 else index
        nn.ModuleList.insert(self.transforms, index, transform)
        if not self.training or self.container is not None:
            transform.eval()
        self._changed()

    def pop(self, index: int = -1) -> Transform:
        """Take a transform out, in place; it has no parent then.

        Args:
            index: of the transform; the last one by default.

        Example:
            >>> from envkit import Compose, RewardSum, StepCounter
            >>> transforms = Compose(RewardSum(), StepCounter())
            >>> type(transforms.pop()).__name__, len(transforms)
            ('StepCounter', 1)
        """
        popped = self[index]
        nn.ModuleList.__delitem__(self.transforms, index)
        popped.reset_parent()
        self._changed()
        return popped

    def _changed(self) -> None:
        """Notify the environment that its specs must be read again."""
        owner = self._owner
        if owner is not None:
            owner._changed()

    def __len__(self) -> int:
        return len(self.transforms)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)  # type: ignore[arg-type]

    def __reversed__(self) -> Iterator[Transform]:
        return reversed(self.transforms)  # type: ignore[arg-type]

    def __getitem__(self, index: int | slice) -> Transform:
        """Return a transform; a slice gives a `Compose` of clones, which share their buffers."""
        if isinstance(index, slice):
            return Compose(*(transform.clone() for transform in list(self)[index]))
        if not -len(self) <= index < len(self):
            places = f"Pass one from {-len(self)} to {len(self) - 1}."
            fix = places if len(self) else "Append one first."
            raise TransformIndexError(
                f"index is {index}, but there are {len(self)} transforms. {fix}"
            )
        return self.transforms[index]  # type: ignore[return-value]

    def flat(self) -> list[Transform]:
        return [leaf for transform in self for leaf in transform.flat()]

    @property
    def is_flat(self) -> bool:
        order = type(self).__mro__
        derived = {name for kind in order[: order.index(Compose)] for name in vars(kind)}
        return derived.isdisjoint(_HOOKS) and all(transform.is_flat for transform in self)

    def _belong_to(self, owner: Any) -> None:
        for transform in self:
            if transform._owner is not self:
                raise TransformOwnerError(
                    f"{type(transform).__name__} of this Compose was given to another one since. Pass "
                    "transform.clone() to one of them."
                )
        super()._belong_to(owner)

    def clone(self) -> Compose:
        return Compose(*(transform.clone() for transform in self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self.transforms)["_owner_ref"] = weakref.ref(self)
        for transform in self:
            transform._belong_to(self)

    # --------------------------------------------------------------------------------- first to last

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        for transform in self:
            next_td = transform._call(next_td)
        return next_td

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        for transform in self:
            tensordict = transform(tensordict)
        return tensordict

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        for transform in self:
            next_td = transform._step(td, next_td)
        return next_td

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        for transform in self:
            td_reset = transform._reset(td, td_reset)
        return td_reset

    def _set_seed(self, seed: int | None) -> None:
        for transform in self:
            transform._set_seed(seed)

    def dump(self, **kwargs: object) -> None:
        for transform in self:
            transform.dump(**kwargs)

    def close(self) -> None:
        for transform in self:
            transform.close()

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        return self._chained("transform_input_spec", input_spec)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        return self._chained("transform_output_spec", output_spec)

    # the five hooks chain as well, for who calls them by hand

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._chained("transform_observation_spec", observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        return self._chained("transform_reward_spec", reward_spec)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        return self._chained("transform_done_spec", done_spec)

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        return self._chained("transform_action_spec", action_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        return self._chained("transform_state_spec", state_spec)

    def _chained(self, hook: str, spec: Any) -> Any:
        for transform in self:
            spec = getattr(transform, hook)(spec)
        return spec

    def transform_env_device(self, device: torch.device | None) -> torch.device | None:
        return self._chained("transform_env_device", device)

    def transform_env_batch_size(self, batch_size: torch.Size) -> torch.Size:
        return self._chained("transform_env_batch_size", batch_size)

    # --------------------------------------------------------------------------------- last to first

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        for transform in reversed(self):
            td = transform._inv_call(td)
        return td

    def _reset_env_preprocess(self, td: TensorDictBase) -> TensorDictBase:
        for transform in reversed(self):
            td = transform._reset_env_preprocess(td)
        return td

    def extra_repr(self) -> str:
        return ""
