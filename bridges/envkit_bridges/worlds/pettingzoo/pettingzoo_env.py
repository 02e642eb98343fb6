"""PettingZoo's and MPE2's envs by their names, as a world: which there are, and how one is made.

Conventions
    task    "family/name", as "classic/tictactoe_v3"; the name alone will do.
    family  package of the library; Atari's games need ROMs of the user's, so they are made by name and not listed.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

from envkit.data.arguments import as_bool
from envkit.data.keywords import refuse_unknown
from envkit.env.groups import GroupMap
from envkit.errors import ArgumentTypeError, OptionError, UnknownEnvError
from envkit.process_wide import no_warnings
from envkit.specs.annotations import BatchSize, Device
from envkit_bridges.libraries import EnvNames, Simulator, near_name, require
from envkit_bridges.worlds.pettingzoo.pettingzoo_wrapper import PettingZooWrapper

_FAMILIES = {
    "butterfly": "pettingzoo.butterfly",
    "classic": "pettingzoo.classic",
    "mpe": "mpe2",
    "sisl": "pettingzoo.sisl",
}
_UNLISTED = {"atari": "pettingzoo.atari"}
_NAME = re.compile(r"\w+_v\d+")


def names() -> list[str]:
    """List the tasks that can be made here, read from the files of the library: nothing is built.

    Raises:
        MissingLibraryError: (an ImportError) PettingZoo or MPE2 is not installed.
    """
    return sorted(_modules(_FAMILIES))


def _modules(families: Mapping[str, str]) -> dict[str, str]:
    """Return the module of each task."""
    return {
        f"{family}/{found.name}": f"{package}.{found.name}"
        for family, package in families.items()
        for found in pkgutil.iter_modules(require(package).__path__)
        if _NAME.fullmatch(found.name)
    }


def make(task: str, *, parallel: bool, kwargs: Mapping[str, Any]) -> Simulator:
    """Build an env of the library, by its parallel or its turn-based (AEC) function.

    Raises:
        MissingLibraryError: (an ImportError) PettingZoo or MPE2 is not installed.
        BrokenLibraryError: (an ImportError) what they need is not.
        ArgumentTypeError: (a TypeError) the task is no name.
        UnknownEnvError: (a ValueError and a RuntimeError) there is no such task, or none whose agents act
            at the same time.
        OptionError: (a TypeError) the env does not take one of the keywords.
    """
    task, module = _module_of(task)
    home = _imported(module)
    # of bounds that float32 cannot tell, of displays that are not there
    with no_warnings():
        _require_form(task, home, parallel=parallel)
        _refuse_unknown(task, home, kwargs)
        try:
            return (home.parallel_env if parallel else home.env)(**kwargs)
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            raise OptionError(
                f"PettingZooEnv of {task!r} takes no such keyword: {error}."
            ) from error


def require_env(task: str) -> None:
    """Check that there is a task of this name, listed or not.

    Raises:
        MissingLibraryError, ArgumentTypeError, UnknownEnvError: see `make`.
    """
    _module_of(task)


def require_known(task: str, *, parallel: bool, kwargs: Mapping[str, Any]) -> None:
    """Check what `make` will be given; its module is imported, and nothing built.

    Raises:
        OptionError, UnknownEnvError, MissingLibraryError, BrokenLibraryError, ArgumentTypeError: see `make`.
    """
    task, module = _module_of(task)
    home = _imported(module)
    _require_form(task, home, parallel=parallel)
    _refuse_unknown(task, home, kwargs)


def has_parallel(task: str) -> bool:
    """Check whether there is a form of an env whose agents act at the same time; it is not built.

    Raises:
        MissingLibraryError, ArgumentTypeError, UnknownEnvError: see `make`.
    """
    return hasattr(_imported(_module_of(task)[1]), "parallel_env")


def _imported(module: str) -> ModuleType:
    """Import the module of an env without warnings: the library calls its old way of naming envs deprecated."""
    with no_warnings():
        return require(module)


def _module_of(task: str) -> tuple[str, str]:
    if not isinstance(task, str):
        raise ArgumentTypeError(
            f"task is {task!r}, of type {type(task).__name__}, but must be the name of an env of PettingZoo. "
            "Pass 'classic/tictactoe_v3', for example. PettingZooWrapper(env) takes an env object."
        )
    modules = _modules({**_FAMILIES, **_UNLISTED})
    full = [name for name in modules if task in (name, name.partition("/")[2])]
    if full:
        return full[0], modules[full[0]]
    known = [*modules, *(name.partition("/")[2] for name in modules)]
    guess = near_name(task, known, "See PettingZooEnv.available_envs.")
    raise UnknownEnvError(f"PettingZoo has no env called {task!r}. {guess}")


def _require_form(task: str, home: ModuleType, *, parallel: bool) -> None:
    if parallel and not hasattr(home, "parallel_env"):
        raise UnknownEnvError(
            f"the agents of {task!r} take turns, so there is no parallel form of it. Pass parallel=False "
            "and use_mask=True."
        )


def _refuse_unknown(task: str, home: ModuleType, kwargs: Mapping[str, Any]) -> None:
    """Check keywords where the library says which it takes."""
    parameters = inspect.signature(home.raw_env).parameters
    if not any(found.kind is found.VAR_KEYWORD for found in parameters.values()):
        refuse_unknown(f"PettingZooEnv of {task!r}", kwargs, list(parameters))


class PettingZooEnv(PettingZooWrapper):
    """Make an env of PettingZoo, or of MPE2, by name; see `PettingZooWrapper`.

    Args:
        task: "family/name", as "classic/tictactoe_v3" or "mpe/simple_spread_v3"; the name alone will do.
        parallel: build the parallel form, in which all agents act in each step; False: the turn-based one (AEC).
        return_state: add the state of the whole game as ``state``.
        group_map: names of agents by group, or a `MarlGroupMapType`. By default agents called ``name_<int>`` of
            a parallel env share the group ``name``; those of an AEC env are alone.
        use_mask: add the flags ``mask``: which agents act in the next step. Needed where agents take turns,
            or die while others live on.
        categorical_actions: integers for discrete actions; False spells them one-hot.
        seed: of the first reset, which is made here, and of random actions.
        done_on_any: the game ends with its first agent; False: with its last. By default True for parallel
            envs, False for AEC envs.
        allow_done_after_reset: taken as in TorchRL, without effect: agents may be done right after a reset.
        batch_size: empty: the env is a single one.
        device: where data is delivered, "cpu" by default.
        **kwargs: go to the function that builds the env, e.g. ``n_pistons=5``.

    Raises:
        UnknownEnvError: (a ValueError and a RuntimeError) there is no such task, or no parallel form of it.
        OptionError: (a TypeError) neither this class nor that env knows a keyword.
        MissingLibraryError: (an ImportError) PettingZoo, MPE2 or what they need is not installed.

    Example:
        >>> from envkit import PettingZooEnv
        >>> env = PettingZooEnv("mpe/simple_spread_v3", N=2)
        >>> env.group_map
        {'agent': ['agent_0', 'agent_1']}
        >>> env.rollout(5)["agent", "observation"].shape
        torch.Size([5, 2, 12])
        >>> env.close()
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(names)  # type: ignore[assignment]

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
            bound = inspect.signature(cls).bind(*args, **kwargs)
        except TypeError:
            return  # what is wrong there is no keyword
        of_env = bound.arguments.get("kwargs", {})
        if of_env or "parallel" in bound.arguments:
            parallel = as_bool("parallel", bound.arguments.get("parallel", True))
            require_known(bound.arguments["task"], parallel=parallel, kwargs=of_env)

    def _repr_arguments(self) -> list[str]:
        return [repr(self.task_name), f"parallel={self.parallel}"]


