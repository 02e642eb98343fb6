"""Collect with workers that make a part each of every batch, and wait while the caller trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack, cast

import torch
from tensordict import TensorDictBase

from envkit.batched.settings import RayOptions
from envkit.collectors.collector import MakeEnv
from envkit.collectors.multi import MultiCollector
from envkit.collectors.runner import COLLECTOR, Batch
from envkit.collectors.settings import WorkerOptions
from envkit.collectors.worker_pool import Part
from envkit.data.arguments import as_bool
from envkit.env.policy import PolicyLike
from envkit.errors import ArgumentError, OptionError

__all__ = ["MultiSyncCollector", "MultiSyncDataCollector"]


class MultiSyncDataCollector(MultiCollector):
    """Collect in workers, processes or actors of Ray, all of which make a part of every batch; see `Collector` and
    `envkit.collectors.settings.WorkerOptions`.

    No step is made between the delivery of a batch and the request for the next one, unless ``prefetch=1``.
    """

    _kind = "in workers, a part of every batch in each"

    def __init__(
        self,
        create_env_fn: MakeEnv,
        policy: PolicyLike = None,
        *,
        backend: str | None = None,
        sync: bool = True,
        num_collectors: int | None = None,
        backend_options: RayOptions | None = None,
        **options: Unpack[WorkerOptions],
    ):
        if not as_bool("sync", sync):
            raise OptionError(
                f"sync=False, but a MultiSyncDataCollector collects {self._kind}. Use MultiaSyncDataCollector."
            )
        self._parts_made: dict[int, Part] = {}
        self._build(
            create_env_fn,
            policy,
            options,
            count=num_collectors,
            backend=backend,
            backend_options=backend_options,
        )

    def _require_kind(self, given: Any) -> None:
        frames = given.frames_per_batch
        differ = isinstance(frames, list) and len(set(frames)) > 1
        storage = getattr(given.replay_buffer, "storage", None)
        holds_steps = given.replay_buffer is not None and getattr(storage, "ndim", 1) == 1
        if holds_steps and given.trajs_per_batch is None and given.cat_results in (None, "stack"):
            given.cat_results = -1 if differ or given.preemptive_threshold is not None else 0
        if given.cat_results is None:
            given.cat_results = -1 if differ and given.trajs_per_batch is None else "stack"
        _require_joinable(given)

    def _fit(self, given: Any) -> None:
        self._set_steps(self.num_workers)
        _require_axis(given, len(self.batch_size))
        if not self._makes_alike:
            _require_time(given, len(self.batch_size))

    @property
    def _frames_each(self) -> int:
        return sum(self._steps) * self._rows_each

    def _begin_batch(self, *, random: bool) -> Callable[[], Batch]:
        if self._options.update_at_each_batch:
            self.update_policy_weights_()
        self._order_missing(random)
        return lambda: self._finish(random)

    def _order_missing(self, random: bool) -> None:
        for worker in range(self.num_workers):
            if worker not in self._worker_pool.jobs and worker not in self._parts_made:
                self._worker_pool.order(worker, random=random)

    def _finish(self, random: bool) -> Batch:
        self._order_missing(random)  # what an error has left out
        threshold = self._options.preemptive_threshold
        enough = math.inf if threshold is None else int(self.num_workers * threshold)
        while self._worker_pool.jobs:
            if len(self._parts_made) >= enough:
                self._worker_pool.stop(list(self._worker_pool.jobs))
            for worker in self._worker_pool.wait(1):  # who fails is told at once
                if (part := self._worker_pool.receive(worker)) is not None:
                    self._parts_made[worker] = part
        parts = [self._parts_made[worker] for worker in range(self.num_workers)]
        with self._seconds.transferring():
            joined = self._stored(self._joined(parts))
        batch = Batch(joined, torch.cat([part.following for part in parts]))
        if self._options.use_buffers is not False:
            self._worker_pool.learn_form(parts)
        stopped = (sum(self._steps) - sum(part.valid for part in parts)) * self._rows_each
        begun = self._begun_frames - stopped  # frames that were not made do not count
        self._parts_made, self._begun_frames = {}, begun
        return batch

    def _joined(self, parts: list[Part]) -> TensorDictBase:
        """Join parts, which this copies."""
        dim = self._options.cat_results
        datas = [part.data for part in parts]
        if dim == "stack" or self._episodes is not None:
            data = cast(TensorDictBase, torch.stack(cast(Any, datas)))
            if self._options.preemptive_threshold is not None:
                steps = torch.arange(self._steps[0], device="cpu")
                valid = torch.tensor([part.valid for part in parts], device="cpu")
                mask = steps < valid.reshape(-1, *(1,) * len(self.batch_size), 1)
                data.set((COLLECTOR, "mask"), mask.expand(data.batch_size).clone())
            return data
        time = len(self.batch_size)
        if self._options.preemptive_threshold is not None:
            datas = [part.data[..., : part.valid] for part in parts]
        data = cast(TensorDictBase, torch.cat(cast(Any, datas), dim))
        data.names = [*[None] * time, None if dim in (time, -1) else "time"]
        return data

    def _require_idle(self) -> None:
        if self._worker_pool.jobs or self._parts_made or self._worker_pool.unsure:
            if self._pending is None:  # Ctrl-C came while it was begun
                self._begin_next()
            self._settle()


MultiSyncCollector = MultiSyncDataCollector


def _require_joinable(given: Any) -> None:
    """Check how batches are to be joined.

    Raises:
        ArgumentError: (a ValueError) in no way that there is.
        OptionError: (a TypeError) whole episodes are joined in a way of their own, or parts are wanted on several devices.
    """
    dim, stored = given.cat_results, given.storing_device
    if isinstance(stored, list) and len(set(stored)) > 1:
        raise OptionError(
            f"storing_device is {list(map(str, stored))}, but the parts of a batch are joined on one device. Pass a single "
            "one, or use MultiaSyncDataCollector, whose batches come from one worker each."
        )
    if dim == "stack":
        return
    if given.trajs_per_batch is not None:
        raise OptionError(
            "cat_results and trajs_per_batch exclude each other: traj_format says how."
        )
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ArgumentError(
            f"cat_results is {dim!r}, but must be 'stack', or an int: the axis to concatenate along, -1 for time."
        )


def _require_axis(given: Any, batch_dims: int) -> None:
    """Check the axis along which batches are to be joined.

    Raises:
        ArgumentError: (a ValueError) there is none such, or batches that were cut short do not fit along it.
    """
    dim = given.cat_results
    if dim == "stack":
        return
    if not -batch_dims - 1 <= dim <= batch_dims:
        raise ArgumentError(
            f"cat_results is {dim}, but batches have {batch_dims + 1} axes. Pass 'stack', or -1 for time."
        )
    if given.preemptive_threshold is not None and dim not in (-1, batch_dims):
        raise ArgumentError(
            f"cat_results is {dim}, but with preemptive_threshold batches of workers differ in length. Pass -1 or "
            "'stack'."
        )


def _require_time(given: Any, batch_dims: int) -> None:
    """Check that parts of different lengths can be joined.

    Raises:
        OptionError: (a TypeError) they can not, in the way that was asked for.
    """
    told = f"frames_per_batch is {given.frames_per_batch}, so parts of workers differ in length"
    if given.trajs_per_batch is not None:
        raise OptionError(
            f"{told}, but trajs_per_batch looks for whole episodes in parts of one length. Pass one number, or use "
            "MultiaSyncDataCollector."
        )
    if given.cat_results not in (-1, batch_dims):
        raise OptionError(
            f"{told}, but cat_results={given.cat_results!r} joins parts of one length. Pass -1, the axis of time."
        )
