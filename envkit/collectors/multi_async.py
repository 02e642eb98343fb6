"""Collect with workers that go on while the caller trains: a batch is that of whichever worker is ready first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Unpack

from envkit.batched.settings import RayOptions
from envkit.collectors.collector import MakeEnv
from envkit.collectors.multi import MultiCollector
from envkit.collectors.runner import Batch
from envkit.collectors.settings import WorkerOptions
from envkit.collectors.worker_pool import Part
from envkit.data.arguments import as_bool
from envkit.data.plain import from_plain, plain
from envkit.env.base import EnvBase
from envkit.env.policy import PolicyLike
from envkit.errors import BatchCountError, OptionError

__all__ = ["AsyncCollector", "MultiAsyncCollector", "MultiaSyncDataCollector"]


class MultiaSyncDataCollector(MultiCollector):
    """Collect in workers, processes or actors of Ray, each of which makes whole batches; see `Collector` and
    `envkit.collectors.settings.WorkerOptions`.

    A worker whose batch was taken begins the next one at once, with the newest weights. One whose batch waits for
    the caller does nothing: there is at most one batch of each worker.
    """

    _kind = "in workers, a batch in each"

    def __init__(
        self,
        create_env_fn: MakeEnv,
        policy: PolicyLike = None,
        *,
        backend: str | None = None,
        sync: bool = False,
        num_collectors: int | None = None,
        backend_options: RayOptions | None = None,
        **options: Unpack[WorkerOptions],
    ):
        if as_bool("sync", sync):
            raise OptionError(
                f"sync=True, but a MultiaSyncDataCollector collects {self._kind}. Use MultiSyncDataCollector."
            )
        self._ready: deque[Part] = deque()
        self._taken_frames = 0
        self._build(
            create_env_fn,
            policy,
            options,
            count=num_collectors,
            backend=backend,
            backend_options=backend_options,
        )

    def _require_kind(self, given: Any) -> None:
        for name, unset in (("prefetch", 0), ("preemptive_threshold", None)):
            if getattr(given, name) != unset:
                raise OptionError(
                    f"{name} is {getattr(given, name)!r}, but workers of {type(self).__name__} do not wait for each other "
                    "nor for the caller. Leave it out, or use MultiSyncDataCollector."
                )

    def _fit(self, given: Any) -> None:
        self._set_steps(1)

    @property
    def _frames_each(self) -> int:
        return max(self._steps) * self._rows_each

    def __len__(self) -> int:
        if self._options.total_frames is None or self._episodes is not None or self._makes_alike:
            return super().__len__()
        raise BatchCountError(
            f"frames_per_batch is {self._options.frames_per_batch}, so how many batches there will be depends on which "
            "workers are ready first. Pass one number for all, or iterate over it."
        )

    def _begin_batch(self, *, random: bool) -> Callable[[], Batch]:
        self._keep_busy()
        return self._finish

    def _keep_busy(self) -> None:
        """Have every worker make a batch that has none, as long as there is more to collect."""
        waiting = {part.worker for part in self._ready}
        total = None if self._episodes is not None else self._options.total_frames
        for worker in range(self.num_workers):
            if worker in self._worker_pool.jobs or worker in waiting:
                continue
            steps = sum(self._steps[one] for one in (*waiting, *self._worker_pool.jobs))
            ordered = self._taken_frames + steps * self._rows_each
            if total is not None and ordered >= total:
                return
            self._worker_pool.order(
                worker, random=ordered < (self._options.init_random_frames or 0)
            )

    def _finish(self) -> Batch:
        self._keep_busy()  # what an error has left out
        if not self._worker_pool.packings and self._options.use_buffers is not False:
            self._receive_all()
            self._worker_pool.learn_form(list(self._ready))
        while not self._ready:
            self._receive_some()
        part = self._ready[0]
        with self._seconds.transferring():
            batch = Batch(self._stored(part.data.clone(), part.worker), part.following)
        self._taken_frames += self.frames_per_batch_worker(part.worker)
        del self._ready[0]
        return batch

    def _go_on(self) -> None:
        if self._options.update_at_each_batch:
            self.update_policy_weights_()
        self._keep_busy()

    def _receive_some(self) -> None:
        for worker in self._worker_pool.wait(1):
            if (part := self._worker_pool.receive(worker)) is not None:
                self._ready.append(part)

    def _receive_all(self) -> None:
        while self._worker_pool.jobs:
            self._receive_some()

    def _require_idle(self) -> None:
        self._worker_pool.order_again()
        self._receive_all()

    def _runner_states(self) -> dict[str, Any]:
        states = super()._runner_states()  # which waits for all workers
        ready = [
            {
                "worker": part.worker,
                "data": plain(part.data),
                "valid": part.valid,
                "following": part.following.clone(),
            }
            for part in self._ready
        ]
        return {**states, "ready": ready, "taken_frames": self._taken_frames}

    def _load_runner_states(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._load_runner_states(state, strict=strict)
        self._taken_frames = (
            state["taken_frames"]
            if "taken_frames" in state
            else state["taken"] * self._frames_each  # as older files say it
        )
        self._ready = deque(
            Part(part["worker"], from_plain(part["data"]), part["valid"], part["following"].clone())
            for part in state["ready"]
        )


MultiAsyncCollector = MultiaSyncDataCollector


class AsyncCollector(MultiaSyncDataCollector):
    """Collect in a single worker, which goes on while the caller trains; see `MultiaSyncDataCollector`.

    Example:
        >>> collector = AsyncCollector(lambda: GymEnv("CartPole-v1"), frames_per_batch=64)
        >>> collector.next().batch_size
        torch.Size([64])
        >>> collector.shutdown()
    """

    _kind = "in a worker"

    def __init__(
        self,
        create_env_fn: Callable[..., EnvBase] | EnvBase,
        policy: PolicyLike = None,
        *,
        backend: str | None = None,
        backend_options: RayOptions | None = None,
        **options: Unpack[WorkerOptions],
    ):
        super().__init__(
            create_env_fn,
            policy,
            backend=backend,
            backend_options=backend_options,
            num_collectors=1,
            **options,
        )
