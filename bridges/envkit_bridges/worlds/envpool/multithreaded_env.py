"""Envs of the EnvPool library: many rows, stepped together by its own threads.

`MultiThreadedEnvWrapper` steps a pool as `GymWrapper` does a vector env of Gymnasium: every step acts, `next` holds the
true last observation. Masks select any rows, and beside other envs its threads step while those make their steps.
How the library is asked for that is known to `library`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.arrays.integers import as_int
from envkit.data.arguments import as_batch_size
from envkit.data.keywords import known_to, refuse_unknown
from envkit.env.facts import Facts
from envkit.env.input_checks import require_actions
from envkit.env.options import EnvOptions
from envkit.env.tickets import Ticket
from envkit.errors import BatchSizeError
from envkit.specs import Composite, Unbounded
from envkit.specs.annotations import Device
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.gym.info import Outcome
from envkit_bridges.gym.vector import Stepped
from envkit_bridges.libraries import EnvNames
from envkit_bridges.worlds.envpool.library import (
    PoolCore,
    PoolVectorEnv,
    import_envpool,
    make_pool,
    require_name,
    require_pool,
)

if TYPE_CHECKING:
    from envkit_bridges.gym.backend import SpaceValue
    from envkit_bridges.libraries import Simulator


# ---------------------------------------------------------------------------------------------- envs


class MultiThreadedEnvWrapper(GymWrapper):
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
    _fast_path_bypasses = GymWrapper._fast_path_bypasses
    _vector_kind = PoolCore

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
        count, batch = int(env.config["num_envs"]), options.get("batch_size")
        if batch is not None and as_batch_size(batch) != torch.Size([count]):
            raise BatchSizeError(
                f"batch_size is {batch}, but the pool has {count} envs. Leave it out: it is ({count},)."
            )
        refuse_unknown(type(self).__name__, options, known_to(type(self)) or [*options])
        meaning = "the steps of the library for each step of the env"
        frame_skip = as_int("frame_skip", frame_skip, least=1, meaning=meaning)
        pool = PoolVectorEnv(env, frame_skip)
        super().__init__(pool, categorical_action_encoding, device=device, **options)
        self.libname, self.frame_skip = "envpool", frame_skip

    def _reward_of_one(self) -> Composite:
        reward = self._env.spec.state_array_spec["reward"]
        dtype = torch.from_numpy(np.empty(0, reward.dtype)).dtype
        return Composite(reward=Unbounded((1,), dtype=dtype, device=self.device))

    def _repr_arguments(self) -> list[str]:
        return [] if self.frame_skip == 1 else [f"frame_skip={self.frame_skip}"]

    def _repeated_step(self, action: SpaceValue) -> Outcome:
        return self._outcome(self._simulator.step(action))  # which repeats frames by itself

    def _outcome(self, result: Stepped) -> Outcome:
        observations, rewards, terminated, truncated, done, infos = self._output_transform(result)
        *flags, _ = self.read_done(terminated, truncated, done)
        return (observations, rewards, *flags, infos)

    # --------------------------------------------------------- steps while other envs make theirs

    def _prepare_step(self, ticket: Ticket, *, is_ahead: bool) -> None:
        is_whole = ticket.mask is None and self._unshown is None
        if not (is_ahead and is_whole and self._steps_by_itself):
            super()._prepare_step(ticket, is_ahead=is_ahead)
            return
        if self.run_type_checks:
            require_actions(ticket.td, self.full_action_spec)
        ticket.work = self.read_action(self._action_in(ticket.td))

    def _begin_step(self, ticket: Ticket) -> None:
        if ticket.work is None:
            super()._begin_step(ticket)
        else:
            ticket.work = self._simulator.send(ticket.work)

    def _finish_step(self, ticket: Ticket) -> TensorDictBase:
        if ticket.work is None:
            return super()._finish_step(ticket)
        outcome = self._outcome(self._simulator.recv(ticket.work))
        return self._accepted(self._next_of(outcome), ticket.td)

    # ------------------------------------------------------------------------------------------ life

    def _find_facts(self) -> Facts:
        return replace(super()._find_facts(), works_elsewhere=True)

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Close the pool, after the step that is under way."""
        if not self.is_closed:
            self._simulator.finish()
        super().close(raise_if_closed=raise_if_closed)


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

    def _repr_arguments(self) -> list[str]:
        return [str(self.num_workers), repr(self.env_name), *super()._repr_arguments()]


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
