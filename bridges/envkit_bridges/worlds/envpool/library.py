"""Pools of the EnvPool library: how they are made, their spaces, and how they are stepped and reset row by row.

The library resets a row that has ended in its next step, whose action it ignores. `RowPool` refuses such a step, so
that resets are asked for, of those rows alone. `PoolCore` steps all rows together. No TensorDict is known here.

Conventions
    row    number of an env of the pool, which the library calls its id.
    rows   int32 array of row numbers; None stands for all.
    ended  rows that are in no episode: before their first reset, and after a last step.
    sent   a step that was handed to the library's threads.
    seed   of a row: what a chain of seeds holds, see `envkit.env.seeding`; the library takes int32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from envkit.data.keywords import refuse_unknown
from envkit.data.paths import Path
from envkit.env.seeding import drawn_seed, seed_chain
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    NotResetError,
    StaleDataError,
    StepMaskError,
)
from envkit.process_wide import no_warnings, variables_kept
from envkit_bridges.gym.codecs import Codec
from envkit_bridges.libraries import Simulator, near_name, require

if TYPE_CHECKING:
    from envkit_bridges.gym.backend import GymSpace, SpaceValue


def import_envpool() -> ModuleType:
    """Import the library.

    It sets environment variables by which matplotlib would show no picture any more, in notebooks above all: these
    are put back.

    Raises:
        MissingLibraryError: (an ImportError) it is not installed.
    """
    with variables_kept("MPLBACKEND", "MPLCONFIGDIR"):
        return require("envpool")


def make_pool(
    env_name: str, count: int, kwargs: Mapping[str, Any], *, batch_size: int | None = None
) -> Simulator:
    """Build a pool of ``count`` envs of the library, which gives results of ``batch_size`` (all) at a time.

    Raises:
        MissingLibraryError, ArgumentError, OptionError: see `MultiThreadedEnv`.
    """
    library = import_envpool()
    require_name(env_name)
    if not isinstance(kwargs, Mapping):
        raise ArgumentTypeError(
            f"create_env_kwargs are {kwargs!r}, of type {type(kwargs).__name__}, but must be one dict for all envs. Pass "
            "keywords of envpool.make_gymnasium: {'max_episode_steps': 100}, for example."
        )
    with no_warnings():  # of bounds that float32 cannot tell
        require_keywords(env_name, kwargs)
        seeds = _given_seeds(kwargs) or {"env_seed": _drawn_seeds(count)}
        sizes = {"num_envs": count, "batch_size": count if batch_size is None else batch_size}
        try:
            pool = library.make_gymnasium(env_name, **sizes, **{**kwargs, **seeds})
        except TypeError as error:
            raise _unfit(library, env_name, kwargs, error) from error
    spaces_of(pool)
    return pool


def _unfit(library: ModuleType, name: str, given: Mapping[str, Any], error: TypeError) -> Exception:
    """Name the keyword whose value is of another kind than its default; ``error`` itself where that is none."""
    defaults = library.make_spec(name).config._asdict()
    for key, value in given.items():
        wanted = type(defaults.get(key, value))
        fits = isinstance(value, (int, float) if wanted is float else wanted)
        if not fits:
            return ArgumentTypeError(
                f"{key} of {name} is {value!r}, of type {type(value).__name__}, but EnvPool takes {wanted.__name__}: "
                f"{defaults[key]!r} by default. Pass one of that type."
            )
    return error


def require_keywords(env_name: str, kwargs: Mapping[str, Any]) -> None:
    """Check what an env of the library is made with; ``env_name`` is known to be there.

    Raises:
        OptionError: (a TypeError) it does not know a keyword.
    """
    with no_warnings():  # of bounds that float32 cannot tell
        known = [*import_envpool().make_spec(env_name).config._fields, *_MAKE_OPTIONS]
    free = [name for name in known if name not in _NOT_CHOSEN]
    refuse_unknown(f"{env_name} of EnvPool", kwargs, free, _HINT)


def require_name(env_name: object) -> None:
    """Check that the library has an env of this name.

    Raises:
        MissingLibraryError: (an ImportError) EnvPool is not installed.
        ArgumentTypeError: it is no name.
        ArgumentError: it is the name of no env; the message gives those closest to it.
    """
    names = import_envpool().list_all_envs()
    if not isinstance(env_name, str):
        raise ArgumentTypeError(
            f"env_name is {env_name!r}, of type {type(env_name).__name__}, but must be the name of an env "
            "of EnvPool. Pass 'CartPole-v1', for example."
        )
    if env_name not in names:
        guess = near_name(env_name, names, "See MultiThreadedEnv.available_envs.")
        raise ArgumentError(f"EnvPool has no env called {env_name!r}. {guess}")


_MAKE_OPTIONS = (
    *("from_pixels", "render_mode", "render_env_id"),
    *("render_width", "render_height", "render_camera_id"),
)
_NOT_CHOSEN = ("num_envs", "batch_size", "base_path", "gym_reset_return_info")
_HINT = "The number of envs is num_workers, and all of them step together."


def _given_seeds(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seeds among the keywords as the library takes them."""
    found = {name: kwargs[name] for name in ("seed", "env_seed") if name in kwargs}
    for name, seeds in found.items():
        if isinstance(seeds, int):
            found[name] = _as_int32(seeds)
        elif isinstance(seeds, list | tuple) and all(isinstance(seed, int) for seed in seeds):
            found[name] = [_as_int32(seed) for seed in seeds]
    return found


