"""Many sub-envs in worker processes, or in the actors of a Ray cluster.

`ParallelEnv` gives the data of a `SerialEnv` with the same seed, whatever the number of processes, and wherever
they are. It computes no gradients.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch

from envkit.batched.attributes import WorkerAttribute
from envkit.batched.batched_env import BatchedEnv
from envkit.batched.env_host import Maker
from envkit.batched.indexed import Indexable
from envkit.batched.serial import SerialEnv
from envkit.batched.settings import PoolSettings
from envkit.batched.workers import ray_workers, usable_options, worker_processes
from envkit.env.facts import Facts
from envkit.env.torch_threads import ThreadLimit
from envkit.errors import ArgumentError, CopyError, OptionError
from envkit.process_wide import warn
from envkit.specs.annotations import Destination
from envkit.transport import Pool
from envkit.transport.cores import count_cores
from envkit.transport.launch import choose_start_method


class ParallelEnv(Indexable):
    """Step ``num_workers`` sub-envs in worker processes.

    The create functions travel by value: lambdas, classes of a notebook cell and scripts without a
    main guard work.

    Args:
        num_workers: number of sub-envs (not of processes).
        create_env_fn: callable that makes one, or a list of one per sub-env.
        create_env_kwargs: keywords for ``create_env_fn``: a dict, or a list of one dict per sub-env.
        share_individual_td: True gives each sub-env its own TensorDict and results are lazy
            stacks; False gives dense results; None gives those where the sub-envs agree in keys,
            shapes and dtypes.
        shared_memory: rows lie in memory that all processes map; the default is True.
        memmap: rows lie in a memory-mapped file; needs ``shared_memory=False``. With both False,
            `ParallelEnv` sends TensorDicts. One process shares nothing: `SerialEnv` uses ordinary
            memory, whatever these say.
        policy_proof: policy that writes root entries which no sub-env declares, e.g. hidden states. It is called once,
            on zeros; these entries travel with the data then, and are zero where an episode begins.
        num_threads: torch threads of this process while the workers run, for policies too; None leaves them alone, and
            small policies act with one.
        serial_for_single: give a `SerialEnv` where `ParallelEnv` is asked for one sub-env.
        non_blocking: copies to the device of delivery do not wait for it; the default is True.
        num_processes: processes that share the sub-envs evenly; None takes one per core, at most
            one per sub-env. Shows in no result.
        backend: "process", the default, or "ray": the workers are actors of a Ray cluster, which may be other machines.
            ``num_processes`` is then the number of actors; None takes one for each CPU of the cluster.
        backend_options: see `envkit.batched.settings.RayOptions`; processes have none.
        pin_memory: False, and nothing else, as in TorchRL; `PinMemoryTransform` pins the data of any env.
        allow_step_when_done: False, and nothing else, as in TorchRL.
        mp_start_method: "forkserver" (the default where it exists) or "spawn". "fork" is refused
            once JAX has started.
        shutdown_timeout: seconds that worker processes may take to close their sub-envs when the env is closed; those
            that take longer are terminated. The default is 10.
        consolidate, daemon, metadata_from_workers: taken as in TorchRL, without effect: data travels as
            ``use_buffers`` says, workers always end with this process, and metadata is read in the workers. By
            default, ``consolidate`` is True.
        device: where data is delivered; None takes the device of the sub-envs.
        num_sub_threads: torch threads of each worker process; the default is 1.
        timeout: seconds a step, reset or any other call may take; the default is 60, and None sets no limit.
        start_timeout: seconds that building sub-envs may take, at the start or when they are built again;
            the default is 60, and None sets no limit. Both may be assigned while the env runs.
        on_worker_failure: "raise", the default, or "restart": an env that raises loses its row, a process that
            dies or hangs those it held. Lost rows end their episode with ``truncated``, at their
            last root values and no reward, and go on with new envs.
        max_restarts: with "restart", how many there may be before the error is raised after all; the default is 10.
        use_buffers: exchange rows in memory; None does where it can. It cannot where a spec has no
            fixed size or is no tensor, or sub-envs differ in layout; asking for it there warns. Where
            a `SerialEnv` is given None, sub-envs that do not step on NumPy rows hand on TensorDicts all
            the same, which keep the autograd graph; the attribute says True there too.
        allow_done_after_reset: accept done flags right after a reset; those of sub-envs that do so
            are accepted anyway.
        spec_locked, auto_reset, policy, seed: see `EnvBase`.

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

    if not TYPE_CHECKING:  # mypy would look for the keywords here, not in __init__ of the base

        def __new__(cls, *args: Any, serial_for_single: bool = False, **kwargs: Any) -> Any:
            """Build a `SerialEnv` where one sub-env may be served in this process."""
            num_workers = args[0] if args else kwargs.get("num_workers")
            if serial_for_single and num_workers == 1:
                choose_start_method(kwargs.pop("mp_start_method", None))
                return SerialEnv(*args, **kwargs)
            return super().__new__(cls)

    def _find_facts(self) -> Facts:
        return replace(super()._find_facts(), works_elsewhere=True)

    def _take(self, settings: PoolSettings) -> None:
        """Check and store settings that fit together.

        Raises:
            ArgumentError, OptionError: what they say of processes, and of the memory that they share, does not.
        """
        choose_start_method(settings.mp_start_method)
        if settings.backend == "ray" and (settings.mp_start_method is not None or settings.memmap):
            raise OptionError(
                "mp_start_method and memmap are about processes of this machine, but backend='ray' has "
                "actors. Leave them out."
            )
        if settings.use_buffers and not (settings.shared_memory or settings.memmap):
            raise ArgumentError(
                "use_buffers=True needs rows that all processes map, but shared_memory and memmap "
                "are both False. Set one of them, or leave use_buffers out to send TensorDicts."
            )
        super()._take(settings)
        self.backend, self.mp_start_method = settings.backend, settings.mp_start_method
        self.backend_options = usable_options(settings.backend, settings.backend_options)

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
            num_processes=self.num_processes or min(self.num_workers, count_cores()),
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
            warn(
                f"this {type(self).__name__} was seeded before it moved to {self._device}; it is "
                f"seeded again with {self._seed}, and its episodes begin again at the next reset.",
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
