"""Specs of spaces that Gymnasium does not know, such as those that a library of envs brings with it.

Conventions
    name  of a class of spaces: where it lies, as "minigrid.core.mission.MissionSpace", or the end of that after a dot.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from envkit.errors import ArgumentTypeError, SpecError
from envkit.specs import Composite, TensorSpec
from envkit.transport import by_value

Convert = TypeVar("Convert", bound=Callable[..., Any])

_conversions: dict[str, Callable[..., Any]] = {}


def register_gym_spec_conversion(spec_type: type | str) -> Callable[[Convert], Convert]:
    """Return a decorator that registers the function which makes the spec of a class of spaces.

    The function is called as TorchRL calls it: with the space, and with ``categorical_action_encoding`` and others as
    keywords. It returns one spec. Values of the space enter the data by `TensorSpec.encode` of it. It is used for
    subclasses too, and before the conversions that are built in. Workers that start later use it too.

    Args:
        spec_type: the class, or its name, e.g. "minigrid.core.mission.MissionSpace" or "MissionSpace".

    Raises:
        ArgumentTypeError: (a TypeError) ``spec_type`` is neither a class nor a name.

    Example:
        >>> import gymnasium
        >>> from envkit import GymWrapper, NonTensor, register_gym_spec_conversion
        >>> class Mission(gymnasium.Space):
        ...     def sample(self, mask=None, probability=None):
        ...         return "find the key"
        >>> @register_gym_spec_conversion(Mission)
        ... def mission_spec(space, **kwargs):
        ...     return NonTensor(example_data="")
        >>> class Room(gymnasium.Env):
        ...     observation_space = gymnasium.spaces.Dict(mission=Mission())
        ...     action_space = gymnasium.spaces.Discrete(2)
        ...
        ...     def reset(self, seed=None, options=None):
        ...         return {"mission": "find the key"}, {}
        >>> GymWrapper(Room()).reset()["mission"]
        'find the key'
    """
    if not isinstance(spec_type, type | str):
        raise ArgumentTypeError(
            f"spec_type is {spec_type!r}, of type {type(spec_type).__name__}, but must be a class of spaces or its name. "
            f"Pass type(space), or a name such as 'MissionSpace'."
        )

    def register(convert: Convert) -> Convert:
        _conversions[spec_type if isinstance(spec_type, str) else _name(spec_type)] = convert
        return convert

    return register


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _conversion_of(space: object) -> Callable[..., Any] | None:
    names = [_name(kind) for kind in type(space).__mro__] if _conversions else []
    for name in names:
        for known, convert in _conversions.items():
            if name == known or name.endswith(f".{known}"):
                return convert
    return None


def is_converted(space: object) -> bool:
    """Return whether a conversion is registered for a space."""
    return _conversion_of(space) is not None


def converted(space: object, *, categorical: bool, key: object) -> TensorSpec | None:
    """Return the spec that a registered conversion makes of a space; None if there is none.

    Raises:
        SpecError: the conversion returns something else than one spec.
    """
    convert = _conversion_of(space)
    if convert is None:
        return None
    spec = convert(
        space,
        dtype=None,
        device=None,
        categorical_action_encoding=categorical,
        remap_state_to_observation=True,
        batch_size=(),
    )
    if not isinstance(spec, TensorSpec) or isinstance(spec, Composite):
        raise SpecError(
            f"the conversion that is registered for {type(space).__name__}, the space of {key!r}, returned {spec!r}, of "
            f"type {type(spec).__name__}, but must return one spec of envkit. Return NonTensor() for objects, for example."
        )
    return spec


def carried_conversions() -> Callable[[], None] | None:
    """Return what registers the conversions of this process in a worker; None if there are none."""
    return partial(_take_over, by_value.dumps(_conversions)) if _conversions else None


def _take_over(pickled: bytes) -> None:
    _conversions.update(pickle.loads(pickled))
