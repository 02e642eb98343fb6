"""Jobs that were sent to the sub-envs of an asynchronous pool and not received yet.

This module decides who is busy, which results are taken and in which order, what data they give, and how often.
The entry ``env_index`` says which env each row of data belongs to. It is a non-tensor entry, written into every result
and read where data is sent back; it may also be set by hand: an int for one row, or one for each. `EnvIndex` alone
knows these forms: behind it envs are a list of ints.

Conventions
    queue   jobs that `JobQueues.recv` takes as they are done; one queue for each kind.
    slot    job that was sent with an int ``env_index``: only a receive with that int gives it.
    root    data of one env, batch size ``sub_batch``, without ``env_index``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.batched.exchange.jobs import (
    BufferJobs,
    JobKind,
    Roots,
    SentJob,
    TensorDictJobs,
)
from envkit.batched.lazy_stacks import by_row, stack_rows
from envkit.batched.pool_owner import PoolOwner
from envkit.data.arguments import require_tensordict
from envkit.data.paths import as_key, node_axes, tensordict_of
from envkit.data.transition import leaves
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    BusyEnvError,
    ClosedEnvError,
    MissingKeyError,
    NotResetError,
    ResultTimeoutError,
    WorkerError,
)

ENV_INDEX = "env_index"


class EnvIndex:
    """The entry ``env_index`` of the data of a pool: what is written, and which envs are read from it.

    The part of each env is made once, and shared by all data: to make one takes 9 us, and to read one that is not known
    by its identity takes 7 us. One that a caller has changed in place is left to him.
    """

    def __init__(self, num_envs: int):
        self._num_envs = num_envs
        self._parts: dict[tuple[int, torch.Size, torch.device | None], NonTensorData] = {}
        self._envs: dict[int, int] = {}  # of parts that are held above, by their identity

    def entry(
        self, envs: Iterable[int], sub_batch: torch.Size, device: torch.device | None = None
    ) -> Any:
        """Return the entry for rows of some envs, each of batch size ``sub_batch``.

        ``device`` is that of the data it goes into, which would move it there, part by part.
        """
        return NonTensorStack(*(self._part(env, sub_batch, device) for env in envs))  # type: ignore[abstract]

    def _part(self, env: int, sub_batch: torch.Size, device: torch.device | None) -> NonTensorData:
        key = env, sub_batch, device
        part = self._parts.get(key)
        if part is None or part.device != device or (sub_batch and part.batch_size != sub_batch):
            self._envs.pop(id(part), None)
            part = NonTensorData(env, batch_size=sub_batch, device=device).lock_()
            self._parts[key], self._envs[id(part)] = part, env
        return part

    def read(
        self, td: TensorDictBase | None, env_index: int | Sequence[int] | None = None
    ) -> list[int]:
        """Return the envs that data is sent to: those of ``env_index``, by default what the entry says.

        Raises:
            MissingKeyError: (a KeyError) neither says any.
            ArgumentError: (a ValueError) they are not ints of different envs.
        """
        named: Any = env_index
        if named is None:
            named = None if td is None else td.get(ENV_INDEX, None)
            if type(named) is NonTensorStack and named.stack_dim == 0:
                quickly = [self._envs.get(id(part)) for part in named.tensordicts]
                named = named if None in quickly else quickly
        if named is None:
            raise MissingKeyError(
                "the TensorDict has no entry 'env_index', which numbers its envs. Pass data that this pool returned, "
                "set td['env_index'], or pass env_index=."
            )
        if isinstance(named, NonTensorData):  # one object, of as many parts as it may be
            named = named.data
        if isinstance(named, NonTensorStack | torch.Tensor):
            named = named.tolist()
        is_list = isinstance(named, list | tuple | range)
        envs: list[Any] = list(named) if is_list else [named]
        while any(isinstance(env, list) and env for env in envs):  # of envs that have a batch
            envs = [env[0] if isinstance(env, list) else env for env in envs]
        wrong = [env for env in envs if type(env) is not int or not 0 <= env < self._num_envs]
        if wrong or len(set(envs)) != len(envs):
            raise ArgumentError(
                f"env_index is {named!r}, but must name different envs of 0 to {self._num_envs - 1}, "
                "each by an int. Pass a list of such numbers."
            )
        return envs


class ExchangeStats:
    """Counts since the pool was made, or since they were last reset."""

    def __init__(self) -> None:
        self._received: dict[int, float] = {}  # time of envs that wait for their next action
        self._clear()

    def _clear(self) -> None:
        now = time.monotonic()
        self._batches = self._items = self._capacity = self._partial = self._answered = 0
        self._answer_s = self._busy_s = 0.0
        self._received = dict.fromkeys(self._received, now)
        self._busy_since = self._began = now if self._received else None

    def receive(self, envs: Sequence[int], max_get: int | None, *, asks_for_action: bool) -> None:
        """Count a batch of results; envs that ask for their next action wait for it from now on."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        self._batches += 1
        self._items += len(envs)
        self._capacity += len(envs) if max_get is None else max_get
        self._partial += max_get is not None and len(envs) < max_get
        if asks_for_action and envs:
            if not self._received:
                self._busy_since = now
            self._received.update(dict.fromkeys(envs, now))

    def send(self, envs: Sequence[int]) -> None:
        """Count actions that envs have waited for."""
        now = time.monotonic()
        for env in envs:
            since = self._received.pop(env, None)
            if since is not None:
                self._answer_s += now - since
                self._answered += 1
        if not self._received and self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None

    def report(self, *, reset: bool) -> dict[str, float | int]:
        """Return the counts under TorchRL's names, and begin again where ``reset`` is set."""
        now = time.monotonic()
        busy_s = self._busy_s + (0.0 if self._busy_since is None else now - self._busy_since)
        elapsed_s = 0.0 if self._began is None else now - self._began
        report = {
            "batches": self._batches,
            "items": self._items,
            "avg_batch_size": _ratio(self._items, self._batches),
            "batch_fill_ratio": _ratio(self._items, self._capacity),
            "partial_batch_fraction": _ratio(self._partial, self._batches),
            "avg_batch_to_action_ms": 1e3 * _ratio(self._answer_s, self._answered),
            "consumer_busy_fraction": _ratio(busy_s, elapsed_s),
        }
        if reset:
            self._clear()
        return report


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class JobQueues:
    """The jobs under way of a pool, one an env."""

    def __init__(self, owner: PoolOwner):
        self._owner = owner
        self._sent: dict[int, SentJob] = {}
        self.stats = ExchangeStats()
        self.index = EnvIndex(owner.num_workers)

    @property
    def busy(self) -> list[int]:
        """The envs to which something was sent that was not received."""
        return list(self._sent)

    @property
    def _exchange(self) -> BufferJobs | TensorDictJobs:
        return cast(Any, self._owner)._the_exchange

    # ---------------------------------------------------------------------------------------- send

    def send(
        self, kind: JobKind, td: TensorDictBase | None, env_index: int | Sequence[int] | None
    ) -> None:
        """Check what is sent to some envs, and begin their jobs; see `AsyncEnvPool.async_step_send`."""
        pool = self._owner._started()
        if td is not None:
            require_tensordict("what was sent", td)
        envs = self.index.read(td, env_index)
        groups = self._owned(td, envs)
        exchange = self._exchange
        if busy := sorted(self._sent.keys() & set(envs)):
            raise BusyEnvError(
                f"envs {busy} of {sorted(envs)} are busy: what was sent to them was not received yet. "
                "Receive it first."
            )
        if kind != "reset":
            _require_begun([env for env in envs if not exchange.has_root(env)])
            exchange.recovery.require_reset(envs)
        if cast(Any, self._owner)._unshown is not None:
            self._settle_seeds(envs, kind)
        for roots in groups:
            exchange.fill_jobs(roots, kind)
        self.stats.send(envs)
        is_slot, requests = isinstance(env_index, int), pool.requests
        pairs = [(env, roots) for roots in groups for env in roots.rows]
        try:
            for env, roots in pairs:
                job = exchange.begin_job(roots, env, kind)
                self._sent[env] = SentJob(env, kind, roots, job, is_slot)
        except BaseException:  # Ctrl-C: what a worker was given must be received
            for env, roots in pairs:
                begun = None if env in self._sent else pool.begun_since(env, requests)
                if begun is not None:
                    self._sent[env] = SentJob(env, kind, roots, begun, is_slot)
            raise

    def _owned(self, td: TensorDictBase | None, envs: list[int]) -> list[Roots]:
        """Copy the roots that data holds: who sent it may write into it again. Parts of a lazy stack may be unlike."""
        size = self._owner.batch_size[1:]
        if td is None:
            return [Roots(envs, TensorDict(batch_size=(len(envs), *size)))]
        if td.batch_size == (len(envs), *size) and not isinstance(td, LazyStackedTensorDict):
            return [Roots(envs, _copied(td))]
        rows = rows_of(td, envs, size)
        return [
            Roots([env], _copied(row).unsqueeze(0)) for env, row in zip(envs, rows, strict=True)
        ]

    def _settle_seeds(self, envs: Sequence[int], kind: JobKind) -> None:
        """Refuse steps of envs that a seed has reset since their last reset, and note resets of them."""
        unshown = cast(Any, self._owner)._unshown
        if kind != "reset" and bool(unshown[list(envs)].any()):
            cast(Any, self._owner)._require_shown()
        unshown[list(envs)] = False
        if not unshown.any():
            cast(Any, self._owner)._unshown = None

    # ------------------------------------------------------------------------------------- receive

    def recv(
        self,
        kind: JobKind,
        min_get: int | None,
        env_index: int | None,
        max_get: int | None,
        timeout: float | None,
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Wait for jobs of a kind and give data and the roots that follow steps; see `AsyncEnvPool.async_step_recv`.

        They are forgotten in the end, with no call after that: Ctrl-C loses nothing.
        """
        _require_wait(timeout)
        if cast(Any, self._owner)._was_closed:
            raise ClosedEnvError(
                f"{type(self._owner).__name__} was closed, and what was sent and not received was dropped. Call reset() "
                "first: it starts new sub-envs."
            )
        if env_index is not None:
            queue, least, max_get = self._slot(kind, env_index), 1, 1
        else:
            queue, least = self._queue(kind, min_get, max_get)
        ready = self._ready(queue, least, timeout)[:max_get]
        ready.sort(key=lambda sent: sent.row)
        data, root = self._results(kind, ready)
        if env_index is not None:
            data, root = data[0], None if root is None else root[0]
        envs = [sent.row for sent in ready]
        self.stats.receive(envs, max_get, asks_for_action=kind != "reset")
        self._sent = {env: sent for env, sent in self._sent.items() if env not in envs}
        return data, root

    def _queue(
        self, kind: JobKind, min_get: int | None, max_get: int | None
    ) -> tuple[list[SentJob], int]:
        """Return the queue of a kind, and how many of it to wait for."""
        min_get = cast(Any, self._owner).min_get if min_get is None else min_get
        least = as_int("min_get", min_get, least=1, meaning="the results to wait for")
        if max_get is not None and as_int("max_get", max_get, least=1, meaning="the most") < least:
            raise ArgumentError(
                f"max_get is {max_get}, but must be at least min_get, {least}. Pass a larger one."
            )
        queue = [sent for sent in self._sent.values() if sent.kind == kind and not sent.is_slot]
        if len(queue) < least:
            raise BusyEnvError(
                f"{least} results of {kind!r} are asked for, but {len(queue)} such jobs are under way. "
                f"Send more, or pass min_get={max(len(queue), 1)}."
            )
        return queue, least

    def _slot(self, kind: JobKind, env: int) -> list[SentJob]:
        """Return the job of a slot, alone."""
        if type(env) is not int:
            raise ArgumentTypeError(
                f"env_index is {env!r}, but must be the int of one env, to which something was sent with that "
                "env_index=. Leave it out to receive what is ready."
            )
        sent = self._sent.get(env)
        if sent is None or sent.kind != kind or not sent.is_slot:
            raise BusyEnvError(
                f"no {kind!r} was sent with env_index={env!r}. Send it so, or receive without env_index."
            )
        return [sent]

    def _ready(self, queue: list[SentJob], least: int, timeout: float | None) -> list[SentJob]:
        pool = self._owner._started()
        done = set(pool.wait([sent.job for sent in queue], least, timeout))
        ready = [sent for sent in queue if sent.job in done]
        if len(ready) < least:
            raise ResultTimeoutError(
                f"{len(ready)} of {least} results came within {timeout} s. They and the others can still be "
                "received."
            )
        return ready

    def _results(
        self, kind: JobKind, ready: list[SentJob]
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Build the data of jobs that are done, and the roots that follow; one that failed is reported first."""
        for sent in ready:
            try:
                self._exchange.settle_job(sent)
            except WorkerError:
                del self._sent[sent.row]
                raise
        owner, envs, root = self._owner, [sent.row for sent in ready], None
        data = _joined(ready, individual=bool(owner.share_individual_td))
        masks: set[Any] = {rules.STEP}
        if kind == "reset":
            paths = (path for sent in ready for path, _ in leaves(sent.roots.td))
            masks |= {as_key(path) for path in paths if path[-1] == rules.RESET}
        data = data.exclude(*masks)
        if owner.device is not None:
            data = data.to(owner.device)
        following, roots = self._exchange.take_jobs(ready, kind)
        if following is None:
            data.update(cast(TensorDictBase, roots))
        else:
            data.set("next", following)
            if roots is not None:
                root = owner.step_mdp(data).update(roots)
        return self._delivered(data, envs), None if root is None else self._delivered(root, envs)

    def _delivered(self, td: TensorDictBase, envs: list[int]) -> TensorDictBase:
        """Return rows in the form that the pool gives, with the entry that names their envs."""
        if self._owner.share_individual_td:
            td = by_row(td)
        elif isinstance(
            td, LazyStackedTensorDict
        ):  # what was sent differed; what came of it may agree
            td = stack_rows(td.unbind(0), individual=False)
        entry = self.index.entry(envs, self._owner.batch_size[1:], td.device)
        return td.set(ENV_INDEX, entry)


def rows_of(td: TensorDictBase, envs: Sequence[int], size: torch.Size) -> list[TensorDictBase]:
    """Return the row of each env that data holds; data without an axis of rows is one row.

    Raises:
        BatchSizeError: it has not one row of batch size ``size`` for each env.
    """
    rows = [td] if td.batch_size == size else list(td.unbind(0)) if td.batch_dims else []
    if len(rows) != len(envs) or any(row.batch_size != size for row in rows):
        raise BatchSizeError(
            f"the TensorDict has batch size {tuple(td.batch_size)}, but {len(envs)} envs of batch size "
            f"{tuple(size)} are meant, {envs}: pass one row for each."
        )
    return rows


def _copied(td: TensorDictBase) -> TensorDict:
    """Copy a root, but for what no env takes: which env it is of, and what came of the step before."""
    owned = {path: value for path, value in leaves(td) if path[0] not in (ENV_INDEX, "next")}
    if any(type(value) is not torch.Tensor for value in owned.values()):
        return cast(TensorDict, td.exclude(ENV_INDEX, "next").clone())  # takes five times as long
    axes = node_axes(td) if any(len(path) > 1 for path in owned) else None
    owned = {path: value.clone() for path, value in owned.items()}
    return tensordict_of(owned, td.batch_size, td.device, axes)


def _joined(jobs: Sequence[SentJob], *, individual: bool) -> TensorDictBase:
    """Stack the roots that jobs were sent with, in their order."""
    sources = list({id(sent.roots): sent.roots for sent in jobs}.values())
    first = sources[0].td
    if len(sources) == 1 and sources[0].rows == [sent.row for sent in jobs]:
        return first.copy()
    entries = {id(source): dict(leaves(source.td)) for source in sources}
    form = _form(first)
    if individual or form is None or any(_form(source.td) != form for source in sources[1:]):
        return stack_rows([sent.roots.of(sent.row) for sent in jobs], individual=individual)
    parts = [(entries[id(sent.roots)], sent.roots.rows.index(sent.row)) for sent in jobs]
    stacked = {
        path: torch.stack([values[path][index] for values, index in parts])
        for path in entries[id(sources[0])]
    }
    size = torch.Size((len(jobs), *first.batch_size[1:]))
    return tensordict_of(stacked, size, first.device, node_axes(first))


def _form(td: TensorDict) -> Any:
    """Return what roots must have in common to be stacked entry by entry; None where one is no tensor."""
    entries = dict(leaves(td))
    if any(type(value) is not torch.Tensor for value in entries.values()):
        return None
    forms = {path: (value.shape[1:], value.dtype) for path, value in entries.items()}
    return td.device, forms


def _require_wait(timeout: Any) -> None:
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout >= 0):
        error = ArgumentError if is_number else ArgumentTypeError
        raise error(
            f"timeout is {timeout!r}, but must be a number of seconds, 0 or more, or None for no limit."
        )


def _require_begun(envs: list[int]) -> None:
    if envs:
        raise NotResetError(
            f"envs {envs} were stepped before their first reset, so they are in no episode. Send them "
            "a reset first, and step from what it gives."
        )
