"""PettingZoo's envs by their names, as a world: which can be made here, and one by its name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from envkit.data.arguments import as_bool
from envkit.specs.annotations import BatchSize, Device
from envkit_bridges.worlds.pettingzoo.library import (
    has_parallel,
    make,
    names,
    require_env,
    require_known,
)
from envkit_bridges.worlds.pettingzoo.wrapper import GroupMap, PettingZooWrapper

__all__ = [
    "PettingZooEnv",
    "build",
    "env_names",
    "fetching_names",
    "require_env",
    "require_keywords",
]


class _Names:
    """The tasks of PettingZoo, read from the library when looked at."""

    def __get__(self, instance: Any, owner: type) -> list[str]:
        try:
            return names()
        except ImportError:
            return []


class PettingZooEnv(PettingZooWrapper):
    """An env of PettingZoo, or of MPE2, by name; see `PettingZooWrapper`.

    Args:
        task: "family/name", as "classic/tictactoe_v3" or "mpe/simple_spread_v3"; the name alone will do.
        parallel: build the parallel form, in which all agents act in each step; False: the turn-based one (AEC).
        return_state, group_map, use_mask, categorical_actions, seed, done_on_any, device: of `PettingZooWrapper`.
        run_type_checks, allow_done_after_reset: of `EnvBase`.
        **kwargs: go to the function that builds the env, e.g. ``n_pistons=5``.

    Raises:
        UnknownEnvError: (a ValueError and a RuntimeError) there is no such task, or no parallel form of it.
        OptionError: (a TypeError) neither this class nor that env knows a keyword.
        MissingLibraryError: (an ImportError) PettingZoo, MPE2 or what they need is not installed.
    """

    available_envs: ClassVar[Sequence[str]] = _Names()  # type: ignore[assignment]

    def __init__(
        self,
        task: str,
        parallel: bool = True,
        return_state: bool = False,
        group_map: GroupMap | None = None,
        use_mask: bool = False,
        categorical_actions: bool = True,
        seed: int | None = None,
        done_on_any: bool | None = None,
        *,
        device: Device | None = "cpu",
        batch_size: BatchSize | None = None,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = True,
        **kwargs: Any,
    ):
        env = make(task, parallel=as_bool("parallel", parallel), kwargs=kwargs)
        super().__init__(
            env,
            return_state,
            group_map,
            use_mask,
            categorical_actions,
            seed,
            done_on_any,
            device=device,
            batch_size=batch_size,
            run_type_checks=run_type_checks,
            allow_done_after_reset=allow_done_after_reset,
        )
        self.task_name = self.env_name = task

    @classmethod
    def require_keywords(cls, *args: object, **kwargs: object) -> None:
        """Check keywords of the constructor, and whether the task has the form asked for; nothing is made.

        Raises:
            OptionError, UnknownEnvError, MissingLibraryError: see the constructor.
        """
        try:
            given = inspect.signature(cls).bind(*args, **kwargs)
        except TypeError:
            return  # what is wrong there is no keyword
        of_env = given.arguments.get("kwargs", {})
        if of_env or "parallel" in given.arguments:
            parallel = as_bool("parallel", given.arguments.get("parallel", True))
            require_known(given.arguments["task"], parallel=parallel, kwargs=of_env)

    def _told_first(self) -> list[str]:
        return [repr(self.task_name), f"parallel={self.parallel}"]


# -------------------------------------------------------------------------------------- as a world


def env_names() -> list[str]:
    """List the tasks that can be made here.

    Raises:
        MissingLibraryError: (an ImportError) the library is not installed.
    """
    return names()


def fetching_names() -> frozenset[str]:
    """None: what the games need comes with the packages."""
    return frozenset()


def require_keywords(name: str, given: Mapping[str, Any]) -> None:
    """Check the keywords that `build` will be given; nothing is made.

    Raises:
        OptionError: (a TypeError) neither `PettingZooEnv` nor the env knows one.
        UnknownEnvError: (a ValueError) a parallel form is asked for, and there is none.
    """
    if not given:
        return
    parallel = given.get("parallel")
    told = {**given, "parallel": has_parallel(name) if parallel is None else parallel}
    PettingZooEnv.require_keywords(name, **told)


def build(name: str, **kwargs: Any) -> PettingZooEnv:
    """Make one `PettingZooEnv`, parallel where there is such a form, unless ``parallel`` says otherwise.

    An env whose agents take turns is made with ``use_mask=True``.

    Raises:
        UnknownEnvError: (a ValueError) there is no such task; the message gives those closest to it.
    """
    parallel = kwargs.pop("parallel", None)
    parallel = has_parallel(name) if parallel is None else parallel
    if not parallel:
        kwargs.setdefault("use_mask", True)
    return PettingZooEnv(name, parallel, **kwargs)
