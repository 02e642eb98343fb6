"""Own the pool of a batched env's sub-envs: start it at the first use, describe it as one env, close it.

`PoolOwner` holds what a batched env was given (`settings`, `makers`), starts the pool, reads metadata once
for each task, and declares what `batch_layout` makes of it. It does not know steps, masks or attributes.

Conventions
    row      number of a sub-env, 0 .. num_workers - 1.
    task     kind of sub-env, see `makers`; its first row is described by the host it lives in.
    given    what the user asked for. It stays, and counts again when sub-envs are built again.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, Unpack, cast

import torch

from envkit.arrays.integers import as_int
from envkit.batched.batch_layout import layout_of, may_use_rows, specs_of_rows
from envkit.batched.caller_settings import chosen
from envkit.batched.creator import known_metadata, with_kwargs
from envkit.batched.env_host import Maker
from envkit.batched.exchange.shared_memory import BufferExchange
from envkit.batched.exchange.tensordicts import TensorDictExchange
from envkit.batched.makers import as_kwargs, as_makers, require_known, tasks_of
from envkit.batched.metadata import EnvMetaData
from envkit.batched.policy_proof import PolicyEntries, policy_entries
from envkit.batched.recovery import Recovery, require_truncated
from envkit.batched.settings import (
    Limit,
    PoolOptions,
    PoolSettings,
    checked_options,
    require_names,
)
from envkit.data.keywords import known_to, refuse_unknown
from envkit.env.base import EnvBase
from envkit.env.declared import OUTPUTS
from envkit.env.facts import Facts
from envkit.env.html import EnvReport
from envkit.env.spec_names import SpecNames
from envkit.env.torch_threads import ThreadLimit
from envkit.errors import ArgumentError, ClosedEnvError, ReadOnlyError, StartedError
from envkit.specs import Composite
from envkit.specs.annotations import Destination, destination, require_memory
from envkit.specs.lasting import lasting
from envkit.transport import Pool


class PoolOwner(EnvBase):
    """An env whose sub-envs live in a pool that starts when it is first needed.

    Args:
        num_workers: number of sub-envs.
        create_env_fn: callable that makes one, or a list of one callable per sub-env. An env
            instance is copied for each.
        **options: see `ParallelEnv`.

    Raises:
        OptionError: (a TypeError) a keyword is unknown.
        ArgumentTypeError: (a TypeError, a ValueError) an argument is of another type.
        ArgumentError: (a ValueError) a number is out of range.
        ArgumentCountError: a list has another length than ``num_workers``.
        MemoryKindError: ``shared_memory`` and ``memmap`` are both True.
    """

    _buffer_exchange = BufferExchange
    _tensordict_exchange = TensorDictExchange
    timeout = Limit("Seconds a step or reset may take; None sets no limit.")
    start_timeout = Limit("Seconds that building sub-envs may take; None sets no limit.")

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Callable[..., EnvBase] | EnvBase | Sequence[Callable[..., EnvBase]],
        **options: Unpack[PoolOptions],
    ):
        require_names(type(self), PoolOptions, options)
        settings = PoolSettings(**checked_options(options))
        super().__init__(
            device=settings.device, allow_done_after_reset=settings.allow_done_after_reset
        )
        require_memory(self._device, type(self).__name__)
        self.num_workers = as_int(
            "num_workers", num_workers, least=1, meaning="the number of sub-envs"
        )
        if settings.num_processes is not None and settings.num_processes > self.num_workers:
            raise ArgumentError(
                f"num_processes is {settings.num_processes}, but must be between 1 and num_workers "
                f"({num_workers}). Pass the number of processes, or leave it out to take one for each core."
            )
        self._take(settings)
        self.num_processes, self.pin_memory = settings.num_processes, settings.pin_memory
        self.allow_step_when_done = settings.allow_step_when_done
        self.consolidate = settings.consolidate
        self.timeout, self.start_timeout = settings.timeout, settings.start_timeout
        self.on_worker_failure = settings.on_worker_failure
        self.max_restarts = settings.max_restarts
        self.serial_for_single = settings.serial_for_single
        self._makers = as_makers(self.num_workers, create_env_fn)
        self._kwargs = as_kwargs(self.num_workers, settings.create_env_kwargs, "create_env_kwargs")
        require_known(self._makers, self._kwargs)
        self._given_device = self._device
        self._share_individual_td = settings.share_individual_td
        self._choices = chosen()
        self._metadata: list[EnvMetaData] = []
        self._entries: PolicyEntries | None = None
        self._pool: Pool | None = None
        self._exchange: BufferExchange | TensorDictExchange | None = None
        self._started_by_hand = self._was_closed = self._seed_is_static = False
        self._seed: int | None = None
        self._records = False

    def _take(self, settings: PoolSettings) -> None:
        """Store the settings that `configure_parallel` may change."""
        self._settings = settings
        self.shared_memory, self.memmap = settings.shared_memory, settings.memmap
        self.num_threads, self.num_sub_threads = settings.num_threads, settings.num_sub_threads
        self.non_blocking, self.daemon = settings.non_blocking, settings.daemon
        self.shutdown_timeout = settings.shutdown_timeout
        self._use_buffers = settings.use_buffers

    def _after_init(self, spec_locked: bool) -> None:
        self._lock_when_started = self._declared.is_locked = spec_locked

    @property
    def create_env_fn(self) -> list[Callable[..., Any]]:
        """The create function of each sub-env; an env that was passed is one that makes copies."""
        return list(self._makers)

    @property
    def create_env_kwargs(self) -> list[dict[str, Any]]:
        """The keywords for the create function of each sub-env, as copies; see `update_kwargs`."""
        return [dict(own) for own in self._kwargs]

    @property
    def _single_task(self) -> bool:
        """Whether one create function makes all sub-envs."""
        return len({id(make) for make in self._makers}) == 1

    # ---------------------------------------------------------------------------- what hosts decide

    @abstractmethod
    def _make_pool(self, makers: list[Maker], described: frozenset[int]) -> Pool:
        """Build the pool that hosts the sub-envs; it is not started yet.

        ``described`` are the rows whose metadata is wanted.
        """

    @property
    def _can_share(self) -> bool:
        """Check whether there is memory that all who hold sub-envs can map."""
        return True

    def _prefers_rows(self, pool: Pool) -> bool:
        """Check whether rows shall carry the data where they can and the user did not say."""
        return True

    @abstractmethod
    def _set_seeds(self, seed: int | None, *, static: bool) -> int:
        """Seed the sub-envs that run."""

    def _limit_threads(self) -> ThreadLimit | None:
        """Limit the threads of this process; None when they are left alone."""
        return None

    # ------------------------------------------------------------------------------------- starting

    @property
    def is_closed(self) -> bool:
        """True before the first use and after `close`."""
        return self._pool is None

    @is_closed.setter
    def is_closed(self, value: bool) -> None:
        """The pool decides; assignments of the base class are not needed."""

    def start(self) -> None:
        """Build the sub-envs now instead of at the first use; a no-op if that has done so.

        Raises:
            StartedError: `start` was called before, and `close` not since.
        """
        if self._pool is not None and self._started_by_hand:
            raise StartedError(
                f"{type(self).__name__} has been started already. Call close() first to build its "
                "sub-envs again."
            )
        self._started()
        self._started_by_hand = True

    def _started(self) -> Pool:
        if self._pool is None:
            self._start()
        assert self._pool is not None
        return self._pool

    @lasting()
    def _start(self) -> None:
        makers = list(zip(self._makers, map(dict, self._kwargs), strict=True))
        tasks = tasks_of(self._makers, self._kwargs)
        first_rows = [tasks.index(task) for task in range(max(tasks) + 1)]
        trusted = known_metadata(self._makers, first_rows)
        pool = self._make_pool(makers, frozenset(first_rows) - trusted.keys())
        sides = self._declared.sides
        try:
            described = dict(trusted)
            for reply in pool.start():
                described.update(cast("dict[int, EnvMetaData]", reply))
            restarts = self.max_restarts if self.on_worker_failure == "restart" else 0
            self._recovery = Recovery(pool, restarts)
            self._adopt([described[row] for row in first_rows], tasks)
            self._choose_exchange(pool, [described[first_rows[task]] for task in tasks])
        except BaseException:
            self._declared.put(sides)  # a spec that is read next starts them again
            pool.close()
            raise
        self._pool, self._was_closed = pool, False
        self._finalizer = weakref.finalize(self, _end, pool, self._limit_threads())
        if self._records:
            self._recovery.record(True)
        if self._seed is not None:
            self._set_seeds(self._seed, static=self._seed_is_static)

    def _choose_exchange(self, pool: Pool, metadata: list[EnvMetaData]) -> None:
        asked, device, recovery = self._settings.use_buffers, self._device, self._recovery
        self._use_buffers = may_use_rows(metadata, asked=asked, has_memory=self._can_share)
        if self._use_buffers and (asked or self._prefers_rows(pool)):
            more = {} if self._entries is None else self._entries.specs
            self._exchange = self._buffer_exchange(
                pool, metadata, device, more_inputs=more, recovery=recovery
            )
        else:
            own = bool(self._share_individual_td)
            self._exchange = self._tensordict_exchange(
                pool, metadata, device, individual=own, recovery=recovery
            )
        self._exchange.deliver_to(device, non_blocking=self.non_blocking)

    # ------------------------------------------------------------------- what the metadata tells

    def _adopt(self, metadata: list[EnvMetaData], tasks: Sequence[int]) -> None:
        """Set specs, device and batch size from the metadata of each task."""
        own_rows, device = self._settings.share_individual_td, self._given_device
        agreed = layout_of(metadata, self.num_workers, device=device, share_individual_td=own_rows)
        if self.on_worker_failure == "restart":
            for one in metadata:
                require_truncated(one)
        self._device, self._batch_size = agreed.device, agreed.batch_size
        self._share_individual_td = agreed.has_own_rows
        self._declared.added_flags = metadata[0].auto_done_twins
        allows_done = self._settings.allow_done_after_reset or agreed.allows_done_after_reset
        self.allow_done_after_reset = allows_done
        self._declare(metadata, tasks)
        if self.policy_proof is not None:
            entries = policy_entries(self, self.policy_proof)
            self._entries = PolicyEntries(entries, self.num_workers) if entries else None
            self._declare([one.with_entries(entries) for one in metadata], tasks)

    def _declare(self, metadata: Sequence[EnvMetaData], tasks: Sequence[int]) -> None:
        specs = self._with_own_entries(specs_of_rows(metadata, tasks, self._device))
        self._metadata = [metadata[task] for task in tasks]
        self._declared.hold(specs["input_spec"], specs["output_spec"])
        self.set_spec_lock_(self._lock_when_started)

    def _find_facts(self) -> Facts:
        self._started_specs()
        merged = Facts.merged(found.facts for found in self._metadata)
        return replace(merged, leaves_torch=True, steps_have_effects=type(self).__name__)

    def _with_own_entries(self, specs: Composite) -> Composite:
        """Add what the batched env itself puts into data to the specs of the sub-envs."""
        return specs

    @property
    def policy_proof(self) -> Callable[..., Any] | None:
        """The policy whose extra entries travel with the data, or None."""
        return self._settings.policy_proof

    @property
    def use_buffers(self) -> bool | None:
        """Whether fixed rows in memory may carry the data, see `ParallelEnv`; before the start, what was asked for."""
        return self._use_buffers

    @property
    def share_individual_td(self) -> bool | None:
        """Whether results are lazy stacks, one TensorDict a sub-env; before the start, what was asked for."""
        return self._share_individual_td

    @SpecNames.batch_size.getter
    def batch_size(self) -> torch.Size:
        """``(num_workers, *sub_batch)``; reading it starts the sub-envs."""
        self._started_specs()
        return self._batch_size

    @SpecNames.device.getter
    def device(self) -> torch.device | None:
        """Where data is delivered; reading it starts the sub-envs unless it was given."""
        if self._given_device is None and not self._has_specs:
            self._started()
        return self._device

    @property
    def _has_specs(self) -> bool:
        return OUTPUTS in self._declared

    def _started_specs(self) -> None:
        if not self._has_specs:
            self._started()

    @SpecNames.input_spec.getter
    def input_spec(self) -> Composite:
        """State and action specs, stacked over the sub-envs; reading it starts them."""
        self._started_specs()
        return super().input_spec

    @SpecNames.output_spec.getter
    def output_spec(self) -> Composite:
        """Reward, observation and done specs, stacked over the sub-envs; reading it starts them."""
        self._started_specs()
        return super().output_spec

    # ---------------------------------------------------------------------------- changes and ends

    def add_truncated_keys(self) -> EnvBase:
        """Refused: the sub-envs decide what they report.

        Raises:
            ReadOnlyError: always.
        """
        raise ReadOnlyError(
            "truncated keys cannot be added to a batched env. Add them to the sub-envs: "
            "lambda: make_env().add_truncated_keys()."
        )

    def update_kwargs(self, kwargs: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Merge keywords into those of every sub-env; they count when sub-envs are built next.

        They win over those that an `EnvCreator` stores: a variant of it takes its place.

        Args:
            kwargs: a dict for all, or a list of one dict per sub-env.
        """
        given = as_kwargs(self.num_workers, kwargs, "kwargs")
        self._makers = with_kwargs(self._makers, given)
        for own, new in zip(self._kwargs, given, strict=True):
            own.update(new)

    def configure_parallel(
        self,
        *,
        use_buffers: bool | None = None,
        shared_memory: bool | None = None,
        memmap: bool | None = None,
        mp_start_method: str | None = None,
        num_threads: int | None = None,
        num_sub_threads: int | None = None,
        non_blocking: bool | None = None,
        daemon: bool | None = None,
        shutdown_timeout: float | None = None,
    ) -> Self:
        """Change how the sub-envs are hosted, before they are built; returns self.

        Each argument replaces the keyword of that name that was given to the constructor; None leaves it. Of
        ``shared_memory`` and ``memmap`` the one that is asked for switches the other off.

        Raises:
            StartedError: (a RuntimeError) the sub-envs are built.
            OptionError: (a TypeError) the constructor takes no such keyword.
            ArgumentError, MemoryKindError: as the constructor does; the settings stay as they were.

        Example:
            >>> from envkit import GymEnv, ParallelEnv
            >>> env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
            >>> env.configure_parallel(num_threads=2).num_threads
            2
        """
        if self._pool is not None:
            raise StartedError(
                f"configure_parallel() was called while the sub-envs of this {type(self).__name__} are running. Call it "
                "before specs are read or reset() is called, or after close()."
            )
        asked = {
            "use_buffers": use_buffers,
            "shared_memory": shared_memory,
            "memmap": memmap,
            "mp_start_method": mp_start_method,
            "num_threads": num_threads,
            "num_sub_threads": num_sub_threads,
            "non_blocking": non_blocking,
            "daemon": daemon,
            "shutdown_timeout": shutdown_timeout,
        }
        changed = {name: value for name, value in asked.items() if value is not None}
        if shared_memory or memmap:  # the one that is asked for takes the other's place
            changed = {"shared_memory": False, "memmap": False, **changed}
        if (known := known_to(type(self))) is not None:
            refuse_unknown(f"configure_parallel() of {type(self).__name__}", changed, known)
        self._take(replace(self._settings, **checked_options(changed)))
        return self

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Deliver data to another device from now on; returns self.

        Takes what ``torch.nn.Module.to`` takes; a dtype has no effect.
        """
        device = destination(*args, **kwargs)
        if device is None:
            return self
        require_memory(device, type(self).__name__)
        self._given_device = self._device = device
        if self._has_specs:
            self._declared.hold(self.input_spec.to(device), self.output_spec.to(device))
            self.set_spec_lock_(self._declared.is_locked)
        if self._entries is not None:
            self._entries.to(device)
        if self._exchange is not None:
            self._exchange.deliver_to(device, non_blocking=self.non_blocking)
        if self._action_generator is not None:
            self._seed_actions(self._seed)
        return self

    def close(self, *, raise_if_closed: bool = False) -> None:
        """End the sub-envs and free what they share; the next `reset` starts new ones.

        Raises:
            ClosedEnvError: it was closed before and ``raise_if_closed`` is set. Before the first start nothing is
                to be closed.
        """
        if self._pool is None:
            if raise_if_closed and self._was_closed:
                raise ClosedEnvError(
                    f"{type(self).__name__} is not running. reset() starts it, or leave raise_if_closed=True out."
                )
            return
        self._pool = self._exchange = None
        self._started_by_hand, self._was_closed = False, True
        self._finalizer()
        del self._finalizer, self._recovery  # they know the pool

    def __getstate__(self) -> Any:
        """Return what a copy starts from; who ends the sub-envs of a copy is its own business."""
        return {name: value for name, value in vars(self).items() if name != "_finalizer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._pool is not None:
            self._finalizer = weakref.finalize(self, _end, self._pool, self._limit_threads())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._described())})"

    def _report(self) -> EnvReport:
        """Return what a notebook shows; what is not started is not started for that."""
        if self._pool is None:
            return EnvReport({"workers": f"{self.num_workers}, not started"}, {}, {})
        facts, specs, inside = super()._report()
        kinds = " | ".join(dict.fromkeys(found.env_str for found in self._metadata))
        return EnvReport({"env": kinds, **facts, "workers": str(self.num_workers)}, specs, inside)

    def _described(self) -> list[str]:
        """Return what it is, item by item."""
        if self._pool is None:
            return [f"num_workers={self.num_workers}", "not started"]
        kinds = " | ".join(dict.fromkeys(found.env_str for found in self._metadata))
        batch = tuple(self._batch_size)
        return [f"num_workers={self.num_workers}", f"batch_size={batch}", f"envs={kinds}"]


def _end(pool: Pool, limit: ThreadLimit | None) -> None:
    pool.close()
    if limit is not None:
        limit.end()
