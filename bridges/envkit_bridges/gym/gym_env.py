"""Gymnasium environments by their registered names: which library makes them, with which keywords, one or a vector of them.

`GymEnv` decides what is made; how an env object is stepped is in `gym_wrapper`. The keywords that an env takes are
checked as far as possible without making it.

Conventions
    made by  what the library calls to make an env, its entry point: a class mostly.
"""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, Self, cast

from envkit.arrays.integers import as_int
from envkit.batched.parallel import ParallelEnv
from envkit.data.arguments import require_option
from envkit.data.keywords import refuse_unknown
from envkit.errors import ArgumentTypeError
from envkit.specs.annotations import BatchSize, Device
from envkit_bridges.gym.backend import gym_backend, gym_library
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.gym.vector import frame_skipping
from envkit_bridges.libraries import EnvNames, Simulator, keywords_told, parameters_of


class MaybeInWorkers:
    """Base of a class of envs that takes ``num_workers``: above 1, what is made is a `ParallelEnv` of so many."""

    def __new__(cls, *args: Any, num_workers: int = 1, **kwargs: Any) -> Self:
        meaning = "the number of processes, or 1 to have the env in this one"
        num_workers = as_int("num_workers", num_workers, least=1, meaning=meaning)
        if num_workers > 1:
            make: Any = partial(cls, *args, **kwargs)
            return cast(Self, ParallelEnv(num_workers, make))
        return super().__new__(cls)


