"""Env objects of dm_control in the form of gymnasium envs.

Conventions
    control  env object of dm_control: a ``dm_env.Environment`` on MuJoCo, maybe in wrappers of its suite.
    last     of an episode: a step with discount 1 is truncated (time is up), with another one terminated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from envkit.errors import ArgumentTypeError, NotResetError, SpecError
from envkit_bridges.libraries import require
from envkit_bridges.worlds.dm_control.pictures import require_drawable

__all__ = ["ControlAsGym"]


class ControlAsGym:
    """An env object of dm_control, called like a gymnasium env; what else it has is looked up on it.

    Args:
        control: the env object.
        render_kwargs: of its physics' ``render``: ``camera_id``, ``height``, ``width``, ...

    Attributes:
        np_random: where its task draws; assigned by ``reset(seed=)``. None where that is not known.
    """

    render_mode = "rgb_array"

    def __init__(self, control: Any, render_kwargs: Mapping[str, Any]):
        self.control = control
        self.render_kwargs = dict(render_kwargs)
        self.observation_space = _space_of(control.observation_spec())
        self.action_space = _space_of(control.action_spec())
        self.reward_space = _space_of(control.reward_spec())
        self._has_reset = not getattr(control, "_reset_next_step", True)
        self._draws = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "control" not in vars(self):
            raise AttributeError(name)
        return getattr(self.control, name)

    def __str__(self) -> str:
        return f"dm_control's {type(getattr(self.control, 'task', self.control)).__name__}"

    @property
    def unwrapped(self) -> ControlAsGym:
        """Itself: gymnasium's wrappers go around it."""
        return self

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; with a seed the task draws from a new random state."""
        if seed is not None:
            self.np_random = np.random.RandomState(seed)
        self._has_reset = False
        if self._draws:  # some tasks hand the renderer what a reset has drawn
            _make_current(self.control.physics)
        observation = self.control.reset().observation
        self._has_reset = True
        return observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; an episode that has ended is not begun again, as the library would.

        Raises:
            NotResetError: no episode is under way.
        """
        if not self._has_reset:
            raise NotResetError(
                f"no episode of {self} has begun, or the last one has ended. Reset it first."
            )
        step = self.control.step(action)
        if not step.last():
            return step.observation, step.reward, False, False, {}
        self._has_reset = False
        is_cut = step.discount == 1
        return step.observation, step.reward, not is_cut, is_cut, {}

    def render(self, **kwargs: Any) -> np.ndarray:
        """Draw the physics, uint8 (height, width, 3); see `require_drawable` for what is refused."""
        physics = self.control.physics
        options = {**self.render_kwargs, **kwargs}
        require_drawable(physics, options)
        _make_current(physics)
        self._draws = True
        return physics.render(**options)

    def close(self) -> None:
        """Free the physics with its OpenGL context."""
        physics = _bare(self.control).physics
        self.control.close()
        with contextlib.suppress(ReferenceError):  # a composer env has freed it
            physics.free()

    @property
    def np_random(self) -> np.random.RandomState | None:
        """The random state of the task."""
        place = _place_of_generator(self.control)
        return None if place is None else getattr(*place)

    @np_random.setter
    def np_random(self, numbers: np.random.RandomState) -> None:
        place = _place_of_generator(self.control)
        if place is None:
            raise ArgumentTypeError(
                f"{self} has no random state, so it cannot be seeded. Tasks of dm_control have one: "
                "dm_control.suite.base.Task(random=...), dm_control.composer.Environment(random_state=...)."
            )
        setattr(*place, numbers)

    # dm_control leaves that out of pickles and copies of a physics
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "is_legacy": _bare(self.control).physics.legacy_step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _bare(self.control).physics.legacy_step = vars(self).pop("is_legacy")


def _make_current(physics: Any) -> None:
    """Make the OpenGL context of a physics current, which dm_control believes it is when others have drawn since."""
    context = physics.contexts.gl
    with context.make_current() as thread:
        thread.call(context._platform_make_current)


def _bare(control: Any) -> Any:
    """Give what is inside wrappers of dm_control's suite."""
    while "_env" in vars(control):
        control = control._env
    return control


def _place_of_generator(control: Any) -> tuple[Any, str] | None:
    """Say whose attribute of which name holds the random state that episodes are drawn from."""
    bare = _bare(control)
    places = [
        (bare, "_random_state"),
        (getattr(bare, "task", None), "_random"),
    ]  # composer's, the suite's
    for owner, name in places:
        if isinstance(getattr(owner, name, None), np.random.RandomState):
            return owner, name
    return None


def _space_of(spec: Any) -> Any:
    """Give the gymnasium space of a spec of ``dm_env``, or of a dict of them."""
    spaces, specs = require("gymnasium").spaces, require("dm_env").specs
    if isinstance(spec, Mapping):
        return spaces.Dict({name: _space_of(member) for name, member in spec.items()})
    if isinstance(spec, specs.DiscreteArray):
        return spaces.Discrete(spec.num_values, dtype=spec.dtype.type)
    if not isinstance(spec, specs.Array) or spec.dtype.kind not in "biuf":
        raise SpecError(
            f"{spec} has no counterpart in specs: arrays of numbers and dicts of them do. Leave it out, with a "
            "wrapper around the env object."
        )
    if spec.dtype.kind == "b":
        return spaces.MultiBinary(spec.shape)
    low, high = _bounds(spec)
    return spaces.Box(low, high, spec.shape, spec.dtype.type)


def _bounds(spec: Any) -> tuple[Any, Any]:
    if hasattr(spec, "minimum"):
        return np.broadcast_to(spec.minimum, spec.shape), np.broadcast_to(spec.maximum, spec.shape)
    if spec.dtype.kind == "f":
        return -np.inf, np.inf
    limits = np.iinfo(spec.dtype)
    return limits.min, limits.max
