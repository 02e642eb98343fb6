"""DeepMind Control: the tasks of its suite by name, and env objects of `dm_control`, as stateful envs.

An env object is given the form of a gymnasium env, see `ControlAsGym`. All else is `GymWrapper`'s: rows in workers, whole
rollouts, resuming, copies.

Conventions
    pair     domain and task: "cartpole" and "swingup"; "cartpole/swingup" in ids.
    control  env object of dm_control: a ``dm_env.Environment`` on MuJoCo, maybe in wrappers of its suite.
    last     of an episode: a step with discount 1 is truncated (time is up), with another one terminated.
    options  keywords of ``Physics.render``.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np

from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool, as_keywords
from envkit.data.keywords import known_to, refuse_unknown
from envkit.env.options import EnvOptions
from envkit.errors import ArgumentError, ArgumentTypeError, NotResetError, OptionError, SpecError
from envkit.process_wide import variables_kept
from envkit.specs.annotations import Device
from envkit_bridges import offscreen
from envkit_bridges.gym.gym_env import MaybeInWorkers
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.libraries import (
    EnvNames,
    Simulator,
    keywords_told,
    parameters_of,
    quietly,
    require,
    require_name,
)

if TYPE_CHECKING:
    from envkit_bridges.gym.backend import GymSpace, SpaceValue


def require_drawable(physics: Any, options: Mapping[str, Any]) -> None:
    """Check what is asked of a picture, before the library looks for something to draw it with.

    Raises:
        OptionError: (a TypeError) ``Physics.render`` does not know a keyword.
        ArgumentTypeError: (a TypeError) the camera is neither a number nor a name, or a size no int.
        ArgumentError: (a ValueError) the model has no such camera, or no frame of that size is kept for it.
    """
    refuse_unknown("render of dm_control", options, parameters_of(type(physics).render))
    _require_camera(physics.model, options.get("camera_id", -1))
    for side, kept in (("height", "offheight"), ("width", "offwidth")):
        if side in options:
            _require_size(physics.model, side, options[side], kept)


def _require_camera(model: Any, camera: Any) -> None:
    names = [model.id2name(number, "camera") for number in range(model.ncam)]
    message = f"camera_id is {camera!r}, but this model has {_listed(names)}. Pass one of these, or -1, the free camera."
    if isinstance(camera, str):
        if camera not in names:
            raise ArgumentError(message)
        return
    try:
        number = operator.index(camera)
    except TypeError as error:
        raise ArgumentTypeError(message) from error
    if not -1 <= number < len(names):
        raise ArgumentError(message)


def _listed(names: list[str]) -> str:
    return ", ".join(f"{at} ({name!r})" for at, name in enumerate(names)) or "no camera"


def _require_size(model: Any, side: str, value: object, kept: str) -> None:
    number = as_int(side, value, least=1, meaning="the pixels of a frame")
    most = getattr(model.vis.global_, kept)
    if number > most:
        raise ArgumentError(
            f"{side} is {number}, but MuJoCo draws at most {most} for this model. Ask for less, or set "
            f"env.physics.model.vis.global_.{kept} = {number} and draw with env.render({side}={number})."
        )


def import_suite() -> ModuleType:
    """Import dm_control's suite, which finds no window where there is none and warns of it."""
    with quietly(), _on_the_calling_thread():
        suite = require("dm_control.suite")
    draw_without_window()
    return suite


@contextlib.contextmanager
def _on_the_calling_thread() -> Iterator[None]:
    """Make OSMesa draw where it is called, as EGL does: its own thread could not be left at exit without errors."""
    name = "DISABLE_RENDER_THREAD_OFFLOADING"  # read when dm_control is imported
    with variables_kept(name):
        os.environ.setdefault(name, "1")
        yield