class GymEnv(MaybeInWorkers, GymWrapper):
    """Make an env of Gymnasium by name; see `GymWrapper` for its entries.

    Args:
        env_name: registered id, e.g. "CartPole-v1".
        categorical_action_encoding: integers for discrete actions and observations, not one-hot.
        from_pixels: render rgb arrays and add them as ``pixels``, uint8 (height, width, 3).
        pixels_only: with ``from_pixels``, leave the state observation out.
        frame_skip: inner steps per step, at least 1; rewards are summed, and the end of an episode stops them.
        num_envs: 0 for a single env; k > 0 for gymnasium's own vector env of k of them, batch size
            ``(k,)``. Its vectorisation is "sync" without autoreset, unless ``vectorization_mode``
            and ``vector_kwargs`` say otherwise.
        backend: the gym library to make it with, see `set_gym_backend`; the current one by default.
        num_workers: above 1, the result is a `ParallelEnv` of so many such envs, or vector envs.
        info: record what the info of a first step holds, see `set_info_dict_reader`. By default infos are
            left out.
        convert_actions_to_numpy: False hands actions to the simulator as tensors.
        batch_size: empty for a single env; ``num_envs`` sets that of vector envs.
        device: where data is delivered, "cpu" by default.
        **make_kwargs: go to ``gymnasium.make``, or to ``gymnasium.make_vec`` with ``num_envs``.

    Raises:
        ValueError: ``num_envs`` is negative.
        ArgumentTypeError: (a TypeError) ``env_name`` is no name, or ``num_envs`` no int.
        OptionError: (a TypeError) neither this class, nor ``make``, nor that env knows a keyword.
        ArgumentError: (a ValueError) the env does not draw in this ``render_mode``.

    Example:
        >>> from envkit import GymEnv
        >>> env = GymEnv("CartPole-v1")
        >>> env.action_spec.shape, env.observation_spec["observation"].shape
        (torch.Size([2]), torch.Size([4]))
        >>> td = env.reset(seed=0)
        >>> td["observation"].dtype
        torch.float32
        >>> env.close()
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(lambda: sorted(gym_backend("registry")))  # type: ignore[assignment]

    def __init__(
        self,
        env_name: str,
        *,
        categorical_action_encoding: bool = False,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int = 1,
        num_envs: int = 0,
        num_workers: int = 1,
        backend: str | ModuleType | None = None,
        info: bool = False,
        convert_actions_to_numpy: bool = True,
        device: Device | None = "cpu",
        batch_size: BatchSize | None = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
        **make_kwargs: Any,
    ):
        meaning = "the number of envs of a vector env, or 0 for one env"
        num_envs = as_int("num_envs", num_envs, least=0, meaning=meaning)
        _require_name(env_name)
        library = gym_library(backend)
        if from_pixels:
            make_kwargs.setdefault("render_mode", "rgb_array")
        require_render_mode(library, env_name, make_kwargs.get("render_mode"))
        given = list(make_kwargs)
        known = partial(known_to_env, library, env_name, parameters_of(GymEnv))
        with keywords_told(f"GymEnv({env_name!r})", given, known):
            if num_envs:
                env = _make_vector(library, env_name, num_envs, frame_skip, make_kwargs)
                frame_skip = 1  # it is in each of the envs
            else:
                env = library.make(env_name, **make_kwargs)
        super().__init__(
            env,
            categorical_action_encoding,
            frame_skip=frame_skip,
            from_pixels=from_pixels,
            pixels_only=pixels_only,
            convert_actions_to_numpy=convert_actions_to_numpy,
            info=info,
            device=device,
            batch_size=batch_size,
            run_type_checks=run_type_checks,
            allow_done_after_reset=allow_done_after_reset,
        )
        self.env_name = env_name

    @classmethod
    def require_keywords(cls, *args: object, **kwargs: object) -> None:
        """Check keywords of the constructor as far as that can be done without making an env.

        Raises:
            OptionError: (a TypeError) one is unknown, and the env is known not to take it.
            ArgumentError: (a ValueError) the env does not draw in this ``render_mode``.
        """
        env_name = args[0] if args else kwargs.get("env_name")
        backend: Any = kwargs.get("backend")
        library = gym_library(backend)
        require_render_mode(library, env_name, kwargs.get("render_mode"))
        if not kwargs.get("num_envs"):  # gymnasium.make_vec takes others
            shown = inspect.signature(cls).parameters.values()
            own = [one.name for one in shown if one.kind is not one.VAR_KEYWORD]
            require_known(library, env_name, kwargs, own)


def _require_name(env_name: object) -> None:
    if not isinstance(env_name, str) and not hasattr(env_name, "entry_point"):
        fix = (
            "GymWrapper(env)" if hasattr(env_name, "step") else "GymEnv('CartPole-v1'), for example"
        )
        raise ArgumentTypeError(
            f"env_name is {env_name!r}, of type {type(env_name).__name__}, but must be the name of "
            f"a registered env, or its spec. Use {fix}."
        )


def _make_vector(
    library: ModuleType, env_name: str, num_envs: int, frame_skip: int, kwargs: dict[str, Any]
) -> Simulator:
    """Make a vector env, of single envs without autoreset unless ``kwargs`` ask for another."""
    mode = kwargs.pop("vectorization_mode", "sync")
    if str(getattr(mode, "value", mode)) in ("sync", "async"):
        options = {"autoreset_mode": library.vector.AutoresetMode.DISABLED}
        kwargs["vector_kwargs"] = {**options, **(kwargs.get("vector_kwargs") or {})}
    if frame_skip > 1:
        wrappers = [*(kwargs.get("wrappers") or ()), frame_skipping(library, frame_skip)]
        kwargs["wrappers"] = wrappers
    return library.make_vec(env_name, num_envs=num_envs, vectorization_mode=mode, **kwargs)


def known_to_env(library: ModuleType, env_name: object, of_class: Iterable[str]) -> list[str]:
    """List ``of_class`` keywords, those of ``gymnasium.make``, and of what makes the env, where that is known."""
    made_by = _made_by(library, env_name)
    named = [*of_class, *parameters_of(library.make)]
    with contextlib.suppress(Exception):  # what a library says of its envs is a hint
        named += [] if made_by is None else parameters_of(made_by)
    return [name for name in dict.fromkeys(named) if name not in ("env", "id")]


def require_known(
    library: ModuleType, env_name: object, keywords: Collection[str], of_class: Collection[str]
) -> None:
    """Check keywords against those of an env, unless it takes any; nothing is made, but its module may be imported.

    Raises:
        OptionError: (a TypeError) one is unknown.
    """
    asked = [
        name
        for name in keywords
        if name not in of_class and name not in parameters_of(library.make)
    ]
    made_by = _made_by(library, env_name) if asked else None
    if made_by is None:
        return
    try:
        parameters = inspect.signature(made_by).parameters.values()
    except (TypeError, ValueError):
        return  # of some callables Python knows no signature
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        refuse_unknown(f"GymEnv({env_name!r})", asked, known_to_env(library, env_name, of_class))


def require_render_mode(library: ModuleType, env_name: object, mode: object) -> None:
    """Check that the class of an env says that it draws in a mode; one that names no modes is believed.

    Gymnasium makes lists of frames, and a window, of single arrays and texts.

    Raises:
        ArgumentError: (a ValueError) it does not.
    """
    if mode is None:
        return
    metadata = getattr(_made_by(library, env_name), "metadata", None) or {}
    modes = list(metadata.get("render_modes") or [])
    further = [f"{one}_list" for one in modes if isinstance(one, str)]
    if "rgb_array" in modes or "rgb_array_list" in modes:
        further.append("human")
    if modes:
        require_option(f"render_mode of {env_name!r}", mode, dict.fromkeys((*modes, *further)))


def _made_by(library: ModuleType, env_name: object) -> Any:
    """Return what makes an env; None where the library does not say."""
    made_by = getattr(env_name, "entry_point", None)
    with contextlib.suppress(Exception):
        made_by = made_by or library.spec(env_name).entry_point
        return pkgutil.resolve_name(made_by) if isinstance(made_by, str) else made_by
    return None
