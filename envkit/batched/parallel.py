"""Many sub-envs in worker processes, or in the actors of a Ray cluster.

`ParallelEnv` gives the data of a `SerialEnv` with the same seed, whatever the number of processes, and wherever
they are. It computes no gradients.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch

from envkit.batched.attributes import WorkerAttribute
from envkit.batched.batched_env import BatchedEnv
from envkit.batched.env_host import Maker
from envkit.batched.indexed import Indexable
from envkit.batched.serial import SerialEnv
from envkit.batched.settings import Backend, PoolOptions, ThreadLimit
from envkit.batched.workers import ray_workers, usable_options, worker_processes
from envkit.data.keywords import completed
from envkit.env.base import EnvBase
from envkit.env.facts import Facts
from envkit.errors import ArgumentError, CopyError, OptionError
from envkit.specs.annotations import Destination
from envkit.transport import Pool
from envkit.transport.launch import choose_start_method, usable_cores


class ParallelEnv(Indexable):
    """Step ``num_workers`` sub-envs in worker processes.

    The create functions travel by value: lambdas, classes of a notebook cell and scripts without a
    main guard work.

    Args:
        num_workers: number of sub-envs (not of processes).
        create_env_fn: callable that makes one, or a list of one per sub-env.
        mp_start_method: "forkserver" (the default where it exists) or "spawn". "fork" is refused
            once JAX has started.
        **options: those of every batched env, see `envkit.batched.settings.PoolOptions`.

    Raises:
        ArgumentError: ``use_buffers=True`` without memory that processes share, or an unknown
            ``mp_start_method``.
        OptionError: (a TypeError) Ray is asked for, and something that only processes have.
        MissingLibraryError: (an ImportError) Ray is asked for and not installed.

    Example:
        >>> from envkit import GymEnv, ParallelEnv
        >>> env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
        >>> env.rollout(5, break_when_any_done=False)["observation"].shape
        torch.Size([2, 5, 4])
        >>> env.close()
    """

    _fast_path_bypasses = BatchedEnv._fast_path_bypasses
    _attribute_type = WorkerAttribute

    if not TYPE_CHECKING:  # which would look for the keywords here

        def __new__(cls, *args: Any, serial_for_single: bool = False, **kwargs: Any) -> Any:
            num_workers = args[0] if args else kwargs.get("num_workers")
            if serial_for_single and num_workers == 1:
                choose_start_method(kwargs.pop("mp_start_method", None))
                return SerialEnv(*args, **kwargs)
            return super().__new__(cls, *args, serial_for_single=serial_for_single, **kwargs)

    def _find_facts(self) -> Facts:
        return replace(super()._find_facts(), works_elsewhere=True)

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Callable[..., EnvBase] | EnvBase | Sequence[Callable[..., EnvBase]],
        *,
        mp_start_method: str | None = None,
        **options: Unpack[PoolOptions],
    ):
        super().__init__(num_workers, create_env_fn, **options)
        given = completed(PoolOptions, options)
        self.backend: Backend = given.backend
        self.backend_options = usable_options(given.backend, given.backend_options)
        self._require_fitting({**vars(given), "mp_start_method": mp_start_method})
        self.mp_start_method = mp_start_method

    def _configure(self, changed: dict[str, Any]) -> None:
        self._require_fitting(
            {**vars(self._options), "mp_start_method": self.mp_start_method, **changed}
        )
        super()._configure(changed)
        self.mp_start_method = changed.get("mp_start_method", self.mp_start_method)

    def _require_fitting(self, options: dict[str, Any]) -> None:
        """Check what the options say of processes and of the memory that they share."""
        choose_start_method(options["mp_start_method"])
        if self.backend == "ray" and (options["mp_start_method"] is not None or options["memmap"]):
            raise OptionError(
                "mp_start_method and memmap are about processes of this machine, but backend='ray' has "
                "actors. Leave them out."
            )
        if options["use_buffers"] and not (options["shared_memory"] or options["memmap"]):
            raise ArgumentError(
                "use_buffers=True needs rows that all processes map, but shared_memory and memmap "
                "are both False. Set one of them, or leave use_buffers out to send TensorDicts."
            )

    @property
    def _can_share(self) -> bool:
        return self.shared_memory or self.memmap

    def _make_pool(self, makers: list[Maker], described: frozenset[int]) -> Pool:
        if self.backend == "ray":
            actors, options = self.num_processes, self.backend_options
            return ray_workers(self, makers, described, num_actors=actors, options=options)
        return worker_processes(
            self,
            makers,
            described,
            num_processes=self.num_processes or min(self.num_workers, len(usable_cores())),
            start_method=self.mp_start_method,
            map_files_in=tempfile.gettempdir() if self.memmap else None,
            core_each=self.num_sub_threads == 1,
        )

    def _described(self) -> list[str]:
        told = super()._described()
        return told if self.backend == "process" else [*told, f"backend={self.backend!r}"]

    def _limit_threads(self) -> ThreadLimit | None:
        return None if self.num_threads is None else ThreadLimit(self.num_threads)

    reset = torch.no_grad()(BatchedEnv.reset)
    step = torch.no_grad()(BatchedEnv.step)
    step_and_maybe_reset = torch.no_grad()(BatchedEnv.step_and_maybe_reset)

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Deliver data to another device from now on; returns self.

        An env that runs and was seeded is seeded again, with a warning: its random actions are drawn
        where its data is. Without a device it is on torch's default one, so that naming this moves nothing.
        """
        before = self._device or torch.get_default_device()
        super().to(*args, **kwargs)
        moved = (self._device or torch.get_default_device()) != before
        if self._pool is not None and self._seed is not None and moved:
            warnings.warn(
                f"this {type(self).__name__} was seeded before it moved to {self._device}; it is "
                f"seeded again with {self._seed}, and its episodes begin again at the next reset.",
                stacklevel=2,
            )
            self.set_seed(self._seed, self._seed_is_static)
        return self

    def __getstate__(self) -> Any:
        """Return what a copy starts from: everything but workers, so none may run.

        Raises:
            CopyError: (a TypeError) workers run.
        """
        if self._pool is not None:
            raise CopyError(
                f"{type(self).__name__} cannot be copied or pickled while its workers run: they belong "
                "to it alone. Copy it before its first use or after close(), or build another one."
            )
        return super().__getstate__()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._started().call("process_id")
