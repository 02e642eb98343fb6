"""When sub-envs are built, what is known of them then, and how they end.

`PoolOwner` holds what a batched env was given, starts the pool at the first use, reads metadata once
for each task, and derives the specs, the device and the layout of results from it. It does not
know steps, masks or attributes.

Conventions
    row      number of a sub-env, 0 .. num_workers - 1.
    task     kind of sub-env, see `arguments`; its first row is described by the host it lives in.
    given    what the user asked for. It stays, and counts again when sub-envs are built anew.
"""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from envkit.batched.arguments import as_kwargs, as_makers, tasks_of
from envkit.batched.creation_context import chosen
from envkit.batched.creator import EnvCreator, with_kwargs
from envkit.batched.exchange.rows import BufferExchange
from envkit.batched.exchange.tensordicts import TensorDictExchange
from envkit.batched.host import Maker
from envkit.batched.metadata import EnvMetaData
from envkit.batched.policy_proof import PolicyEntries, policy_entries
from envkit.batched.recovery import Recovery, allowed_restarts, require_truncated
from envkit.batched.settings import refuse_unknown, require_choice, require_seconds
from envkit.batched.stacking import has_own_rows
from envkit.batched.threads import ThreadLimit
from envkit.data.arguments import as_int
from envkit.data.inference import lasting
from envkit.env.base import EnvBase
from envkit.errors import (
    ArgumentError,
    ClosedEnvError,
    MemoryKindError,
    ReadOnlyError,
    SpecError,
    StartedError,
)
from envkit.specs import Composite
from envkit.transport import Pool

__all__ = ["PoolOwner"]


