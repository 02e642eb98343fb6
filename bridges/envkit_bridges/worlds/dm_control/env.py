"""DeepMind Control: the tasks of its suite by name, and env objects of `dm_control`, as stateful envs.

An env object is given the form of a gymnasium env, see `as_gym`. All else is `GymWrapper`'s: rows in workers, whole
rollouts, resuming, copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

from envkit.data.arguments import as_bool
from envkit.data.keywords import known_to, refuse_unknown
from envkit.env.options import EnvOptions
from envkit.errors import ArgumentTypeError, OptionError
from envkit.specs.annotations import Device
from envkit_bridges.gym.in_workers import MaybeInWorkers
from envkit_bridges.gym.wrapper import GymWrapper
from envkit_bridges.libraries import EnvNames, keywords_told, parameters_of, require, require_name
from envkit_bridges.worlds.dm_control.as_gym import ControlAsGym
from envkit_bridges.worlds.dm_control.library import (
    draw_without_window,
    env_names,
    fetching_names,
    import_suite,
    tasks_by_domain,
    without_advice,
)
from envkit_bridges.worlds.dm_control.pictures import require_mapping

__all__ = [
    "DMControlEnv",
    "DMControlWrapper",
    "build",
    "env_names",
    "fetching_names",
    "require_env",
    "require_keywords",
]


def require_env(name: str) -> None:
    """Check that the suite has a pair "domain/task".

    Raises:
        UnknownEnvError: (a RuntimeError and a ValueError) it has not; the message gives those closest to it.
    """
    require_name("dm_control", name, env_names())


def require_keywords(name: str, given: Mapping[str, Any]) -> None:
    """Check the keywords that `build` will be given; nothing is made.

    Raises:
        OptionError: (a TypeError) `DMControlEnv`, or the task that ``task_kwargs`` are for, does not know one.
        ArgumentTypeError: (a TypeError) ``task_kwargs`` are no dict.
    """
    refuse_unknown("DMControlEnv", given, known_to(DMControlEnv) or [])
    domain, _, task = name.partition("/")
    of_task = require_mapping("task_kwargs", given.get("task_kwargs"), "{'time_limit': 5}")
    made_by = import_suite()._DOMAINS[domain].SUITE[task]
    refuse_unknown(f"task_kwargs of {name!r}", of_task, parameters_of(made_by))


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
    """An env object of dm_control behind the TensorDict interface; unbatched and batch-locked.

    Each observation is an entry of its own in the dtype of the library, float64 mostly; scalars have shape (1,), the
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
    """

    libname = "dm_control"
    available_envs: ClassVar[Sequence[Any]] = EnvNames(tasks_by_domain)  # type: ignore[assignment]
    task_name: str | None = None

    def __init__(
        self,
        env: Any,
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
                    **require_mapping(
                        "render_kwargs", render_kwargs, "{'height': 84, 'width': 84}"
                    ),
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
    def get_library_name(env: Any) -> str:
        """Name the library: "dm_control"."""
        return "dm_control"


class DMControlEnv(MaybeInWorkers, DMControlWrapper):
    """A task of DeepMind Control's suite by domain and name; see `DMControlWrapper`.

    Args:
        env_name: the domain, "cartpole".
        task_name: the task, "swingup"; ``task`` is the same.
        from_pixels, pixels_only, frame_skip, camera_id, render_kwargs, categorical_action_encoding, device: of
            `DMControlWrapper`.
        task_kwargs, environment_kwargs, visualize_reward: of ``dm_control.suite.load``:
            ``task_kwargs=dict(time_limit=5)`` say.
        num_workers: above 1, the result is a `ParallelEnv` of so many such envs.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    Raises:
        UnknownEnvError: (a RuntimeError and a ValueError) the suite has no such pair; the message names the nearest.
        OptionError: (a TypeError) no task is named, or two; a keyword of the task or its environment is unknown.
        MissingLibraryError: dm_control is not installed.
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
            require_mapping("task_kwargs", task_kwargs, "{'time_limit': 5}"),
            require_mapping("environment_kwargs", environment_kwargs, "{'flat_observation': True}"),
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

    def _told_first(self) -> list[str]:
        skipped = [] if self.frame_skip == 1 else [f"frame_skip={self.frame_skip}"]
        return [repr(self.env_name), repr(self.task_name), *skipped]


def _loaded(
    domain: str,
    task: str,
    task_kwargs: dict[str, Any],
    environment_kwargs: dict[str, Any],
    *,
    visualize_reward: bool,
) -> Any:
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


def _require_control(env: Any) -> None:
    if not all(
        hasattr(env, name) for name in ("physics", "observation_spec", "action_spec", "step")
    ):
        fix = (
            "DMControlEnv with domain and task"
            if isinstance(env, str)
            else "dm_control.suite.load(...)"
        )
        raise ArgumentTypeError(
            f"DMControlWrapper was given {env!r}, of type {type(env).__name__}, but wraps an env object of "
            f"dm_control. Use {fix}."
        )
