"""Collect in this process: one env, of any batch, and one policy take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

import torch

from envkit.batched.attributes import ask_single_envs, chosen_rows, require_found, single_envs
from envkit.collectors.build_runner import Parts, build_runner, recorded_leaves
from envkit.collectors.collector import Collector, flat_stats
from envkit.collectors.profiling import ProfileConfig
from envkit.collectors.runner import COLLECTOR, Batch, Order, lengthened
from envkit.collectors.settings import CollectorOptions, CollectorSettings
from envkit.collectors.threads import in_turn
from envkit.collectors.weights import as_weights
from envkit.data.arguments import as_bool
from envkit.env.base import EnvBase
from envkit.env.policy import HasParams, PolicyLike
from envkit.errors import ArgumentTypeError, OptionError
from envkit.specs.annotations import EnvData


class SyncDataCollector(Collector):
    """Collect in this process.

    With a policy that compiles over a stateless env a batch is one program, and ``prefetch=1`` has it run
    while the caller trains. Else a batch is collected when it is asked for.

    Args:
        create_env_fn: an env, or a function that makes one.
        policy: see `Collector`; None for random actions.
        backend: "direct", or None.
        sync: True.
        **options: those of `Collector`, but for those of workers.

    Example:
        >>> from envkit import GymEnv, SyncDataCollector
        >>> collector = SyncDataCollector(
        ...     GymEnv("CartPole-v1"), frames_per_batch=20, total_frames=40
        ... )
        >>> [batch["observation"].shape for batch in collector]
        [torch.Size([20, 4]), torch.Size([20, 4])]
        >>> collector.shutdown()
    """

    _kind = "in this process"

    def __init__(
        self,
        create_env_fn: Callable[..., EnvBase] | EnvBase,
        policy: PolicyLike = None,
        *,
        backend: str | None = None,
        sync: bool = True,
        **options: Unpack[CollectorOptions],
    ):
        if backend not in (None, "direct") or not as_bool("sync", sync):
            raise OptionError(
                f"backend={backend!r} and sync={sync} ask for workers, but a SyncDataCollector collects "
                f"{self._kind}. Leave them out, or use Collector(backend='process')."
            )
        settings = self._take(create_env_fn, policy, CollectorOptions, options)
        if not callable(create_env_fn) and not hasattr(create_env_fn, "rollout"):
            raise ArgumentTypeError(
                f"create_env_fn is of type {type(create_env_fn).__name__}, but must be an env or make one. Pass lambda: "
                "GymEnv('CartPole-v1') for instance; a gymnasium env is wrapped: GymWrapper(env). Several envs in this "
                "process are one SerialEnv."
            )
        _single("frames_per_batch", settings.frames_per_batch)
        parts = Parts(create_env_fn, policy, settings.of_runner(_single))
        self._trained = policy
        if settings.seed is not None:
            torch.manual_seed(settings.seed)
        self._made_env = not isinstance(create_env_fn, EnvBase)
        self._runner = build_runner(parts)
        self.env = self._runner.env
        try:
            self._fit(settings)
            self._prepare()
            if settings.seed is not None:
                self.set_seed(settings.seed)
        except BaseException:
            self.shutdown()
            raise

    def _fit(self, settings: CollectorSettings) -> None:
        """Set how batches are made, now that there is an env."""
        self._steps = self._steps_each(self.env.batch_size.numel())
        self._delivery.require_room(recorded_leaves(self.env, self._runner.options))
        if settings.prefetch and not self.env._runs().is_program(self._runner.policy):
            raise OptionError(
                f"prefetch={settings.prefetch} needs steps that are one program, but {type(self.env).__name__} with this "
                "policy steps one by one in this process. Use a stateless env with compile_policy(module), or "
                "backend='process'."
            )

    @property
    def policy(self) -> Any:
        """The policy that acts."""
        return self._runner.policy

    @property
    def _frames_each(self) -> int:
        return self._steps * self.env.batch_size.numel()

    def _begin_batch(self, *, random: bool) -> Callable[[], Batch]:
        stopped = self._settings.interruptor
        interrupted = None if stopped is None else stopped.collection_stopped
        order = Order(self._steps, random, self.policy_version, interrupted)
        begun: Callable[[], Batch] | None = self._runner.begin(order)

        def finish() -> Batch:
            nonlocal begun
            finished, begun = begun or self._runner.begin(order), None
            batch = finished()
            return batch if stopped is None else _filled(batch, self._steps)

        return finish

    @in_turn
    def _update_weights(self, source: Any) -> None:
        weights = self._trained if source is None else source
        acting = self._runner.policy
        if source is not None or (
            acting is not weights and isinstance(weights, torch.nn.Module | HasParams)
        ):
            self._runner.load_weights(as_weights(weights, acting))
        self.increment_version()

    @in_turn
    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        self._settle()
        following = self._runner.seed(seed, static=static_seed)
        if self._runner.frames:
            ended = self._runner.begin_anew()
            if self._episodes is not None:
                self._episodes.cut(ended)
        return following

    @in_turn
    def reset(self, index: torch.Tensor | None = None) -> None:
        """Reset the env, or the rows that a bool mask names; the next batch begins new trajectories there.

        Args:
            index: rows that are reset, bool, shape of the env's batch; None: all.

        Example:
            >>> from envkit import GymEnv, SyncDataCollector
            >>> collector = SyncDataCollector(GymEnv("CartPole-v1"), frames_per_batch=4)
            >>> collector.next()["collector", "traj_ids"]
            tensor([0, 0, 0, 0])
            >>> collector.reset()
            >>> collector.next()["collector", "traj_ids"]
            tensor([1, 1, 1, 1])
            >>> collector.shutdown()
        """
        self._settle()
        ended = self._runner.begin_anew(index)
        if self._episodes is not None:
            self._episodes.cut(ended)

    _runner_names = ("policy_state_dict", "env_state_dict", "root", "numbers", "generators")

    def _runner_states(self) -> dict[str, Any]:
        return self._runner.state_dict()

    def _load_runner_states(self, state: Mapping[str, Any], *, strict: bool) -> None:
        self._runner.load_state_dict(state, strict=strict)

    def stats(self) -> dict[str, int | float | bool]:
        return {**self._amounts, **flat_stats(self._runner.counted())}

    @in_turn
    def _ask_envs(
        self, ask: Callable[[Any], Any], indices: int | Iterable[int] | None
    ) -> list[Any]:
        self._settle()
        rows = chosen_rows(indices, single_envs(self.env))
        values = ask_single_envs(self.env, ask, rows)
        require_found(values, type(self).__name__)
        return values

    @in_turn
    def fake_tensordict(self) -> EnvData:
        return self._delivery.made_of(self._runner.fake_batch(self._steps))

    def _asked_of_first(self, part: str, attr: str) -> Any:
        return getattr(getattr(self, part), attr)

    @in_turn
    def _profile(self, config: ProfileConfig | None) -> None:
        self._runner.profile(config, 0)

    def _end(self, *, close_env: bool | None = None) -> None:
        closes = self._made_env if close_env is None else close_env
        if closes and not self.env.is_closed:
            self.env.close(raise_if_closed=False)


def _filled(batch: Batch, steps: int) -> Batch:
    """Fill a batch that was ended early up with zeros, and mark in it which steps were made."""
    made = batch.data.batch_size[-1]
    data = batch.data if made == steps else lengthened(batch.data, steps)
    valid = torch.arange(steps, device=data.get((COLLECTOR, "traj_ids")).device) < made
    data.set((COLLECTOR, "mask"), valid.expand(data.batch_size).clone())
    return Batch(data, batch.following)


def _single(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        raise OptionError(
            f"{name} is a list, but a SyncDataCollector collects {SyncDataCollector._kind}, with one env. Pass a single one."
        )
    return value