def draw_without_window() -> None:
    """Defer the choice how dm_control draws to its first picture: some tasks draw in a reset, or a user's code does."""
    drawing: Any = importlib.import_module("dm_control._render")

    def first_renderer(*args: object, **kwargs: Any) -> Any:
        offscreen.prepare()
        if drawing.Renderer is first_renderer:
            importlib.reload(drawing)  # MUJOCO_GL was set after the import
        return drawing.Renderer(*args, **kwargs)

    if drawing.Renderer.__module__ != __name__ and not offscreen.is_chosen():
        drawing.Renderer = first_renderer


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Suppress what MuJoCo says of the age of dm_control's own models."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return "is deprecated" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


def env_names() -> list[str]:
    """List all pairs of the suite, "cartpole/swingup" say, sorted.

    Raises:
        MissingLibraryError: dm_control is not installed.
    """
    return sorted("/".join(pair) for pair in import_suite().ALL_TASKS)


def tasks_by_domain() -> list[tuple[str, list[str]]]:
    """List the domains with their tasks: those of the benchmark first, then extra ones."""
    suite = import_suite()
    tasks: dict[str, list[str]] = {}
    for domain, task in (*suite.BENCHMARKING, *suite.EXTRA):
        tasks.setdefault(domain, []).append(task)
    return list(tasks.items())


class ControlAsGym:
    """An env object of dm_control, called like a gymnasium env; what else it has is looked up on it.

    Args:
        control: the env object.
        render_kwargs: of its physics' ``render``: ``camera_id``, ``height``, ``width``, ...

    Attributes:
        np_random: where its task draws; assigned by ``reset(seed=)``. None where that is not known.
    """

    render_mode = "rgb_array"

    def __init__(self, control: Simulator, render_kwargs: Mapping[str, Any]):
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

    def step(self, action: SpaceValue) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
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


def _bare(control: Simulator) -> Simulator:
    """Return what is inside wrappers of dm_control's suite."""
    while "_env" in vars(control):
        control = control._env
    return control


def _place_of_generator(control: object) -> tuple[Any, str] | None:
    """Return whose attribute of which name holds the random state that episodes are drawn from."""
    bare = _bare(control)
    # composer's, the suite's
    places = [(bare, "_random_state"), (getattr(bare, "task", None), "_random")]
    for owner, name in places:
        if isinstance(getattr(owner, name, None), np.random.RandomState):
            return owner, name
    return None


def _space_of(spec: Any) -> GymSpace:
    """Return the gymnasium space of a spec of ``dm_env``, or of a dict of them."""
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


def require_env(name: str) -> None:
    """Check that the suite has a pair "domain/task".

    Raises:
        UnknownEnvError: (a RuntimeError and a ValueError) it has not; the message gives those closest to it.
    """
    require_name("dm_control", name, env_names())


def require_keywords(name: str, keywords: Mapping[str, Any]) -> None:
    """Check the keywords that `build` will be given; nothing is made.

    Raises:
        OptionError: (a TypeError) `DMControlEnv`, or the task that ``task_kwargs`` are for, does not know one.
        ArgumentTypeError: (a TypeError) ``task_kwargs`` are no dict.
    """
    refuse_unknown("DMControlEnv", keywords, known_to(DMControlEnv) or [])
    domain, _, task = name.partition("/")
    of_task = as_keywords("task_kwargs", keywords.get("task_kwargs"), "{'time_limit': 5}")
    made_by = import_suite()._DOMAINS[domain].SUITE[task]
    refuse_unknown(f"task_kwargs of {name!r}", of_task, parameters_of(made_by))