class PoolOwner(EnvBase):
    """An env whose sub-envs live in a pool that starts when it is first needed.

    Args:
        num_workers: number of sub-envs.
        create_env_fn: callable that makes one, or a list of one callable per sub-env. An env
            instance is copied for each.
        create_env_kwargs: keywords for it: a dict, or a list of one dict per sub-env.
        share_individual_td: True gives each sub-env a TensorDict of its own and results are lazy
            stacks; False gives dense results; None gives those where the sub-envs agree in keys,
            shapes and dtypes.
        shared_memory: rows lie in memory that all processes map.
        memmap: rows lie in a memory-mapped file; needs ``shared_memory=False``. With both False,
            `ParallelEnv` sends TensorDicts. One process shares nothing: `SerialEnv` uses ordinary
            memory, whatever these say.
        policy_proof: policy whose extra entries travel with the data, see `policy_proof`.
        device: where data is delivered; None takes the device of the sub-envs.
        num_threads: torch threads of this process while the workers run; None leaves them alone.
        num_sub_threads: torch threads of each worker.
        serial_for_single: give a `SerialEnv` where `ParallelEnv` is asked for one sub-env.
        non_blocking: copies to the device of delivery do not wait for it.
        num_processes: processes that share the sub-envs evenly; None takes one per core, at most
            one per sub-env. Shows in no result.
        timeout: seconds a step, reset or any other call may take; None sets no limit.
        start_timeout: seconds that building sub-envs may take, at the start or when they are built anew;
            None sets no limit. Both may be assigned while the env runs.
        on_worker_failure: "raise", or "restart": an env that raises loses its row, a process that
            dies or hangs those it held. Lost rows end their episode with ``truncated``, at their
            last root values and no reward, and go on with new envs; see `recovery`.
        max_restarts: with "restart", how many there may be before the error is raised after all.
        use_buffers: exchange rows in memory; None does where it can. It cannot where a spec has no
            fixed size or is no tensor, or sub-envs differ in layout; asking for it there warns. Where
            a `SerialEnv` is not told, sub-envs that do not step on NumPy rows hand on TensorDicts all
            the same, which keep the autograd graph; the attribute says True there too.
        allow_done_after_reset: accept done flags right after a reset; those of sub-envs that do so
            are accepted anyway.

    `SerialEnv` takes the keywords about threads, processes and time too, without effect.

    Raises:
        OptionError: (a TypeError) a keyword is unknown.
        ArgumentTypeError: (a TypeError, a ValueError) an argument is of another type.
        ArgumentError: (a ValueError) a number is out of range.
        ArgumentCountError: a list has another length than ``num_workers``.
        MemoryKindError: ``shared_memory`` and ``memmap`` are both True.
    """

    leaves_torch = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse keywords that ``__init__`` does not take."""
        refuse_unknown(cls, kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        num_workers: int,
        create_env_fn: Callable[..., EnvBase] | EnvBase | Sequence[Callable[..., EnvBase]],
        *,
        create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        share_individual_td: bool | None = None,
        shared_memory: bool = True,
        memmap: bool = False,
        policy_proof: Any = None,
        device: Any = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        serial_for_single: bool = False,
        non_blocking: bool = True,
        num_processes: int | None = None,
        timeout: float | None = 60.0,
        start_timeout: float | None = 60.0,
        on_worker_failure: str = "raise",
        max_restarts: int = 10,
        use_buffers: bool | None = None,
        allow_done_after_reset: bool = False,
    ):
        super().__init__(device=device, allow_done_after_reset=allow_done_after_reset)
        num_workers = as_int("num_workers", num_workers, least=1, meaning="the number of sub-envs")
        if num_processes is not None:
            meaning = "the number of processes, or leave it out to take one for each core"
            num_processes = as_int("num_processes", num_processes, least=1, meaning=meaning)
            if num_processes > num_workers:
                raise ArgumentError(
                    f"num_processes is {num_processes}, but must be between 1 and num_workers "
                    f"({num_workers}). Pass {meaning}."
                )
        if num_threads is not None:
            meaning = "the torch threads of this process, or leave it out to change nothing"
            num_threads = as_int("num_threads", num_threads, least=1, meaning=meaning)
        meaning = "the torch threads of each worker"
        num_sub_threads = as_int("num_sub_threads", num_sub_threads, least=1, meaning=meaning)
        require_choice("use_buffers", use_buffers)
        require_choice("share_individual_td", share_individual_td)
        if shared_memory and memmap:
            raise MemoryKindError(
                "shared_memory and memmap are both True, but rows lie in one of them. "
                "Pass shared_memory=False with memmap=True."
            )
        self.num_workers = num_workers
        self.shared_memory, self.memmap = shared_memory, memmap
        self.num_threads, self.num_sub_threads = num_threads, num_sub_threads
        self.num_processes = num_processes
        self.timeout, self.start_timeout = timeout, start_timeout
        self.on_worker_failure, self.max_restarts = on_worker_failure, max_restarts
        self._allowed_restarts = allowed_restarts(on_worker_failure, max_restarts)
        self.serial_for_single = serial_for_single
        self.non_blocking = non_blocking
        self._makers = as_makers(num_workers, create_env_fn)
        self._kwargs = as_kwargs(num_workers, create_env_kwargs, "create_env_kwargs")
        self._given_device = self._device
        self._given_allow_done = allow_done_after_reset
        self._given_use_buffers = self._use_buffers = use_buffers
        self._given_share_individual_td = self._share_individual_td = share_individual_td
        self._choices = chosen()
        self._policy_proof = (policy_proof,)  # in a tuple: a module would become a part of the env
        self._metadata: list[EnvMetaData] = []
        self._entries: PolicyEntries | None = None
        self._pool: Pool | None = None
        self._exchange: BufferExchange | TensorDictExchange | None = None
        self._started_by_hand = False
        self._was_closed = False
        self._seed: int | None = None
        self._seed_is_static = False

    def _after_init(self, spec_locked: bool) -> None:
        self._lock_when_started = self._spec_locked = spec_locked

    # ---------------------------------------------------------------------------- what hosts decide

    @abstractmethod
    def _make_pool(self, makers: list[Maker], described: frozenset[int]) -> Pool:
        """Build the pool that hosts the sub-envs; it is not started yet.

        ``described`` are the rows whose metadata is wanted.
        """

    @property
    def _can_share(self) -> bool:
        """Say whether there is memory that all who hold sub-envs can map."""
        return True

    def _prefers_rows(self, pool: Pool) -> bool:
        """Say whether rows shall carry the data where they can and the user did not say."""
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
                "sub-envs anew."
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
        makers: list[Maker] = [
            (maker, dict(own)) for maker, own in zip(self._makers, self._kwargs, strict=True)
        ]
        tasks = tasks_of(self._makers, self._kwargs)
        first_rows = [tasks.index(task) for task in range(max(tasks) + 1)]
        trusted = {
            row: maker.meta_data
            for row, maker in enumerate(self._makers)
            if row in first_rows and isinstance(maker, EnvCreator)
        }
        pool = self._make_pool(makers, frozenset(first_rows) - trusted.keys())
        known = {name: vars(self).get(name) for name in ("_input_spec", "_output_spec")}
        try:
            described = dict(trusted)
            for found in pool.start():
                described.update(cast("dict[int, EnvMetaData]", found))
            self._recovery = Recovery(pool, self._allowed_restarts)
            self._adopt([described[row] for row in first_rows], tasks)
            self._choose_exchange(pool, [described[first_rows[task]] for task in tasks])
        except BaseException:
            vars(self).update(known)  # a spec that is read next starts them again
            pool.close()
            raise
        self._pool, self._was_closed = pool, False
        self._finalizer = weakref.finalize(self, _end, pool, self._limit_threads())
        if self._seed is not None:
            self._set_seeds(self._seed, static=self._seed_is_static)

    def _choose_exchange(self, pool: Pool, metadata: list[EnvMetaData]) -> None:
        model = metadata[0]
        fits = not any(found.is_dynamic for found in metadata) and (
            all(found is model or found.layout() == model.layout() for found in metadata)
        )
        given = self._given_use_buffers
        if given and not fits:
            warnings.warn(
                "use_buffers=True, but a spec has no fixed size or is no tensor, or the sub-envs "
                "differ in keys, shapes or dtypes; TensorDicts are exchanged instead.",
                stacklevel=10,  # the caller of what started: public calls are wrapped
            )
        self._use_buffers = fits and (self._can_share if given is None else given)
        if self._use_buffers and (given or self._prefers_rows(pool)):
            more = {} if self._entries is None else self._entries.specs
            self._exchange = BufferExchange(
                pool,
                metadata,
                self._device,
                more_inputs=more,
                recovery=self._recovery,
            )
        else:
            self._exchange = TensorDictExchange(
                pool,
                metadata,
                self._device,
                individual=bool(self._share_individual_td),
                recovery=self._recovery,
            )
        self._exchange.deliver_to(self._device, non_blocking=self.non_blocking)

    # ------------------------------------------------------------------- what the metadata tells

    def _adopt(self, metadata: list[EnvMetaData], tasks: Sequence[int]) -> None:
        """Take over specs, device and batch size from the metadata of each task."""
        for found in metadata:
            found.refuse_empty_nodes()
            if self.on_worker_failure == "restart":
                require_truncated(found)
        _require_common_level(metadata)
        self._device = self._delivery_device(metadata)
        self._share_individual_td = has_own_rows(metadata, self._given_share_individual_td)
        self._auto_done_twins = metadata[0].auto_done_twins
        self.allow_done_after_reset = self._given_allow_done or any(
            found.allow_done_after_reset for found in metadata
        )
        masks = [pair for found in metadata for pair in found.action_masks]
        self._action_masks = tuple(dict.fromkeys(masks))
        self._batch_size = torch.Size((self.num_workers, *_batch_size(metadata)))
        self._set_specs(metadata, tasks)
        if self.policy_proof is not None:
            entries = policy_entries(self, self.policy_proof)
            self._entries = PolicyEntries(entries, self.num_workers) if entries else None
            self._set_specs([found.with_entries(entries) for found in metadata], tasks)

    def _delivery_device(self, metadata: Sequence[EnvMetaData]) -> torch.device | None:
        devices = {found.device for found in metadata}
        if self._given_device is None and len(devices) > 1:
            raise SpecError(
                f"the sub-envs deliver to different devices {sorted(map(str, devices))}. "
                "Say where the batch shall go: device=..."
            )
        return self._given_device if self._given_device is not None else devices.pop()

    def _set_specs(self, metadata: Sequence[EnvMetaData], tasks: Sequence[int]) -> None:
        first = metadata[0]
        if all(found.specs == first.specs for found in metadata[1:]):
            specs = first.specs.expand(self.num_workers, *first.batch_size)
        else:
            specs = cast(Composite, torch.stack([metadata[task].specs for task in tasks], 0))
        if self._device is not None:
            specs = specs.to(self._device)
        self._metadata = [metadata[task] for task in tasks]
        self._input_spec, self._output_spec = specs["input_spec"], specs["output_spec"]
        self.set_spec_lock_(self._lock_when_started)

    @property
    def timeout(self) -> float | None:
        """Seconds a step or reset may take; None sets no limit."""
        return self._timeout_s

    @timeout.setter
    def timeout(self, timeout_s: float | None) -> None:
        require_seconds("timeout", timeout_s)
        self._timeout_s = timeout_s
        if self.__dict__.get("_pool") is not None:
            self._pool.timeout_s = timeout_s  # type: ignore[union-attr]

    @property
    def start_timeout(self) -> float | None:
        """Seconds that building sub-envs may take; None sets no limit."""
        return self._start_timeout_s

    @start_timeout.setter
    def start_timeout(self, timeout_s: float | None) -> None:
        require_seconds("start_timeout", timeout_s)
        self._start_timeout_s = timeout_s
        if self.__dict__.get("_pool") is not None:
            self._pool.start_timeout_s = timeout_s  # type: ignore[union-attr]

    @property
    def policy_proof(self) -> Any:
        """The policy whose extra entries travel with the data, or None."""
        return self._policy_proof[0]

    @property
    def use_buffers(self) -> bool | None:
        """Whether fixed rows in memory may carry the data; before the start, what was asked for.

        True also of a `SerialEnv` that was not told and hands on TensorDicts for the sake of graphs.
        """
        return self._use_buffers

    @property
    def share_individual_td(self) -> bool | None:
        """Whether results are lazy stacks of one TensorDict per sub-env.

        Before the start, what was asked for.
        """
        return self._share_individual_td

    @property
    def batch_size(self) -> torch.Size:
        """``(num_workers, *sub_batch)``; reading it starts the sub-envs."""
        self._started_specs()
        return self._batch_size

    @property
    def device(self) -> torch.device | None:
        """Where data is delivered; reading it starts the sub-envs unless it was given."""
        if self._given_device is None and not self._has_specs:
            self._started()
        return self._device

    @property
    def _has_specs(self) -> bool:
        return self.__dict__.get("_output_spec") is not None

    def _started_specs(self) -> None:
        if not self._has_specs:
            self._started()

    @property
    def input_spec(self) -> Composite:
        """State and action specs, stacked over the sub-envs; reading it starts them."""
        self._started_specs()
        return super().input_spec

    @property
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

    def to(self, *args: Any, **kwargs: Any) -> EnvBase:
        """Deliver data to another device from now on; returns self.

        Takes what ``torch.nn.Module.to`` takes; a dtype has no effect.
        """
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
        if device is None:
            return self
        self._given_device = self._device = device
        if self._has_specs:
            locked = self._spec_locked
            self._input_spec, self._output_spec = (
                self.input_spec.to(device),
                self.output_spec.to(device),
            )
            self.set_spec_lock_(locked)
        if self._entries is not None:
            self._entries.to(device)
        if self._exchange is not None:
            self._exchange.deliver_to(device, non_blocking=self.non_blocking)
        if self._action_generator is not None:
            self._seed_actions(self._seed)
        return self

    def close(self, *, raise_if_closed: bool = True) -> None:
        """End the sub-envs and free what they share; the next `reset` starts new ones.

        Raises:
            ClosedEnvError: nothing is running and ``raise_if_closed`` is set.
        """
        if self._pool is None:
            if raise_if_closed:
                raise ClosedEnvError(f"{type(self).__name__} is not running.")
            return
        self._pool = self._exchange = None
        self._started_by_hand, self._was_closed = False, True
        self._finalizer()
        del self._finalizer, self._recovery  # they know the pool

    def __getstate__(self) -> Any:
        """Give what a copy starts from; who ends the sub-envs of a copy is its own business."""
        return {name: value for name, value in vars(self).items() if name != "_finalizer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._pool is not None:
            self._finalizer = weakref.finalize(self, _end, self._pool, self._limit_threads())

    def __repr__(self) -> str:
        told = [f"num_workers={self.num_workers}"]
        if self._pool is None:
            told.append("not started")
        else:
            kinds = dict.fromkeys(found.env_str for found in self._metadata)
            told += [f"batch_size={tuple(self._batch_size)}", f"envs={' | '.join(kinds)}"]
        return f"{type(self).__name__}({', '.join(told)})"


def _require_common_level(metadata: Sequence[EnvMetaData]) -> None:
    """Check that one level of done flags speaks for every sub-env: equal levels, or the root."""
    levels = [{path[:-1] for path in found.paths("done")} for found in metadata]
    if any(own != levels[0] for own in levels) and not all(() in own for own in levels):
        raise SpecError(
            "the sub-envs have done flags in different places and not all at the root: "
            f"{[sorted(own) for own in levels]}. Add a done flag at the root to each of them."
        )


def _batch_size(metadata: Sequence[EnvMetaData]) -> torch.Size:
    sizes = {found.batch_size for found in metadata}
    if len(sizes) > 1:
        raise SpecError(
            f"the sub-envs have different batch sizes {sorted(map(tuple, sizes))}, but must "
            "agree on one."
        )
    return sizes.pop()


def _end(pool: Pool, limit: ThreadLimit | None) -> None:
    pool.close()
    if limit is not None:
        limit.end()
