"""Where the time of a collector goes: seconds that are always counted, and torch's profiler on request.

Conventions
    batch    what one runner makes; a collector with workers asks several of them for each batch it delivers.
    seconds  spent in "envs", in the "policy", and in "transfer"; what a policy takes is counted away from the envs,
             whose time is that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.env.bound_policy import BoundPolicy, LeavesPolicy, RowsPolicy
from envkit.errors import ArgumentError


@dataclass(frozen=True)
class ProfileConfig:
    """Settings of `Collector.enable_profile`.

    Args:
        workers: numbers of the workers; a collector in this process is number 0.
        num_rollouts: batches until the trace is written, warm-up included.
        warmup_rollouts: batches at the start that are left out.
        save_path: file of the trace, in Chrome's format; ``{worker_idx}`` stands for the number of the worker. None:
            ``collector_profile_{worker_idx}.json`` in the working directory.
        activities: "cpu" and "cuda"; "cuda" is left out where there is none.
        record_shapes, profile_memory, with_stack, with_flops: see ``torch.profiler.profile``.
        on_trace_ready: called with the profiler instead of writing a file.

    Raises:
        ArgumentError: (a ValueError) no batch is left to profile, or an activity is unknown.

    Example:
        >>> ProfileConfig(save_path="traces/{worker_idx}.json").get_save_path(2)
        PosixPath('traces/2.json')
    """

    workers: list[int] = field(default_factory=lambda: [0])
    num_rollouts: int = 3
    warmup_rollouts: int = 1
    save_path: str | Path | None = None
    activities: list[str] = field(default_factory=lambda: ["cpu", "cuda"])
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = True
    with_flops: bool = False
    on_trace_ready: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_rollouts < self.num_rollouts:
            raise ArgumentError(
                f"num_rollouts is {self.num_rollouts} and warmup_rollouts {self.warmup_rollouts}, so no batch is left to "
                "profile. Pass warmup_rollouts of at least 0, and more num_rollouts than that."
            )
        if unknown := sorted({name.lower() for name in self.activities} - {"cpu", "cuda"}):
            raise ArgumentError(
                f"activities has {unknown}, but must hold 'cpu', 'cuda' or both. Leave the others out."
            )

    def get_save_path(self, worker_idx: int) -> Path:
        """Return the file of a worker's trace.

        Args:
            worker_idx: number of the worker.
        """
        given = "collector_profile_{worker_idx}.json" if self.save_path is None else self.save_path
        return Path(str(given).format(worker_idx=worker_idx))

    def get_activities(self) -> list[torch.profiler.ProfilerActivity]:
        """Return what is recorded on this machine."""
        known = torch.profiler.ProfilerActivity
        named = {name.lower() for name in self.activities}
        has_cuda = "cuda" in named and torch.cuda.is_available()
        return [*([known.CPU] if "cpu" in named else []), *([known.CUDA] if has_cuda else [])]

    def should_profile_worker(self, worker_idx: int) -> bool:
        """Check whether a worker is profiled.

        Args:
            worker_idx: number of the worker.
        """
        return worker_idx in self.workers


class Profiling:
    """Profile the batches of one runner, from the next one on; called after each of them.

    Args:
        config: what to profile.
        worker_idx: number of the worker.
    """

    def __init__(self, config: ProfileConfig, worker_idx: int):
        self._left = config.num_rollouts
        warmup = min(1, config.warmup_rollouts)
        schedule = torch.profiler.schedule(
            wait=0,
            warmup=warmup,
            active=config.num_rollouts - config.warmup_rollouts,
            repeat=1,
            skip_first=config.warmup_rollouts - warmup,
        )
        self._profile = torch.profiler.profile(
            activities=config.get_activities(),
            schedule=schedule,
            on_trace_ready=config.on_trace_ready or _Writing(config.get_save_path(worker_idx)),
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
        )
        self._profile.start()

    def __call__(self) -> None:
        """Count a batch; the last one ends the profile and hands its trace over."""
        if self._left:
            self._left -= 1
            self._profile.step()
            if not self._left:
                self._profile.stop()

    def stop(self) -> None:
        """End the profile, if it goes on."""
        if self._left:
            self._left = 0
            self._profile.stop()


@dataclass(frozen=True)
class _Writing:
    """Write a trace to a file."""

    path: Path

    def __call__(self, profile: torch.profiler.profile) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self.path))


class Seconds(dict[str, float]):
    """Seconds by what they were spent in."""

    def __init__(self) -> None:
        super().__init__(envs=0.0, policy=0.0, transfer=0.0)

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Count what is done within as "transfer"."""
        began = perf_counter()
        try:
            yield
        finally:
            self["transfer"] += perf_counter() - began

    def counted(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does what ``act`` does, and counts its time as that of the policy."""

        def call(*inputs: Any) -> Any:
            began = perf_counter()
            result = act(*inputs)
            spent = perf_counter() - began
            self["policy"] += spent
            self["envs"] -= spent
            return result

        return call


class Timed(BoundPolicy):
    """Does what a policy does, in the ways it can, and counts how long it takes."""

    def __init__(self, act: BoundPolicy, seconds: Seconds):
        super().__init__(seconds.counted(act))
        self._bound, self._seconds = act, seconds

    def for_run(self, root: TensorDictBase) -> LeavesPolicy | RowsPolicy | None:
        acts = self._bound.for_run(root)
        return None if acts is None else replace(acts, act=self._seconds.counted(acts.act))
