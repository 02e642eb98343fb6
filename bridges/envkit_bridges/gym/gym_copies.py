"""How an env is copied and pickled together with its simulator.

A copy continues from the state of the original, independently. A simulator that cannot be copied is refused.

Conventions
    rebuilt   of a simulator: it is pickled, and so copied, as the arguments it was made with
              (``gymnasium.utils.EzPickle``; MuJoCo's and Box2D's are). Its copy has begun no episode, so it
              must be reset first, and keeps the generator of random numbers.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from envkit.errors import CopyError
from envkit.transport import by_value

if TYPE_CHECKING:
    from envkit_bridges.libraries import Simulator

_KEPT = ("spec", "_np_random", "_np_random_seed")


class HoldsSimulator(Protocol):
    """An env around a simulator."""

    _env: Any

    def __getstate__(self) -> Any:
        """Return what a copy starts from."""
        ...


def deep_copy(env: HoldsSimulator, memo: dict[int, Any]) -> Any:
    """Copy an env with its simulator, as `copy.deepcopy` does.

    Raises:
        CopyError: the simulator cannot be copied.
    """
    _require_copyable(env)
    twin = memo[id(env)] = object.__new__(type(env))
    try:
        state, kept = copy.deepcopy((env.__getstate__(), _kept(env._env)), memo)
    except Exception as error:
        raise _refusal(env, f"{type(error).__name__}: {error}") from error
    return _revived(twin, state, kept)


def pack(env: HoldsSimulator) -> tuple[bytes, bytes]:
    """Pickle the class of an env, and an env with its simulator, by value where other processes could not import it.

    Raises:
        CopyError: the simulator cannot be pickled.
    """
    _require_copyable(env)
    try:
        parts = env.__getstate__(), _kept(env._env)
        return by_value.dumps(type(env)), by_value.dumps_parts(parts, env)
    except Exception as error:
        raise _refusal(env, f"{type(error).__name__}: {error}") from error


def unpack(cls: bytes, packed: bytes) -> HoldsSimulator:
    """Undo `pack`; ``cls`` is the pickled class of the env."""
    twin = object.__new__(pickle.loads(cls))
    return _revived(twin, *by_value.loads_parts(packed, twin))


def _revived(twin: Any, state: Any, kept: list[dict[str, Any]]) -> HoldsSimulator:
    twin.__setstate__(state)
    for chain, found in zip(_rebuilt(twin._env), kept, strict=True):
        vars(chain[-1]).update(found)
        _order_enforcing(chain)._has_reset = False
    return twin


def _kept(simulator: Simulator) -> list[dict[str, Any]]:
    """Return what a copy keeps of each simulator that is rebuilt."""
    inner = [vars(chain[-1]) for chain in _rebuilt(simulator)]
    return [{name: own[name] for name in _KEPT if name in own} for own in inner]


def _rebuilt(simulator: Simulator) -> Iterator[list[Any]]:
    """Yield each simulator that is rebuilt, its wrappers before it in a list."""
    for env in getattr(simulator, "envs", None) or [simulator]:
        chain = [env]
        while not _is_easy(chain[-1]) and (inner := _inside(chain[-1])) is not None:
            chain.append(inner)
        if _is_easy(chain[-1]):
            yield chain


def _inside(wrapper: Simulator) -> Simulator:
    """Return the env in a wrapper; those of PettingZoo that change the API call it otherwise."""
    inner = getattr(wrapper, "env", None)
    return getattr(wrapper, "aec_env", None) if inner is None else inner


def _is_easy(env: Simulator) -> bool:
    get_state = getattr(type(env), "__getstate__", None)
    return getattr(get_state, "__qualname__", "") == "EzPickle.__getstate__"


def _order_enforcing(chain: list[Any]) -> Simulator:
    """Return the wrapper that refuses a step before the first reset; None where there is none."""
    return next((wrapper for wrapper in chain if "_has_reset" in vars(wrapper)), None)


def _require_copyable(env: HoldsSimulator) -> None:
    simulator = env._env
    classes = type(getattr(simulator, "unwrapped", simulator)).__mro__
    if any(base.__name__ == "AsyncVectorEnv" for base in classes):  # its pipes would be copied
        raise _refusal(env, "it has its own processes")
    if any(_order_enforcing(chain) is None for chain in _rebuilt(simulator)):
        raise _refusal(
            env, "it would be built again, and nothing would notice that it must be reset first"
        )


def _refusal(env: HoldsSimulator, reason: str) -> CopyError:
    return CopyError(
        f"this {type(env).__name__} can be neither copied nor pickled with its simulator {env._env} "
        f"({reason}). Build one where it is needed: pass a function, `lambda: env_cls(...)`, or an "
        "`EnvCreator` instead of the env."
    )