def _drawn_seeds(count: int) -> list[int]:
    return [_as_int32(seed) for seed in seed_chain(drawn_seed(), count)[0]]


def built_anew(pool: Simulator, seeds: Sequence[int]) -> Simulator:
    """Build a pool of the same configuration, row i with the i-th seed."""
    config = pool.spec.config._replace(seed=0, env_seed=[_as_int32(seed) for seed in seeds])
    twin = type(pool)(type(pool.spec)(config))
    vars(twin).update({name: value for name, value in vars(pool).items() if name in _RENDERING})
    spaces_of(twin)
    return twin


_RENDERING = frozenset(
    f"_render_{name}" for name in ("mode", "env_id", "width", "height", "camera_id")
)
"""Attributes that the library sets on a pool that it has made."""


def _as_int32(seed: int) -> int:
    """Return what the library takes as a seed: from -(2**31) to 2**31 - 1 itself, up to 2**32 - 1 no two are the same."""
    if seed < -(2**31):
        seed = 2**64 - seed  # SeedSequence takes no negative number
    if seed >= 2**32:
        seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return seed - 2**32 if seed >= 2**31 else seed


def spaces_of(pool: Simulator) -> tuple[Any, Any]:
    """Return the spaces of observations and actions of one env.

    Where an env says nothing of bounds, the library gives the least positive and the greatest number; that is no
    bound.
    """
    with no_warnings():  # of bounds that float32 cannot tell
        return tuple(map(_without_empty_bounds, (pool.observation_space, pool.action_space)))  # type: ignore[return-value]


def _without_empty_bounds(space: GymSpace) -> GymSpace:
    spaces = require("gymnasium.spaces")
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _without_empty_bounds(part) for name, part in space.items()})
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    numbers = np.finfo(space.dtype)
    unsaid = (space.low == numbers.tiny) & (space.high == numbers.max)
    low, high = np.where(unsaid, -np.inf, space.low), np.where(unsaid, np.inf, space.high)
    return spaces.Box(low, high, dtype=space.dtype) if unsaid.any() else space


def require_pool(env: object) -> None:
    """Check that an object is a pool that can be stepped by rows.

    Raises:
        ArgumentTypeError: it is no pool that speaks gymnasium's API.
        ArgumentError: its envs do not step together, or have several players each.
    """
    config = getattr(env, "config", None)
    is_pool = hasattr(env, "recv") and hasattr(env, "_state_keys")
    if not is_pool or not isinstance(config, Mapping):
        fix = f"MultiThreadedEnv(n, {env!r})" if isinstance(env, str) else "MultiThreadedEnv"
        raise ArgumentTypeError(
            f"MultiThreadedEnvWrapper was given {env!r}, of type {type(env).__name__}, but wraps a pool "
            f"of EnvPool. Pass what envpool.make_gymnasium gives, or let {fix} build it."
        )
    if not isinstance(env, require("gymnasium").Env | require("gymnasium").vector.VectorEnv):
        raise ArgumentTypeError(
            f"{type(env).__name__} speaks the API of dm_env. Make it with env_type='gymnasium'."
        )
    if config["batch_size"] not in (0, config["num_envs"]):
        raise ArgumentError(
            f"the pool has {config['num_envs']} envs and gives them in batches of {config['batch_size']}, but here "
            "they step together. Leave batch_size out, or use AsyncEnvPool(..., backend='envpool')."
        )
    if config.get("max_num_players", 1) > 1:
        raise ArgumentError(
            f"each env of this pool has up to {config['max_num_players']} players, whose number may change "
            "with every step. Only envs of one player have rows here."
        )


Rows = np.ndarray | None
Arrays = Mapping[Path, np.ndarray]
Stepped = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]
"""Observations, rewards, terminated, truncated and infos of the rows that were stepped."""


@dataclass(frozen=True, eq=False)
class Sent:
    """A step of some rows, and its actions."""

    rows: Rows
    actions: Any


