"""Jobs that were sent to the sub-envs of an asynchronous pool and not received yet.

This module decides who is busy, which results are taken and in which order, what data they give, and how often.
The entry ``env_index`` says which env each row of data belongs to. It is a non-tensor entry, written into every result
and read where data is sent back; it may also be set by hand: an int for one row, or one for each.

Conventions
    queue   jobs that `JobQueues.recv` takes as they are done; one queue for each kind.
    slot    job that was sent with an int ``env_index``: only a receive with that int gives it.
    part    root of one env, batch size ``sub_batch``, without ``env_index``.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.batched.exchange.async_rows import BufferJobs, JobKind, Leaves, TensorDictJobs
from envkit.batched.lazy_stacks import stack_rows
from envkit.batched.pool_owner import PoolOwner
from envkit.data.arguments import require_tensordict
from envkit.data.paths import Axes, Path, as_key, node_axes, tensordict_of
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
from envkit.transport import Job

ENV_INDEX = "env_index"


def env_indices(
    envs: Iterable[int], sub_batch: torch.Size, device: torch.device | None = None
) -> Any:
    """Return the entry for rows of some envs, each of batch size ``sub_batch``.

    ``device`` is that of the data it goes into, which would move it there, part by part.
    """
    return NonTensorStack(*(_entry(env, sub_batch, device) for env in envs))  # type: ignore[abstract]


def _entry(env: int, sub_batch: torch.Size, device: torch.device | None) -> NonTensorData:
    """Return an entry that all data shares: to make one takes 9 us. One that a caller has changed in place is left to him."""
    key = env, sub_batch, device
    made = _ENTRIES.get(key)
    if made is None or made.device != device or (sub_batch and made.batch_size != sub_batch):
        made = _ENTRIES[key] = NonTensorData(env, batch_size=sub_batch, device=device).lock_()
        _ENVS[id(made)] = env
        weakref.finalize(made, _ENVS.pop, id(made)).atexit = False
        while len(_ENTRIES) > _MOST_ENTRIES:
            _ENTRIES.pop(next(iter(_ENTRIES)), None)
    return made


_ENTRIES: dict[tuple[int, torch.Size, torch.device | None], NonTensorData] = {}
_MOST_ENTRIES = 4096

_ENVS: dict[int, int] = {}
"""The env of each entry made here that lives, by its identity: reading one from tensordict takes 15 us."""


def envs_of(
    td: TensorDictBase | None, env_index: int | Sequence[int] | None, num_envs: int
) -> list[int]:
    """Name the envs that data is sent to: those of ``env_index``, by default what the entry says.

    Raises:
        MissingKeyError: (a KeyError) neither says any.
        ArgumentError: (a ValueError) they are not ints of different envs.
    """
    if env_index is None and td is not None and ENV_INDEX in td.keys():
        env_index = _known_envs(td.get(ENV_INDEX)) or cast(Any, td[ENV_INDEX])
    if env_index is None:
        raise MissingKeyError(
            "the TensorDict has no entry 'env_index', which numbers its envs. Pass data that this pool returned, "
            "set td['env_index'], or pass env_index=."
        )
    envs = _flat(env_index)
    wrong = [env for env in envs if type(env) is not int or not 0 <= env < num_envs]
    if wrong or len(set(envs)) != len(envs):
        raise ArgumentError(
            f"env_index is {env_index!r}, but must name different envs of 0 to {num_envs - 1}, "
            "each by an int. Pass a list of such numbers."
        )
    return envs


def _known_envs(entry: Any) -> list[int] | None:
    """Read an entry all of whose parts `env_indices` has made; None where it is any other."""
    if type(entry) is not NonTensorStack or entry.stack_dim != 0:
        return None
    envs = [_ENVS.get(id(part)) for part in entry.tensordicts]
    return None if None in envs else cast(list[int], envs)


def _flat(env_index: Any) -> list[Any]:
    """Return the envs that an int, a list of ints, or one of lists (of envs with a batch) names."""
    if isinstance(env_index, NonTensorStack | NonTensorData):
        env_index = env_index.tolist()
    if isinstance(env_index, torch.Tensor):
        env_index = env_index.tolist()
    if not isinstance(env_index, list | tuple | range):
        return [env_index]
    return [_first(one) for one in env_index]


def _first(one: Any) -> Any:
    while isinstance(one, list) and one:
        one = one[0]
    return one


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

    def told(self, *, reset: bool) -> dict[str, float | int]:
        """Return the counts under TorchRL's names, and begin again where ``reset`` is set."""
        now = time.monotonic()
        busy_s = self._busy_s + (0.0 if self._busy_since is None else now - self._busy_since)
        elapsed_s = 0.0 if self._began is None else now - self._began
        told = {
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
        return told


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


Made = tuple[TensorDictBase, TensorDictBase | None]  # data, and the root that follows a step


@dataclass(eq=False)
class _Rows:
    """What was sent at once, owned: one row for each env.

    Attributes:
        envs: of the rows.
        size, device: of a row.
        parts: the rows; empty where they are in ``leaves``.
        leaves: tensors by path, the rows in front, where data holds nothing else.
        axes: of nested entries, see `node_axes`.
    """

    envs: list[int]
    size: torch.Size
    device: torch.device | None
    parts: list[TensorDictBase]
    leaves: Leaves | None = None
    axes: dict[Path, Axes] = field(default_factory=dict)

    def part(self, index: int) -> TensorDictBase:
        """Return a row as a TensorDict."""
        if self.parts:
            return self.parts[index]
        assert self.leaves is not None
        row = {path: value[index] for path, value in self.leaves.items()}
        return tensordict_of(row, self.size, self.device, self.axes)

    @property
    def is_masked(self) -> bool:
        """Whether there are masks among the tensors."""
        return any(path[-1] in (rules.STEP, rules.RESET) for path in self.leaves or ())


@dataclass(eq=False)
class _Sent:
    """A job of one env, and the root it was sent with, which is row ``index`` of ``rows``."""

    env: int
    kind: JobKind
    rows: _Rows
    index: int
    job: Job
    is_slot: bool
    made: Made | None = None  # what came of it, while others are still to be taken

    @property
    def td(self) -> TensorDictBase:
        """The root it was sent with."""
        return self.rows.part(self.index)


class JobQueues:
    """The jobs under way of a pool, one an env."""

    def __init__(self, owner: PoolOwner):
        self._owner = owner
        self._sent: dict[int, _Sent] = {}
        self.stats = ExchangeStats()

    @property
    def busy(self) -> list[int]:
        """The envs to which something was sent that was not received."""
        return list(self._sent)

    @property
    def _exchange(self) -> BufferJobs | TensorDictJobs:
        return cast(Any, self._owner)._the_exchange

    def send(
        self, kind: JobKind, td: TensorDictBase | None, env_index: int | Sequence[int] | None
    ) -> None:
        """Check what is sent to some envs, and begin their jobs; see `AsyncEnvPool.async_step_send`."""
        pool = self._owner._started()
        exchange, rows = self._exchange, self.rows(td, env_index)
        if busy := sorted(self._sent.keys() & set(rows.envs)):
            raise BusyEnvError(
                f"envs {busy} of {sorted(rows.envs)} are busy: what was sent to them was not received yet. "
                "Receive it first."
            )
        if kind != "reset":
            _require_begun([env for env in rows.envs if not exchange.has_root(env)])
        if cast(Any, self._owner)._unshown is not None:
            self._settle_seeds(rows.envs, kind)
        together = rows.leaves is not None and exchange.fill_together(rows.envs, kind, rows.leaves)
        if not together:
            for index, env in enumerate(rows.envs):
                exchange.fill_one(env, kind, rows.part(index))
        self.stats.send(rows.envs)
        is_whole = together and not rows.is_masked
        is_slot, requests = isinstance(env_index, int), pool.requests
        try:
            for index, env in enumerate(rows.envs):
                if is_whole:
                    job = cast(BufferJobs, exchange).begin_whole(env, kind)
                else:
                    job = exchange.begin_one(env, kind, rows.part(index))
                self._sent[env] = _Sent(env, kind, rows, index, job, is_slot)
        except BaseException:  # Ctrl-C: what a worker was given must be received
            for index, env in enumerate(rows.envs):
                begun = None if env in self._sent else pool.begun_since(env, requests)
                if begun is not None:
                    self._sent[env] = _Sent(env, kind, rows, index, begun, is_slot)
            raise

    def rows(self, td: TensorDictBase | None, env_index: int | Sequence[int] | None) -> _Rows:
        """Return the row of each env that data holds, copied: who sent it may write into it again.

        Raises:
            ArgumentTypeError: it is no TensorDict.
            BatchSizeError: it has not one row for each env that is named.
            ArgumentError, MissingKeyError: see `envs_of`.
        """
        if td is not None:
            require_tensordict("what was sent", td)
        envs = envs_of(td, env_index, self._owner.num_workers)
        size = self._owner.batch_size[1:]
        if td is None:
            return _Rows(envs, size, None, [], {})
        if td.batch_size == (len(envs), *size) and (owned := _owned_leaves(td)) is not None:
            has_nodes = any(len(path) > 1 for path in owned)
            return _Rows(envs, size, td.device, [], owned, node_axes(td) if has_nodes else {})
        td = td.exclude(ENV_INDEX).clone()
        rows = [td] if td.batch_size == size else list(td.unbind(0)) if td.batch_dims else []
        if len(rows) != len(envs) or any(row.batch_size != size for row in rows):
            raise BatchSizeError(
                f"the TensorDict has batch size {tuple(td.batch_size)}, but {len(envs)} envs of batch size "
                f"{tuple(size)} are meant, {envs}: pass one row for each."
            )
        return _Rows(envs, size, td.device, rows)

    def recv(
        self,
        kind: JobKind,
        min_get: int | None,
        env_index: int | None,
        max_get: int | None,
        timeout: float | None,
    ) -> Made:
        """Wait for jobs of a kind and give what they have made; see `AsyncEnvPool.async_step_recv`.

        They are forgotten in the end, with no call after that: Ctrl-C loses nothing.
        """
        _require_wait(timeout)
        if cast(Any, self._owner)._was_closed:
            raise ClosedEnvError(
                f"{type(self._owner).__name__} was closed, and what was sent and not received was dropped. Call reset() "
                "first: it starts new sub-envs."
            )
        if env_index is not None:
            return self._recv_slot(kind, env_index, timeout)
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
        ready = sorted(self._ready(queue, least, timeout)[:max_get], key=lambda sent: sent.env)
        given = self._made_together(kind, ready) or self._made_one_by_one(kind, ready)
        envs = [sent.env for sent in ready]
        self.stats.receive(envs, max_get, asks_for_action=kind != "reset")
        self._sent = self._without(ready)
        return given

    def _made_one_by_one(self, kind: JobKind, ready: list[_Sent]) -> Made:
        made = self._take(ready)
        envs = sorted(made)
        data = self._joined(envs, [made[env][0] for env in envs])
        if kind != "step_and_maybe_reset":
            return data, None
        return data, self._joined(envs, [cast(TensorDictBase, made[env][1]) for env in envs])

    def _without(self, ready: list[_Sent]) -> dict[int, _Sent]:
        taken = {sent.env for sent in ready}
        return {env: sent for env, sent in self._sent.items() if env not in taken}

    def _settle_seeds(self, envs: Sequence[int], kind: JobKind) -> None:
        """Refuse steps of envs that a seed has reset since their last reset, and note resets of them."""
        unshown = cast(Any, self._owner)._unshown
        if kind != "reset" and bool(unshown[list(envs)].any()):
            cast(Any, self._owner)._require_shown()
        unshown[list(envs)] = False
        if not unshown.any():
            cast(Any, self._owner)._unshown = None

    def _recv_slot(self, kind: JobKind, env: int, timeout: float | None) -> Made:
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
        made = self._take(self._ready([sent], 1, timeout))[env]
        for part in made:
            if part is not None:
                index = NonTensorData(env, batch_size=part.batch_size, device=part.device)
                part.set(ENV_INDEX, index)
        self.stats.receive([env], 1, asks_for_action=kind != "reset")
        self._sent = self._without([sent])
        return made

    def _ready(self, queue: list[_Sent], least: int, timeout: float | None) -> list[_Sent]:
        pool = self._owner._started()
        done = set(pool.wait([sent.job for sent in queue], least, timeout))
        ready = [sent for sent in queue if sent.job in done]
        if len(ready) < least:
            raise ResultTimeoutError(
                f"{len(ready)} of {least} results came within {timeout} s. They and the others can still be "
                "received."
            )
        return ready

    def _take(self, ready: list[_Sent]) -> dict[int, Made]:
        """Take what jobs have made, by env. One that failed is reported first; what others made is kept then."""
        for sent in sorted(ready, key=lambda sent: not sent.job.request.failures):
            if sent.made is not None:
                continue
            try:
                outcome = self._exchange.take_one(sent.env, sent.kind, sent.td, sent.job)
            except WorkerError:
                del self._sent[sent.env]
                raise
            sent.made = self._made(sent, *outcome)
        return {sent.env: cast(Made, sent.made) for sent in ready}

    def _made(
        self, sent: _Sent, following: TensorDictBase | None, root: TensorDictBase | None
    ) -> Made:
        data = sent.td.exclude(rules.STEP, "next")
        if (device := self._owner.device) is not None:
            data = data.to(device)
        if following is None:
            masks = [as_key(path) for path, _ in leaves(data) if path[-1] == rules.RESET]
            return data.exclude(*masks).update(cast(TensorDictBase, root)), None
        data.set("next", following)
        return data, None if root is None else self._owner.step_mdp(data).update(root)

    def _made_together(self, kind: JobKind, ready: list[_Sent]) -> Made | None:
        """Do what `_take` and `_joined` do for rows in memory, gathering each entry of all rows at once.

        None where rows are taken one by one: where they are a lazy stack, differ, were masked, or one failed or
        was lost. See `test_rows_taken_together_are_those_taken_one_by_one`.
        """
        exchange, owner = self._exchange, self._owner
        if owner.share_individual_td or not isinstance(exchange, BufferJobs):
            return None
        if any(sent.made is not None or sent.job.request.failures for sent in ready):
            return None
        sources = [sent.rows for sent in ready]
        given = _stacked(sources, [sent.index for sent in ready])
        if given is None or (rules.STEP,) in given:
            return None
        envs = [sent.env for sent in ready]
        if (taken := exchange.take_together(envs, kind)) is None:
            return None
        device = sources[0].device if owner.device is None else owner.device
        if owner.device is not None:
            given = {path: value.to(device) for path, value in given.items()}
        size = torch.Size((len(envs), *owner.batch_size[1:]))
        index = env_indices(envs, size[1:], device)
        following, roots = taken
        if kind == "reset":
            kept = {path: value for path, value in given.items() if path[-1] != rules.RESET}
            data = tensordict_of({**kept, **roots}, size, device, exchange.node_axes)
            return data.set(ENV_INDEX, index), None
        made = {("next", *path): value for path, value in following.items()}
        data = tensordict_of({**given, **made}, size, device, exchange.node_axes)
        root = None
        if kind == "step_and_maybe_reset":
            root = self._following(data, given, roots, exchange.node_axes)
            root.set(ENV_INDEX, env_indices(envs, size[1:], device))
        return data.set(ENV_INDEX, index), root

    def _following(
        self, data: TensorDictBase, given: Leaves, roots: Leaves, axes: dict[Path, Axes]
    ) -> TensorDictBase:
        """Return what `step_mdp` does of ``data``, with the roots that were made; rows in memory hold all but what was given."""
        owner = self._owner
        table = owner._table
        if not owner._steps_by_itself or not table.rewards.isdisjoint(table.states):
            made = tensordict_of(roots, data.batch_size, data.device, axes)
            return owner.step_mdp(data).update(made)
        kept = {
            path: value
            for path, value in given.items()
            if path not in table.actions
            and path not in table.rewards
            and path[-1] not in (rules.STEP, rules.RESET)
        }
        return tensordict_of({**kept, **roots}, data.batch_size, data.device, axes)

    def _joined(self, envs: Sequence[int], parts: Sequence[TensorDictBase]) -> TensorDictBase:
        joined = stack_rows(parts, individual=bool(self._owner.share_individual_td))
        index = env_indices(envs, self._owner.batch_size[1:], joined.device)
        return joined.set(ENV_INDEX, index)


_NOT_SENT = (ENV_INDEX, "next")
"""Entries that no env takes: what says which env it is, and what came of the step before."""


def _owned_leaves(td: TensorDictBase) -> Leaves | None:
    """Copy the tensors of a root by path; None where it holds something else."""
    if not isinstance(td, TensorDict):
        return None
    owned: Leaves = {}
    for path, value in leaves(td):
        if path[0] in _NOT_SENT:
            continue
        if type(value) is not torch.Tensor:
            return None
        owned[path] = value.clone()
    return owned


def _stacked(sources: Sequence[_Rows], indices: Sequence[int]) -> Leaves | None:
    """Stack rows of what was sent; None where they have not the same entries of the same form."""
    kinds = list({id(source): source for source in sources}.values())
    given = [kind.leaves for kind in kinds if kind.leaves is not None]
    if len(given) < len(kinds) or any(_form(kind) != _form(kinds[0]) for kind in kinds[1:]):
        return None
    if len(kinds) == 1 and list(indices) == list(range(len(kinds[0].envs))):
        return given[0]
    if len(sources) == 1:
        (row,) = indices
        return {path: value[row : row + 1].clone() for path, value in given[0].items()}
    chosen = [(cast(Leaves, s.leaves), i) for s, i in zip(sources, indices, strict=True)]
    return {path: torch.stack([known[path][i] for known, i in chosen]) for path in given[0]}


def _form(source: _Rows) -> Any:
    entries = cast(Leaves, source.leaves).items()
    forms = {path: (value.shape[1:], value.dtype) for path, value in entries}
    return source.device, forms


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
