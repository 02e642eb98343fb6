"""Envs by id: one, or many of them in the form that suits their world.

`make` decides how many envs become one env object. Which env an id means is decided in `ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from inspect import signature
from typing import Any

from envkit.arrays.integers import as_int
from envkit.batched.async_pool import AsyncEnvPool, ProcessorAsyncEnvPool
from envkit.batched.parallel import ParallelEnv
from envkit.batched.serial import SerialEnv
from envkit.data.arguments import require_option
from envkit.data.keywords import known_to, refuse_unknown
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, ArgumentTypeError, OptionError
from envkit.specs.annotations import Device
from envkit.transforms.core.compose import Compose
from envkit.transforms.core.transform import Transform
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit.transforms.devices import BatchSizeTransform
from envkit.transforms.episodes import StepCounter
from envkit_bridges.catalogue.ids import EnvEntry, find, own_worlds


def make(
    id: str,
    num_envs: int | None = None,
    *,
    backend: str | None = None,
    device: Device | None = None,
    transforms: Transform | Sequence[Transform] | None = None,
    max_episode_steps: int | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> EnvBase:
    """Make an env, or many, by id.

    Args:
        id: "library/name", as "brax/ant" or "gym/CartPole-v1", see `list_envs`. The library may be left out where
            one that is installed alone has the env.
        num_envs: None for one env, batch size ``()``; n for n of them, batch size ``(n,)``. For a stateless library
            it is one env that steps them as one program; for a stateful one a pool; for EnvPool, VMAS and mjlab
            the library's own.
        backend: the kind of pool for a stateful library. "process", also the meaning of None, is a `ParallelEnv`.
            "serial" is a `SerialEnv`. "async" is an `AsyncEnvPool` of processes (for EnvPool, of its threads). "ray"
            is a `ParallelEnv` on a Ray cluster. "vector" is Gymnasium's own vector env, for the library "gym". Stateless
            libraries need no
            pool: there it goes to the class, as Brax's ``backend="spring"``.
        device: where data is delivered and, for stateless libraries, computed; None is the CPU.
        transforms: one, or several in their order, appended to the env.
        max_episode_steps: truncate episodes after so many steps, in place of the limit that an env has by itself; -1
            removes that. Where the library has no keyword for it, a `StepCounter` adds the limit, and its entry
            ``step_count``, or ``elapsed`` where the env has a state of that name.
        seed: given to `set_seed`. None: a stateless env draws one from torch's global generator, and simulators seed
            themselves, so that ``torch.manual_seed`` does not fix what they do.
        **kwargs: go to the class of the library.

    Returns:
        The env; a `TransformedEnv` where something is appended to it.

    Raises:
        ArgumentTypeError: (a TypeError) ``id`` is no string, or ``transforms`` are none.
        ArgumentError: (a ValueError) no env, or several, have this id; ``num_envs`` is below 1; the library has no
            such ``backend``.
        OptionError: (a TypeError) a keyword is unknown, or a limit is given twice.
        MissingLibraryError, BrokenLibraryError: (an ImportError) the library is not installed, or fails.

    Example:
        >>> from envkit import make
        >>> env = make("gym/CartPole-v1", 2, backend="serial")
        >>> type(env).__name__, env.batch_size
        ('SerialEnv', torch.Size([2]))
        >>> env.rollout(10, break_when_any_done=False)["next", "reward"].shape
        torch.Size([2, 10, 1])
        >>> env.close()
    """
    appended = _listed(transforms)
    entry = find(id)
    recipe = {"id": id, **kwargs}
    counted = None
    if max_episode_steps is not None:
        recipe["max_episode_steps"] = max_episode_steps
        meaning = "the steps after which an episode is truncated, or -1 for no limit"
        limit = as_int("max_episode_steps", max_episode_steps, least=-1, meaning=meaning)
        if limit != -1:
            as_int("max_episode_steps", limit, least=1, meaning=meaning)
        if entry.limit is None:
            counted = None if limit == -1 else limit
            if entry.lasting is not None:
                kwargs = entry.lasting(counted, kwargs)
        elif entry.limit in kwargs:
            raise OptionError(
                f"max_episode_steps={limit} and {entry.limit}={kwargs[entry.limit]!r} say the same. Pass one of them."
            )
        else:
            # EnvPool takes -1 for a limit
            is_endless = limit == -1 and entry.kind == "batched"
            kwargs[entry.limit] = 2**31 - 1 if is_endless else limit
    try:
        env = _build(_Request(entry, num_envs, backend, device, kwargs))
    except OptionError:
        misspelt = [name for name in kwargs if get_close_matches(name, _OWN_KEYWORDS, 1, 0.8)]
        refuse_unknown("make", misspelt, _OWN_KEYWORDS)
        raise
    if counted is not None:
        # a look at the keys of stateful envs would start their workers; those keep no state in the data
        is_taken = entry.kind == "stateless" and "step_count" in env.state_keys
        name = "elapsed" if is_taken else "step_count"
        appended = [StepCounter(max_steps=counted, step_count_key=name), *appended]
    if appended:
        env = TransformedEnv(env, Compose(*appended) if len(appended) > 1 else appended[0])
    if seed is not None:
        env.set_seed(seed)
    if transforms is None:
        if entry.kind == "stateless" and backend is not None:
            recipe["backend"] = backend
        vars(env)["_made_by"] = recipe
    return env


_OWN_KEYWORDS = [name for name in signature(make).parameters if name != "kwargs"]


def made_by(env: EnvBase) -> dict[str, Any] | None:
    """Return the keywords by which `make` makes one env like those of ``env``; None where it did not make it.

    Neither is there what transforms that were given to `make` are.
    """
    return vars(env).get("_made_by")


def _listed(transforms: Transform | Sequence[Transform] | None) -> list[Transform]:
    if transforms is None:
        return []
    listed: list[Any] = [transforms]
    if isinstance(transforms, Iterable) and not isinstance(transforms, Transform):
        listed = list(transforms)
    for one in listed:
        if not isinstance(one, Transform):
            raise ArgumentTypeError(
                f"transforms hold {one!r}, of type {type(one).__name__}, but must be a Transform or several: "
                "transforms=[StepCounter(), RewardSum()], for example."
            )
    return listed


# ------------------------------------------------------------------------------------------ forms


@dataclass(frozen=True)
class _Request:
    """A request to `make`, whose id means ``entry``."""

    entry: EnvEntry
    num_envs: int | None
    backend: str | None
    device: Device | None
    keywords: Mapping[str, Any]

    def build(self, **more: Any) -> EnvBase:
        """Make one env object of the world; what somebody else has registered need not know devices."""
        device = "cpu" if self.device is None and self.entry.world in own_worlds() else self.device
        devices = {} if device is None else {"device": device}
        return self.entry.build(**devices, **more, **self.keywords)

    @property
    def of_pool(self) -> tuple[int, Callable[..., EnvBase]]:
        """How many envs a pool has, and what makes one; that travels to workers by value.

        Raises:
            OptionError: (a TypeError) the env is known not to take one of the keywords.
        """
        assert self.num_envs is not None
        if self.entry.require_keywords is not None:
            try:
                self.entry.require_keywords(self.keywords)
            except OptionError as error:
                raise OptionError(f"{error}{self._of_pools()}") from error
        return self.num_envs, partial(self.entry.build, **self.keywords)

    def _of_pools(self) -> str:
        """Return the end of a message: which keywords a pool takes itself."""
        of_pools = [name for name in known_to(ParallelEnv) or () if name in self.keywords]
        if not of_pools:
            return ""
        id, example = (
            f"{self.entry.world}/{self.entry.name}",
            f"{of_pools[0]}={self.keywords[of_pools[0]]!r}",
        )
        return (
            f" A pool takes {', '.join(of_pools)} itself: ParallelEnv({self.num_envs}, lambda: make({id!r}), {example}), or "
            "another class of pools."
        )


def _build(request: _Request) -> EnvBase:
    """Build what is asked for, in the form that its world and ``backend`` have."""
    if request.num_envs is not None:
        as_int(
            "num_envs",
            request.num_envs,
            least=1,
            meaning="the number of envs, e.g. 64; classes of stateless envs take batch_size=[8, 8]",
        )
    kind, backend = request.entry.kind, request.backend
    if kind == "stateless":
        sizes = {} if request.num_envs is None else {"batch_size": [request.num_envs]}
        return request.build(**sizes, **({} if backend is None else {"backend": backend}))
    forms = _FORMS[kind] | _OF_WORLD.get(request.entry.world, {})
    if backend is not None and not any(forms):
        raise ArgumentError(
            f"backend is {backend!r}, but envs of {request.entry.world!r} have one form only. Leave backend out."
        )
    require_option("backend", backend, [*filter(None, forms), None])
    if request.num_envs is None and backend is not None:
        raise ArgumentError(
            f"backend={backend!r} says how many envs are one, but one env is asked for. Pass num_envs too."
        )
    return forms[backend](request)


def _parallel(request: _Request) -> EnvBase:
    if request.num_envs is None:
        return request.build()
    return ParallelEnv(*request.of_pool, device=request.device)


def _serial(request: _Request) -> EnvBase:
    return SerialEnv(*request.of_pool, device=request.device)


def _on_ray(request: _Request) -> EnvBase:
    return ParallelEnv(*request.of_pool, device=request.device, backend="ray")


def _asynchronous(request: _Request) -> EnvBase:
    count, maker = request.of_pool
    return ProcessorAsyncEnvPool([maker] * count, device=request.device)


def _vector(request: _Request) -> EnvBase:
    return request.build(num_envs=request.num_envs)


def _by_library(request: _Request) -> EnvBase:
    if "num_workers" in request.keywords:
        raise OptionError(
            f"num_workers is {request.keywords['num_workers']!r}, but {request.entry.world!r} makes all its rows in one object. "
            "Pass num_envs, the number of rows."
        )
    if request.num_envs is not None:
        return request.build(num_workers=request.num_envs)
    one = _build(replace(request, num_envs=1))
    return TransformedEnv(one, BatchSizeTransform(reshape_fn=_only_row))


def _only_row(data: Any) -> Any:
    return data.squeeze(0)


def _by_library_asynchronous(request: _Request) -> EnvBase:
    assert request.num_envs is not None
    names = [request.entry.name] * request.num_envs
    options = {"create_env_kwargs": dict(request.keywords), "device": request.device}
    return AsyncEnvPool(names, backend="envpool", **options)  # type: ignore[arg-type]


_FORMS: Mapping[str, dict[str | None, Callable[[_Request], EnvBase]]] = {
    "stateful": {
        None: _parallel,
        "process": _parallel,
        "serial": _serial,
        "async": _asynchronous,
        "ray": _on_ray,
    },
    "batched": {None: _by_library},
}
"""Kind of a world to its forms, by ``backend``."""

_OF_WORLD: Mapping[str | None, dict[str | None, Callable[[_Request], EnvBase]]] = {
    "envpool": {"async": _by_library_asynchronous},
    "gym": {"vector": _vector},
}
"""Further forms of single worlds."""