# ----------------------------------------------------------------------------------- in the catalogue


def env_names() -> list[str]:
    """List the tasks that can be made here.

    Raises:
        MissingLibraryError: (an ImportError) the library is not installed.
    """
    return names()


def require_keywords(name: str, keywords: Mapping[str, Any]) -> None:
    """Check the keywords that `build` will be given; nothing is made.

    Raises:
        OptionError: (a TypeError) neither `PettingZooEnv` nor the env knows one.
        UnknownEnvError: (a ValueError) a parallel form is asked for, and there is none.
    """
    if not keywords:
        return
    parallel = keywords.get("parallel")
    completed = {**keywords, "parallel": has_parallel(name) if parallel is None else parallel}
    PettingZooEnv.require_keywords(name, **completed)


_NO_LIMIT = 2**31 - 1
_HIDE_THEIRS = ("sisl", "atari")
"""Families whose envs take ``max_cycles`` without saying so in their signature."""


def lasting(name: str, steps: int | None, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords by which the library cuts no episode before so many steps; None: none at all.

    Raises:
        OptionError: (a TypeError) ``max_cycles``, which is that limit, is given too.
    """
    if "max_cycles" in keywords:
        raise OptionError(
            f"max_episode_steps={-1 if steps is None else steps} and max_cycles={keywords['max_cycles']!r} say the same. Pass "
            "one of them."
        )
    task, module = _module_of(name)
    of_env = inspect.signature(_imported(module).raw_env).parameters.get("max_cycles")
    if of_env is None and task.partition("/")[0] not in _HIDE_THEIRS:
        return dict(keywords)
    if of_env is not None and steps is not None and steps <= (of_env.default or 0):
        return dict(keywords)
    return {**keywords, "max_cycles": _NO_LIMIT if steps is None else steps}


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
