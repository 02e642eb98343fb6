"""Many sub-envs in worker processes.

`ParallelEnv` gives the data of a `SerialEnv` with the same seed, whatever the number of processes.
It computes no gradients.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase

from envkit.batched.common import BatchedEnv
from envkit.batched.host import COMMAND_NAMES, HostFactory, Maker
from envkit.batched.metadata import EnvMetaData
from envkit.transport import Pool, ProcessPool

__all__ = ["ParallelEnv", "WorkerAttribute"]

_PRELOAD = ("torch", "tensordict", "gymnasium", "envkit.batched.host", "bridges.gymnasium")


class ParallelEnv(BatchedEnv):
    """Step ``num_workers`` sub-envs in worker processes.

    Args:
        num_workers: number of sub-envs (not of processes).
        create_env_fn: callable that makes one, or a list of one per sub-env. It travels by value:
            lambdas, classes of a notebook cell and scripts without a main guard work.
        num_processes: processes that share the sub-envs evenly; None takes one per core, at most
            one per sub-env. Shows in no result.
        num_threads: torch threads of this process while the workers run; None leaves them alone.
        num_sub_threads: torch threads of each worker.
        timeout: seconds a start, step or reset may take; None sets no limit.
        mp_start_method: "forkserver" (the default where it exists) or "spawn". "fork" is refused
            once JAX has started.
        **kwargs: see `BatchedEnv`.
    """

    works_elsewhere = True

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Any,
        *,
        num_processes: int | None = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        timeout: float | None = 60.0,
        mp_start_method: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(num_workers, create_env_fn, **kwargs)
        if num_processes is not None and not 1 <= num_processes <= num_workers:
            raise ValueError(
                f"num_processes is {num_processes}, but must be between 1 and num_workers "
                f"({num_workers})."
            )
        self.num_processes = num_processes
        self.num_threads = num_threads
        self.num_sub_threads = num_sub_threads
        self.timeout = timeout
        self.mp_start_method = mp_start_method

    def _make_pool(self, makers: list[Maker]) -> Pool:
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        if os.environ.get("LAZY_LEGACY_OP") == "None":
            # tensordict leaves this behind when it has stacked unlike data, and fails at the next
            # import of itself that sees it: a worker's.
            del os.environ["LAZY_LEGACY_OP"]
        hide = getattr(sys.modules["envkit"], "filter_warnings_subprocess", True)
        return ProcessPool(
            HostFactory(makers, num_threads=self.num_sub_threads, hide_warnings=hide),
            self.num_workers,
            self.num_processes or min(self.num_workers, os.cpu_count() or 1),
            start_method=self.mp_start_method,
            timeout_s=self.timeout,
            preload=_PRELOAD,
            commands=COMMAND_NAMES,
        )

    def _wants_buffers(self, metadata: list[EnvMetaData]) -> bool:
        if any(found.is_dynamic for found in metadata):
            if self._use_buffers:
                warnings.warn(
                    "use_buffers=True, but a spec has no fixed size or is no tensor; "
                    "TensorDicts are sent instead.",
                    stacklevel=2,
                )
            return False
        return self._use_buffers is None or self._use_buffers

    @torch.no_grad()
    def reset(self, tensordict: TensorDictBase | None = None, *args: Any, **kwargs: Any):
        return super().reset(tensordict, *args, **kwargs)

    @torch.no_grad()
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super().step(tensordict)

    @torch.no_grad()
    def step_and_maybe_reset(self, tensordict: TensorDictBase):
        return super().step_and_maybe_reset(tensordict)

    def _attribute(self, pool: Pool, name: str) -> WorkerAttribute:
        return WorkerAttribute(pool, name)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._started().call("process_id")


class WorkerAttribute:
    """An attribute of every sub-env, fetched when it is looked at and called when it is called."""

    def __init__(self, pool: Pool, name: str):
        self._pool = pool
        self._name = name

    def _values(self) -> list[Any]:
        parts = self._pool.call("get_attribute", self._name)
        return [value for part in parts for value in part]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __getitem__(self, index: int) -> Any:
        return self._values()[index]

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        parts = self._pool.call("call_method", self._name, args, kwargs)
        return [value for part in parts for value in part]

    def __repr__(self) -> str:
        return f"WorkerAttribute({self._name!r} of {self._pool})"
