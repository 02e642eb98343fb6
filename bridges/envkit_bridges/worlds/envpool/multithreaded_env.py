"""Envs of the EnvPool library: many rows, stepped together by its own threads.

`MultiThreadedEnvWrapper` gives them the meaning that batched envs have here: every step acts, `next` holds the
true last observation, and masks select rows. How the library is asked for that is known to `library`.

Conventions
    rows  int32 array of row numbers; None stands for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.batched.exchange.one_row import OneRow
from envkit.data.arguments import as_batch_size, as_bool
from envkit.data.keywords import known_to
from envkit.data.paths import as_key, nest
from envkit.env.base import EnvBase
from envkit.env.facts import Facts
from envkit.env.input_checks import require_actions
from envkit.env.on_row import RunsOnRow
from envkit.env.options import EnvOptions
from envkit.env.runs import Runs
from envkit.env.seeding import seed_chain
from envkit.env.tickets import Ticket
from envkit.errors import BatchSizeError, OptionError, ResumeError
from envkit.specs import Categorical, Composite, Unbounded
from envkit.specs.annotations import Device, Value
from envkit.specs.lasting import lasting
from envkit_bridges.gym.codecs import Codec, codec_of
from envkit_bridges.gym.info import Outcome
from envkit_bridges.gym.like import GymLikeEnv
from envkit_bridges.gym.simulator_rows import DONE
from envkit_bridges.gym.vector import VectorRows
from envkit_bridges.libraries import EnvNames
from envkit_bridges.worlds.envpool.library import (
    PoolCore,
    RowPool,
    Rows,
    Sent,
    Stepped,
    import_envpool,
    make_pool,
    require_name,
    require_pool,
    spaces_of,
)

if TYPE_CHECKING:
    from envkit_bridges.gym.backend import SpaceValue
    from envkit_bridges.libraries import Simulator


def _numbers(mask: torch.Tensor | None) -> Rows:
    return None if mask is None else np.flatnonzero(mask.numpy(force=True)).astype(np.int32)


# ---------------------------------------------------------------------------------------------- envs


class MultiThreadedEnvWrapper(GymLikeEnv):
    """Give a pool of EnvPool the TensorDict interface: batch size ``(num_envs,)``, batch-locked.

    An ended row is reset by `reset`, `step_and_maybe_reset` or a rollout, and not in the step that follows, so no
    step ignores its action and ``next`` holds the true last observation. `_step` and `_reset` masks select rows.

    Args:
        env: made by ``envpool.make_gymnasium``, with a ``batch_size`` of all its envs and one player in each.
            `set_seed` closes it and builds another of the same configuration.
        categorical_action_encoding: integers for discrete actions and observations; False: one-hot.
        frame_skip: steps of the library per step, rewards summed; a row stops where its episode ends.
        device: where data is delivered, "cpu" by default.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    Unknown public attributes are looked up on the pool.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no such pool.
        ArgumentError: its envs do not step together, or have several players each.

    Example:
        >>> import envpool
        >>> from envkit import MultiThreadedEnvWrapper
        >>> pool = envpool.make_gymnasium("CartPole-v1", num_envs=4)
        >>> env = MultiThreadedEnvWrapper(pool)
        >>> env.rollout(5, break_when_any_done=False)["observation"].shape
        torch.Size([4, 5, 4])
        >>> env.close()
    """

    libname = "envpool"
    _fast_path_bypasses = EnvBase._fast_path_bypasses | {
        *("_step", "_reset", "_masked_next", "_repeated_step", "_to_tensordict", "_action_in"),
        *("read_action", "read_obs", "read_reward", "read_done"),
        *("_output_transform", "_reset_output_transform"),
    }

    def __init__(
        self,
        env: Simulator,
        *,
        categorical_action_encoding: bool = True,
        frame_skip: int = 1,
        device: Device | None = "cpu",
        **options: Unpack[EnvOptions],
    ):
        require_pool(env)
        count = int(env.config["num_envs"])
        given = options.get("batch_size")
        if given is not None and as_batch_size(given) != torch.Size([count]):
            raise BatchSizeError(
                f"batch_size is {given}, but the pool has {count} envs. Leave it out: it is ({count},)."
            )
        options["batch_size"] = (count,)
        self.categorical_action_encoding = as_bool(
            "categorical_action_encoding", categorical_action_encoding
        )
        super().__init__(env, frame_skip=frame_skip, device=device, **options)
        self._rows = RowPool(env, frame_skip)

    def _make_specs(self, env: Simulator) -> None:
        device, batch = self.device, self._batch_size
        spaces = spaces_of(env)
        encode = partial(codec_of, categorical=self.categorical_action_encoding)
        self._observed: Codec = encode(spaces[0], key="observation")
        self._acted: Codec = encode(spaces[1], key="action")
        self.observation_spec = self._observed.spec(device).expand(batch)
        self.action_spec = self._acted.spec(device).expand(batch)
        reward = env.spec.state_array_spec["reward"]
        dtype = torch.from_numpy(np.empty(0, reward.dtype)).dtype
        self.reward_spec = Unbounded((*batch, 1), dtype=dtype, device=device)
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool, device=device)
        flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        self.done_spec = Composite(flags, shape=batch, device=device)

    def _told_first(self) -> list[str]:
        return [] if self.frame_skip == 1 else [f"frame_skip={self.frame_skip}"]

    # ------------------------------------------------------------------------- values and simulator

    @property
    def _simulator(self) -> RowPool:
        return self._rows

    def read_action(self, action: Value) -> SpaceValue:
        """Turn actions, one for each row that is stepped, into arrays, by the codec of the action space."""
        paths = self._acted.leaves
        if isinstance(action, TensorDictBase):
            return self._acted.decode_arrays({path: action.get(as_key(path)) for path in paths})
        return self._acted.decode_arrays(dict.fromkeys(paths, action))

    def read_obs(self, observations: object) -> Mapping[str, Any]:
        """Turn arrays of observations into entries, by the codec of the observation space."""
        return nest(self._observed.encode_arrays(observations))

    def read_reward(self, reward: object) -> torch.Tensor:
        """Turn an array of rewards into a tensor of shape ``(num_envs, 1)``."""
        return torch.from_numpy(np.asarray(reward)).unsqueeze(-1)

    def _output_transform(self, result: Stepped) -> Outcome:
        observations, rewards, terminated, truncated, infos = result
        return observations, rewards, terminated, truncated, None, _public(infos)

    def _reset_output_transform(self, result: Any) -> tuple[Any, dict[str, Any]]:
        observations, infos = result
        return observations, _public(infos)

    # ---------------------------------------------------------------------------- steps and resets

    def _prepare_step(self, ticket: Ticket, *, is_ahead: bool) -> None:
        mask = ticket.mask
        mask = None if mask is None or bool(mask.all()) else mask
        is_idle = mask is not None and not bool(mask.any())
        if is_idle or self._unshown is not None or not self._steps_by_itself:
            super()._prepare_step(ticket, is_ahead=is_ahead)
            return
        if self.run_type_checks:
            require_actions(ticket.td, self.full_action_spec)
        # Rows that are left out and done begin again as well.
        is_free = ticket.advance and ticket.td.get("next", None) is None
        ticket.restarts = is_free and self._is_plain
        ticket.work = _RowWork(mask, self._actions_of(ticket.td, mask))

    def _begin_step(self, ticket: Ticket) -> None:
        if (work := ticket.work) is not None:
            work.sent = self._rows.send(work.actions, _numbers(work.mask))

    def _finish_step(self, ticket: Ticket) -> TensorDictBase:
        td, work = ticket.td, ticket.work
        if work is None:
            return super()._finish_step(ticket)
        return self._accepted(self._received(td, work.mask, work.sent), td)

    def _fresh_root(self, ticket: Ticket, data: TensorDictBase) -> TensorDictBase:
        return self._begun(self.step_mdp(data))

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        mask = td.get(rules.STEP, None)
        sent = self._rows.send(self._actions_of(td, mask), _numbers(mask))
        return self._received(td, mask, sent)

    def _actions_of(self, td: TensorDictBase, mask: torch.Tensor | None) -> SpaceValue:
        """Return the actions of the rows that a mask selects, as the library takes them."""
        if mask is None:
            return self.read_action(self._action_in(td))
        action = self._action_in(td, mask.nonzero()[:, 0].tolist())
        return self.read_action(action[mask])

    def _received(
        self, td: TensorDictBase, mask: torch.Tensor | None, sent: Sent
    ) -> TensorDictBase:
        """Wait for a step, and give its ``next``; rows that the mask leaves out keep their root."""
        stepped = self._rows.spread(self._rows.recv(sent), sent.rows)
        outcome = self._output_transform(stepped)
        observations, rewards, terminated, truncated, done, infos = outcome
        flags = self.read_done(terminated, truncated, done)[:3]
        made = self._next_of((observations, rewards, *flags, infos))
        if mask is None:
            return made
        return self._checks.scatter(mask, made[mask], self._skipped_next(td))

    def _runs(self) -> Runs:
        """Return rollouts on rows, where they hold all that a step gives."""
        if not self._is_plain:
            return Runs()
        return RunsOnRow(self, lambda: self._declared.cached("row", self._made_row))

    @lasting()
    def _made_row(self) -> OneRow:
        return OneRow(self, VectorRows(PoolCore(self._rows, self._observed, self._acted)))

    @property
    def _is_plain(self) -> bool:
        """Whether observations, rewards and flags are all that a step gives, on the CPU."""
        return self.device == torch.device("cpu") and not (
            self.info_dict_reader or self.run_type_checks
        )

    def _begun(self, root: TensorDictBase) -> TensorDictBase:
        """Reset what is done in a root that a step gave, as `maybe_reset` does."""
        over = root.get("done")
        index = over[:, 0].nonzero()[:, 0].cpu()
        if not len(index):
            return root
        ended = index.numpy().astype(np.int32)
        observations, _ = self._rows.reset(ended)
        for path, value in self._observed.encode_arrays(observations).items():
            root.set(as_key(path), root.get(as_key(path)).index_copy(0, index, value))
        for path in DONE:
            root.set(as_key(path), torch.zeros_like(over))
        return root

    def _reset(self, td: TensorDictBase | None, **kwargs: object) -> TensorDictBase:
        if kwargs:
            raise OptionError(
                f"reset() was given {sorted(kwargs)}, but envs of EnvPool take no options when they are reset. "
                "Seeds are for set_seed(), all else for create_env_kwargs."
            )
        mask = None if td is None else td.get(rules.RESET, None)
        rows = None
        if mask is not None and not bool(mask.all()):
            rows = _numbers(mask.reshape(self._batch_size))
            if rows is not None and not len(rows):
                return self.full_observation_spec.zero()
        made = self._rows.spread(self._rows.reset(rows), rows)
        observations, infos = self._reset_output_transform(made)
        return self._to_tensordict(self.read_obs(observations), infos)

    # ------------------------------------------------------------------------------- seeds and life

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int:
        """Build the pool again, row i with the i-th seed of the chain; returns the seed after the last.

        With ``static_seed`` all rows get the same one, which is returned.
        """
        seeds, following = seed_chain(seed, self.numel(), static=static_seed)
        self._rows.seed(seeds)
        object.__setattr__(self, "_env", self._rows.pool)
        self._seed_actions(seed)
        self._after_seed()
        self._seed_is_static = static_seed
        return following

    _seed_is_static = False

    def _find_facts(self) -> Facts:
        return replace(super()._find_facts(), works_elsewhere=True, seeds_taken=self.numel())

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)

    @property
    def _seeded_parts(self) -> list[tuple[Any, int | None]]:
        if self._action_seed is None:
            return super()._seeded_parts
        seeds, _ = seed_chain(self._action_seed, self.numel(), static=self._seed_is_static)
        return list(enumerate(seeds))

    def _simulator_state(self) -> dict[str, Any]:
        if self._records:
            raise ResumeError(
                "EnvPool keeps the states of its envs to itself, so their episodes cannot be restored. Leave "
                "record_for_resume() out, so that new ones begin; env.transform.state_dict() is that of transforms alone."
            )
        return super()._simulator_state()

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Close the pool, after the step that is under way."""
        if not self.is_closed:
            self._rows.finish()
        super().close(raise_if_closed=raise_if_closed)


