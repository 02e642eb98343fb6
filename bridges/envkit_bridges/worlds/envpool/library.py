"""Pools of the EnvPool library: how they are made, and stepped as vector envs of Gymnasium.

The library resets a row that has ended in its next step, whose action it ignores. `PoolVectorEnv` shows a pool as a
vector env without autoreset. `PoolCore` refuses to step rows that have ended, and steps any rows apart from the
others. No TensorDict is known here.

Conventions
    row    number of an env of the pool, which the library calls its id.
    rows   int32 array of row numbers; None stands for all.
    sent   a step that was handed to the library's threads.
    seed   of a row: what a chain of seeds holds, see `envkit.env.seeding`; the library takes int32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from envkit.data.keywords import refuse_unknown
from envkit.data.paths import Path
from envkit.env.seeding import drawn_seed, seed_chain, seed_of_32_bits
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    NotResetError,
    OptionError,
    ResumeError,
    StaleDataError,
)
from envkit.process_wide import no_warnings, variables_kept
from envkit_bridges.gym.vector import Stepped, VectorCore
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


def _unfit(
    library: ModuleType, name: str, keywords: Mapping[str, Any], error: TypeError
) -> Exception:
    """Return the name of the keyword whose value is of another kind than its default; ``error`` itself where that is none."""
    defaults = library.make_spec(name).config._asdict()
    for key, value in keywords.items():
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
    seeds_by_name = {name: kwargs[name] for name in ("seed", "env_seed") if name in kwargs}
    for name, seeds in seeds_by_name.items():
        if isinstance(seeds, int):
            seeds_by_name[name] = _as_int32(seeds)
        elif isinstance(seeds, list | tuple) and all(isinstance(seed, int) for seed in seeds):
            seeds_by_name[name] = [_as_int32(seed) for seed in seeds]
    return seeds_by_name


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
    seed = seed_of_32_bits(seed)
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


# ------------------------------------------------------------------------------- steps and resets

Rows = np.ndarray | None


class PoolVectorEnv:
    """A pool as a vector env of Gymnasium without autoreset, of which rows may be left out of a step.

    Infos are without the numbers of rows, which are their positions.

    Args:
        pool: made by ``envpool.make_gymnasium``, all of whose envs step together.
        frame_skip: steps of the library per step, rewards summed; a row stops where its episode ends.

    Attributes:
        unwrapped: the pool. All that is not here is looked up there.
    """

    def __init__(self, pool: Simulator, frame_skip: int = 1):
        self.unwrapped, self.frame_skip = pool, frame_skip
        self.metadata = {**pool.metadata, "autoreset_mode": "Disabled"}
        self.num_envs = int(pool.config["num_envs"])
        self.single_observation_space, self.single_action_space = spaces_of(pool)
        self.observation_space = self.single_observation_space  # the library's own takes long

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "unwrapped":  # of an object that is being copied
            raise AttributeError(name)
        return getattr(self.unwrapped, name)

    def __repr__(self) -> str:
        return repr(self.unwrapped)

    def send(self, actions: SpaceValue, rows: Rows = None) -> None:
        """Start a step of rows, with an action for each of them, and return at once."""
        self.unwrapped.send(actions, rows)

    def recv(self, actions: Any, rows: Rows = None) -> Stepped:
        """Wait for the step that was sent; what is returned of other rows is zero."""
        stepped: Any = self.unwrapped.recv(reset=False)
        for _ in range(self.frame_skip - 1):
            going = np.flatnonzero(~(stepped[2] | stepped[3])).astype(np.int32)
            if not len(going):
                break
            self.unwrapped.send(_chosen(actions, going), going if rows is None else rows[going])
            more: Any = self.unwrapped.recv(reset=False)
            more[1][:] += stepped[1][going]
            _put(more, going, stepped)
        *outcome, infos = stepped
        return self._spread((*outcome, _without_numbers(infos)), rows)

    def step(self, actions: SpaceValue) -> Stepped:
        """Step all rows."""
        self.send(actions)
        return self.recv(actions)

    def reset(
        self, *, options: Mapping[str, Any] | None = None, **others: object
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes in all rows, or in those of the mask ``options["reset_mask"]``.

        Raises:
            OptionError: (a TypeError) anything else is asked for.
        """
        mask = None if options is None else options.get("reset_mask")
        if others or (options is not None and [*options] != ["reset_mask"]):
            names = sorted({*others, *(() if options is None else ("options",))})
            raise OptionError(
                f"reset() was given {names}, but envs of EnvPool take no options when they are reset. "
                "Seeds are for set_seed(), all else for create_env_kwargs."
            )
        rows = None if mask is None else np.flatnonzero(mask).astype(np.int32)
        observations, infos = self.unwrapped.reset(rows)
        return self._spread((observations, _without_numbers(infos)), rows)

    def seed(self, seeds: Sequence[int]) -> None:
        """Build the same pool again, row i with the i-th seed, and close the one before."""
        pool = built_anew(self.unwrapped, seeds)
        self.unwrapped.close()
        self.unwrapped = pool

    def _spread(self, values: Any, rows: Rows) -> Any:
        """Put what was returned for some rows among zeros for the others."""
        if rows is None:
            return values
        if isinstance(values, tuple):
            return tuple(self._spread(part, rows) for part in values)
        if isinstance(values, dict):
            return {name: self._spread(value, rows) for name, value in values.items()}
        full = np.zeros((self.num_envs, *values.shape[1:]), values.dtype)
        full[rows] = values
        return full