class RowPool:
    """An EnvPool whose rows are reset on request, and at no other time.

    Args:
        pool: made by ``envpool.make_gymnasium``, all of whose envs step together.
        frame_skip: steps of the library per step, rewards summed; a row stops where its episode ends.
    """

    def __init__(self, pool: Simulator, frame_skip: int = 1):
        self.frame_skip, self.count = frame_skip, int(pool.config["num_envs"])
        self._take(pool)

    def _take(self, pool: Simulator) -> None:
        self.pool = pool
        self._is_new = np.ones(self.count, bool)
        self._ended = np.ones(self.count, bool)
        self._sent: Sent | None = None

    def send(self, actions: SpaceValue, rows: Rows = None) -> Sent:
        """Have rows step, and return at once what `recv` gives the outcome for.

        Args:
            actions: one for each of the rows, as the library takes them.
            rows: those that step.

        Raises:
            NotResetError: a row was never reset.
            StepMaskError: the episode of a row has ended.
        """
        self.finish()
        ended = np.flatnonzero(self._ended) if rows is None else rows[self._ended[rows]]
        if len(ended):
            self._refuse(ended)
        self.pool.send(actions, rows)
        self._sent = Sent(rows, actions)
        return self._sent

    def _refuse(self, ended: np.ndarray) -> NoReturn:
        if len(new := ended[self._is_new[ended]]):
            raise NotResetError(
                f"rows {new.tolist()} were stepped before their first reset, so they are in no episode. "
                "Call reset() first, and step from what it returns."
            )
        raise StepMaskError(
            f"the episodes of rows {ended.tolist()} have ended. Reset them first, with "
            "env.step_and_maybe_reset or env.maybe_reset, or leave them out with a '_step' mask."
        )

    def recv(self, sent: Sent) -> Stepped:
        """Wait for a step: observations, rewards, terminated, truncated, infos.

        Raises:
            StaleDataError: the env was stepped or reset meanwhile.
        """
        if sent is not self._sent:
            raise StaleDataError(
                "this step was not received before its env was stepped or reset again, and its outcome is lost. "
                "Receive a step before the next one."
            )
        self._sent = None
        made = self.pool.recv(reset=False)
        if self.frame_skip > 1:
            made = self._with_more_frames(sent, made)
        over = made[2] | made[3]
        if sent.rows is None:
            self._ended = over
            return made
        self._ended[sent.rows] = over
        return made

    def _with_more_frames(self, sent: Sent, made: Stepped) -> Stepped:
        """Step again what goes on, with the same actions."""
        for _ in range(self.frame_skip - 1):
            going = np.flatnonzero(~(made[2] | made[3])).astype(np.int32)
            if not len(going):
                break
            self.pool.send(
                _chosen(sent.actions, going), going if sent.rows is None else sent.rows[going]
            )
            more = self.pool.recv(reset=False)
            more[1][:] += made[1][going]
            _put(more, going, made)
        return made

    def finish(self) -> None:
        """Wait for a step that was not received, and drop its results."""
        if self._sent is not None:
            self.recv(self._sent)

    def step(self, actions: SpaceValue) -> Stepped:
        """Step all rows."""
        return self.recv(self.send(actions))

    def reset(self, rows: Rows = None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes, and give the observations and infos of these rows."""
        self.finish()
        made = self.pool.reset(rows)
        chosen = slice(None) if rows is None else rows
        self._ended[chosen] = self._is_new[chosen] = False
        return made

    def spread(self, values: Any, rows: Rows) -> Any:
        """Put what was given for some rows among zeros for the others."""
        if rows is None:
            return values
        if isinstance(values, tuple):
            return tuple(self.spread(part, rows) for part in values)
        if isinstance(values, dict):
            return {name: self.spread(value, rows) for name, value in values.items()}
        full = np.zeros((self.count, *values.shape[1:]), values.dtype)
        full[rows] = values
        return full

    def seed(self, seeds: Sequence[int]) -> None:
        """Build the same pool again, row i with the i-th seed, and close the one before."""
        pool = built_anew(self.pool, seeds)
        self.close()
        self._take(pool)

    def close(self) -> None:
        """Wait for what is under way, and close the pool."""
        self.finish()
        self.pool.close()


class PoolCore:
    """All rows of a pool together; see `envkit_bridges.gym.vector.RowsTogether`.

    Args:
        rows: the pool.
        observed, acted: codecs of one row.
    """

    def __init__(self, rows: RowPool, observed: Codec, acted: Codec):
        self._rows, self.observation, self.action = rows, observed, acted

    def advance(self, actions: SpaceValue) -> Stepped:
        """Step all rows."""
        return self._rows.step(actions)

    def begin(self, rows: np.ndarray, **kwargs: Any) -> Arrays:
        """Begin episodes in the rows that a bool mask selects, and return the observations of these rows by path."""
        observations, _ = self._rows.reset(np.flatnonzero(rows).astype(np.int32), **kwargs)
        return self.encoded(observations, "reset")

    def encoded(self, observations: SpaceValue, method: str) -> Arrays:
        """Turn observations, which ``method`` returned, into arrays by path."""
        entries = self.observation.encode_arrays(observations)
        return {path: value.numpy() for path, value in entries.items()}


def _chosen(values: SpaceValue, index: np.ndarray) -> SpaceValue:
    """Return some rows of arrays, which may be in dicts."""
    if isinstance(values, dict):
        return {name: _chosen(value, index) for name, value in values.items()}
    return values[index]


def _put(values: SpaceValue, index: np.ndarray, into: SpaceValue) -> None:
    """Write arrays into rows of others, which may be nested."""
    if isinstance(into, np.ndarray):
        into[index] = values
        return
    names = into if isinstance(into, dict) else range(len(into))
    for name in names:
        _put(values[name], index, into[name])