@dataclass(slots=True, eq=False)
class _RowWork:
    """State of a step that EnvPool's threads make.

    Attributes:
        mask: rows that are stepped, of which there is one at least; None: all.
        actions: of these, as the library takes them.
        sent: of `RowPool.send`.
    """

    mask: torch.Tensor | None
    actions: Any
    sent: Any = field(default=None, init=False)


def _public(infos: Mapping[str, Any]) -> dict[str, Any]:
    """Return the infos without the row numbers, which are the positions of the rows."""
    kept = {name: value for name, value in infos.items() if name != "env_id"}
    players = {name: value for name, value in kept.pop("players", {}).items() if name != "env_id"}
    return {**kept, "players": players} if players else kept


# ---------------------------------------------------------------------------------------- by name


def env_names() -> list[str]:
    """List what the library has registered; the machine may lack what a few of them need."""
    return sorted(import_envpool().list_all_envs())


class MultiThreadedEnv(MultiThreadedEnvWrapper):
    """Make envs of the EnvPool library by name, which its threads step; see `MultiThreadedEnvWrapper`.

    Args:
        num_workers: number of envs, which is the batch size.
        env_name: id of the library, e.g. "CartPole-v1".
        create_env_kwargs: go to ``envpool.make_gymnasium``, e.g. ``{"max_episode_steps": 100, "num_threads": 2}``.
        categorical_action_encoding: integers for discrete actions and observations; False: one-hot.
        frame_skip: steps of the library per step, rewards summed; a row stops where its episode ends.
        device: where data is delivered, "cpu" by default.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    Without `set_seed`, or a seed among ``create_env_kwargs``, torch's global generator decides the seeds. A seed beyond
    int32, the only ones that the library takes, stands for one within: the same each time.

    Raises:
        MissingLibraryError: (an ImportError) EnvPool is not installed.
        ArgumentError: (a ValueError) it has no env of that name.
        OptionError: (a TypeError) that env knows no such keyword.

    Example:
        >>> from envkit import MultiThreadedEnv
        >>> env = MultiThreadedEnv(4, "CartPole-v1")
        >>> env.rollout(5, break_when_any_done=False)["observation"].shape
        torch.Size([4, 5, 4])
        >>> env.close()
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self,
        num_workers: int,
        env_name: str,
        *,
        create_env_kwargs: Mapping[str, Any] | None = None,
        categorical_action_encoding: bool = True,
        frame_skip: int = 1,
        device: Device | None = "cpu",
        **options: Unpack[EnvOptions],
    ):
        self.num_workers = as_int("num_workers", num_workers, least=1, meaning="the number of envs")
        pool = make_pool(env_name, self.num_workers, create_env_kwargs or {})
        super().__init__(
            pool,
            categorical_action_encoding=categorical_action_encoding,
            frame_skip=frame_skip,
            device=device,
            **options,
        )
        self.env_name = env_name

    def _told_first(self) -> list[str]:
        return [str(self.num_workers), repr(self.env_name), *super()._told_first()]


def build(name: str, *, num_workers: int, **kwargs: Any) -> MultiThreadedEnv:
    """Make a pool of ``num_workers`` of them.

    Args:
        name: id of the library.
        num_workers: number of envs.
        **kwargs: what `MultiThreadedEnv` takes; what it does not know is among its ``create_env_kwargs``.

    Raises:
        ArgumentError: (a ValueError) the library has no env of this name.
        OptionError: (a TypeError) it does not know a keyword.
    """
    require_name(name)
    own = {name: kwargs.pop(name) for name in known_to(MultiThreadedEnv) or () if name in kwargs}
    of_env = {**(own.pop("create_env_kwargs", None) or {}), **kwargs}
    return MultiThreadedEnv(num_workers, name, create_env_kwargs=of_env, **own)