class Sent(NamedTuple):
    """A step of some rows, and its actions."""

    actions: Any
    rows: Rows


class PoolCore(VectorCore):
    """Step and reset a pool of EnvPool: any rows may be left out, and observations are arrays with the rows in front."""

    env: PoolVectorEnv
    _sent: Sent | None = None

    def _forget(self) -> None:
        super()._forget()
        self._is_new = np.ones(self.env.num_envs, bool)
        self._ended = self._is_new.copy()

    @property
    def steps_all_rows(self) -> bool:
        """False: the library is given the rows that it steps."""
        return False

    @contextmanager
    def freezing(self, rows: np.ndarray) -> Iterator[None]:
        """Exclude rows from the step that is made meanwhile."""
        self._frozen = rows.copy()
        try:
            yield
        finally:
            self._frozen = None

    def _require_begun(self) -> None:
        waiting = self._stepped_among(self._ended)
        if not waiting.any():
            return
        if (new := waiting & self._is_new).any():
            raise NotResetError(
                f"rows {np.flatnonzero(new).tolist()} were stepped before their first reset, so they are in no episode. "
                "Call reset() first, and step from what it returns."
            )
        super()._require_begun()

    def send(self, actions: SpaceValue) -> Sent:
        """Begin a step of the rows that are not frozen, and return at once what `recv` takes.

        Raises:
            NotResetError: a row was never reset.
            StepMaskError: the episode of a row has ended.
        """
        self.finish()
        self._require_begun()
        rows = None
        if self._frozen is not None:
            rows = np.flatnonzero(~self._frozen).astype(np.int32)
            actions = _chosen(actions, rows)
        self.env.send(actions, rows)
        self._sent = Sent(actions, rows)
        return self._sent

    def recv(self, sent: Sent) -> Stepped:
        """Wait for a step.

        Raises:
            StaleDataError: the env was stepped or reset meanwhile.
        """
        if sent is not self._sent:
            raise StaleDataError(
                "this step was not received before its env was stepped or reset again, and its outcome is lost. "
                "Receive a step before the next one."
            )
        self._sent = None
        result = self.env.recv(*sent)
        self._note_ended(result)
        return result

    def finish(self) -> None:
        """Wait for a step that was not received, and drop its results."""
        if self._sent is not None:
            self.recv(self._sent)

    def advance(self, actions: SpaceValue) -> Stepped:
        """Step the rows that are not frozen."""
        return self.recv(self.send(actions))

    def _reset_rows(self, rows: np.ndarray, **kwargs: Any) -> tuple[Any, Any]:
        self.finish()
        return super()._reset_rows(rows, **kwargs)

    def begin(self, rows: np.ndarray, **kwargs: Any) -> Mapping[Path, np.ndarray]:
        """Begin episodes in the rows that a bool mask selects, and return the observations of these rows by path."""
        if kwargs:
            return super().begin(rows, **kwargs)  # which refuses them
        self.finish()
        observations, _ = self.env.unwrapped.reset(np.flatnonzero(rows).astype(np.int32))
        self._note_reset(rows)
        return {path: value.numpy() for path, value in self.encode(observations).items()}

    def _note_reset(self, rows: np.ndarray) -> None:
        super()._note_reset(rows)
        self._is_new &= ~rows

    def seed(self, seed: int | None, *, static: bool = False) -> int:
        """Build the pool again, row i with the i-th seed of the chain, and return the seed after the last."""
        seeds, following = seed_chain(seed, self.env.num_envs, static=static)
        self.finish()
        self.env.seed(seeds)
        self._forget()
        return following

    def _out_of_reach(self) -> ResumeError:
        return ResumeError(
            "EnvPool keeps the states of its envs to itself, so their episodes cannot be restored. Leave "
            "record_for_resume() out, so that new ones begin; env.transform.state_dict() is that of transforms alone."
        )

    def _split(self, observations: SpaceValue, method: str) -> SpaceValue:
        return observations

    def _blank(self) -> SpaceValue:
        return self._utils.create_empty_array(self.env.single_observation_space, self.env.num_envs)

    def encode(self, observations: SpaceValue) -> dict[Path, torch.Tensor]:
        """Turn the observations of all rows into tensors by path."""
        assert self.observation is not None
        return self.observation.encode_arrays(observations)

    def decode(self, actions: Mapping[Path, torch.Tensor]) -> SpaceValue:
        """Turn tensors with the rows in front into actions of the pool."""
        return self.action.decode_arrays(actions)


def _without_numbers(infos: dict[str, Any]) -> dict[str, Any]:
    """Return infos without the row numbers, which are the positions of the rows."""
    infos.pop("env_id", None)
    if (players := infos.get("players")) is not None:
        players.pop("env_id", None)
        if not players:
            del infos["players"]
    return infos


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