def lasting(name: str, steps: int | None, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords by which the library cuts no episode of a task: `make` counts ``steps``, or with None nothing does.

    Raises:
        OptionError: (a TypeError) ``task_kwargs`` have a ``time_limit``.
    """
    of_task = as_keywords("task_kwargs", keywords.get("task_kwargs"), "{'time_limit': 5}")
    if "time_limit" in of_task:
        raise OptionError(
            f"max_episode_steps={-1 if steps is None else steps} and time_limit={of_task['time_limit']!r} say the same. Pass "
            "one of them."
        )
    return {**keywords, "task_kwargs": {**of_task, "time_limit": float("inf")}}


def build(name: str, **kwargs: Any) -> DMControlEnv:
    """Make the env of a pair "domain/task"; keywords are those of `DMControlEnv`.

    Raises:
        UnknownEnvError: (a RuntimeError and a ValueError) the suite has no such pair.
        OptionError: (a TypeError) a keyword is unknown.
    """
    require_env(name)
    refuse_unknown("DMControlEnv", kwargs, known_to(DMControlEnv) or [])
    domain, _, task = name.partition("/")
    return DMControlEnv(domain, task, **kwargs)


class DMControlWrapper(GymWrapper):
    """Give an env object of dm_control the TensorDict interface; unbatched and batch-locked.

    Each observation is its own entry in the dtype of the library, float64 mostly; scalars have shape (1,), the
    reward too. ``set_seed`` replaces the random state of the task.

    Args:
        env: of ``dm_control.suite.load``, ``dm_control.composer.Environment``, or a suite's wrapper around one.
        from_pixels: add ``pixels``, uint8 (height, width, 3), drawn without a window.
        pixels_only: with ``from_pixels``, leave the other observations out.
        frame_skip: steps of the library per step, rewards summed, stopping at the end of an episode.
        camera_id: number or name of the camera; -1 is the free one.
        render_kwargs: more for the physics' ``render``, ``dict(height=84, width=84)`` say; 240 by 320 by default.
        categorical_action_encoding: integers for discrete actions and observations, not one-hot.
        device: where data is delivered, "cpu" by default.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    Unknown public attributes are looked up on the env object: ``env.physics``, ``env.task``, ``env.control_timestep()``.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env object of dm_control.
        ValueError: ``frame_skip`` is not a positive int.
        RenderingError: (a RuntimeError) pixels are asked for and nothing can draw them here.

    Example:
        >>> from dm_control import suite
        >>> from envkit import DMControlWrapper
        >>> env = DMControlWrapper(suite.load("cartpole", "swingup"))
        >>> env.rollout(5)["velocity"].shape
        torch.Size([5, 2])
        >>> env.close()
    """

    libname = "dm_control"
    available_envs: ClassVar[Sequence[Any]] = EnvNames(tasks_by_domain)  # type: ignore[assignment]
    task_name: str | None = None

    def __init__(
        self,
        env: object,
        *,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int = 1,
        camera_id: int | str = 0,
        render_kwargs: Mapping[str, Any] | None = None,
        categorical_action_encoding: bool = False,
        device: Device | None = "cpu",
        **options: Unpack[EnvOptions],
    ):
        _require_control(env)
        draw_without_window()
        super().__init__(
            ControlAsGym(
                env,
                {
                    "camera_id": camera_id,
                    **as_keywords("render_kwargs", render_kwargs, "{'height': 84, 'width': 84}"),
                },
            ),
            categorical_action_encoding,
            frame_skip=frame_skip,
            from_pixels=from_pixels,
            pixels_only=pixels_only,
            device=device,
            **options,
        )

    @staticmethod
    def get_library_name(env: object) -> str:
        """Return the name of the library: "dm_control"."""
        return "dm_control"


class DMControlEnv(MaybeInWorkers, DMControlWrapper):
    """Make a task of DeepMind Control's suite by domain and name; see `DMControlWrapper`.

    Args:
        env_name: the domain, e.g. "cartpole".
        task_name, task: the task, e.g. "swingup"; pass one of the two.
        from_pixels: add ``pixels``, uint8 (height, width, 3), drawn without a window.
        pixels_only: with ``from_pixels``, leave the other observations out.
        frame_skip: steps of the library per step, rewards summed, stopping at the end of an episode.
        camera_id: number or name of the camera; -1 is the free one.
        render_kwargs: more for the physics' ``render``, e.g. ``dict(height=84, width=84)``; 240 by 320 by default.
        categorical_action_encoding: integers for discrete actions and observations, not one-hot.
        device: where data is delivered, "cpu" by default.
        task_kwargs, environment_kwargs, visualize_reward: go to ``dm_control.suite.load``, e.g.
            ``task_kwargs=dict(time_limit=5)``.
        num_workers: above 1, the result is a `ParallelEnv` of so many such envs.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    Raises:
        UnknownEnvError: (a RuntimeError and a ValueError) the suite has no such pair; the message names the nearest.
        OptionError: (a TypeError) no task is named, or two; a keyword of the task or its environment is unknown.
        MissingLibraryError: dm_control is not installed.

    Example:
        >>> from envkit import DMControlEnv
        >>> env = DMControlEnv("cartpole", "swingup")
        >>> data = env.rollout(5)
        >>> data["position"].shape, data["next", "reward"].dtype
        (torch.Size([5, 3]), torch.float64)
        >>> env.close()
    """

    def __init__(
        self,
        env_name: str,
        task_name: str | None = None,
        *,
        task: str | None = None,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int = 1,
        camera_id: int | str = 0,
        render_kwargs: Mapping[str, Any] | None = None,
        categorical_action_encoding: bool = False,
        task_kwargs: Mapping[str, Any] | None = None,
        environment_kwargs: Mapping[str, Any] | None = None,
        visualize_reward: bool = False,
        num_workers: int = 1,
        device: Device | None = "cpu",
        **options: Unpack[EnvOptions],
    ):
        task_name = _one_task(env_name, task_name, task)
        require_name("dm_control", f"{env_name}/{task_name}", env_names())
        control = _loaded(
            env_name,
            task_name,
            as_keywords("task_kwargs", task_kwargs, "{'time_limit': 5}"),
            as_keywords("environment_kwargs", environment_kwargs, "{'flat_observation': True}"),
            visualize_reward=as_bool("visualize_reward", visualize_reward),
        )
        super().__init__(
            control,
            from_pixels=from_pixels,
            pixels_only=pixels_only,
            frame_skip=frame_skip,
            camera_id=camera_id,
            render_kwargs=render_kwargs,
            categorical_action_encoding=categorical_action_encoding,
            device=device,
            **options,
        )
        self.env_name, self.task_name = env_name, task_name

    def _repr_arguments(self) -> list[str]:
        skipped = [] if self.frame_skip == 1 else [f"frame_skip={self.frame_skip}"]
        return [repr(self.env_name), repr(self.task_name), *skipped]


def _loaded(
    domain: str,
    task: str,
    task_kwargs: dict[str, Any],
    environment_kwargs: dict[str, Any],
    *,
    visualize_reward: bool,
) -> Simulator:
    """Load a task of the suite.

    Raises:
        OptionError: (a TypeError) the task, or the library's ``Environment``, does not know a keyword.
    """
    suite = import_suite()
    of_task = partial(parameters_of, suite._DOMAINS[domain].SUITE[task])
    of_env = partial(parameters_of, require("dm_control.rl.control").Environment)
    with (
        without_advice(),
        keywords_told(f"task_kwargs of '{domain}/{task}'", task_kwargs, of_task),
        keywords_told("environment_kwargs", environment_kwargs, of_env),
    ):
        return suite.load(
            domain,
            task,
            task_kwargs,
            environment_kwargs=environment_kwargs or None,
            visualize_reward=visualize_reward,
        )


def _one_task(env_name: object, task_name: str | None, task: str | None) -> str:
    named = [name for name in (task_name, task) if name is not None]
    if len(named) != 1:
        told = f"task_name={task_name!r} and task={task!r}" if named else "none"
        raise OptionError(
            f"DMControlEnv({env_name!r}) needs the name of one task, but was given {told}. Name it as "
            "DMControlEnv('cartpole', 'swingup'); DMControlEnv.available_envs lists all."
        )
    return named[0]


def _require_control(env: object) -> None:
    if not all(
        hasattr(env, name) for name in ("physics", "observation_spec", "action_spec", "step")
    ):
        fix = "dm_control.suite.load(...)"
        if isinstance(env, str):
            fix = "DMControlEnv with domain and task"
        raise ArgumentTypeError(
            f"DMControlWrapper was given {env!r}, of type {type(env).__name__}, but wraps an env object of "
            f"dm_control. Use {fix}."
        )
