"""What was sent to the sub-envs of an asynchronous pool and not received yet.

This module decides who is busy, which results are taken and in which order, and what data they give.

Conventions
    queue   jobs that `JobQueues.recv` takes as they are done; one queue for each kind.
    slot    job that was sent with an int ``env_index``: only a receive with that int gives it.
    part    root of one env, batch size ``sub_batch``, without ``env_index``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from tensordict import NonTensorData, TensorDict, TensorDictBase

from envkit import rules
from envkit.batched.env_index import ENV_INDEX, env_indices, envs_of
from envkit.batched.exchange.one_by_one import BufferJobs, JobKind, TensorDictJobs
from envkit.batched.pool_owner import PoolOwner
from envkit.batched.stacking import stack_rows
from envkit.data.arguments import as_int, require_tensordict
from envkit.data.paths import as_key
from envkit.data.transition import leaves
from envkit.errors import ArgumentError, BatchSizeError, BusyEnvError, NotResetError, WorkerError
from envkit.transport.jobs import Job, JobPool

__all__ = ["JobQueues"]

Made = tuple[TensorDictBase, TensorDictBase | None]  # data, and the root that follows a step


@dataclass(eq=False)
class _Sent:
    """A job of one env, and the root it was sent with."""

    env: int
    kind: JobKind
    td: TensorDictBase
    job: Job
    is_slot: bool
    made: Made | None = None  # what came of it, while others are still to be taken


class JobQueues:
    """The jobs under way of a pool, one an env."""

    def __init__(self, owner: PoolOwner):
        self._owner = owner
        self._sent: dict[int, _Sent] = {}

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
        self._owner._started()
        exchange, parts = self._exchange, self.parts(td, env_index)
        if busy := sorted(self._sent.keys() & parts.keys()):
            raise BusyEnvError(
                f"envs {busy} of {sorted(parts)} are busy: what was sent to them was not received yet. "
                "Receive it first."
            )
        if kind != "reset":
            _require_begun([env for env in parts if not exchange.has_root(env)])
        for env, part in parts.items():
            exchange.fill_one(env, kind, part)
        for env, part in parts.items():
            job = exchange.begin_one(env, kind, part)
            self._sent[env] = _Sent(env, kind, part, job, isinstance(env_index, int))

    def parts(
        self, td: TensorDictBase | None, env_index: int | Sequence[int] | None
    ) -> dict[int, TensorDictBase]:
        """Give the row of each env that data holds, copied: who sent it may write into it again.

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
            return {env: TensorDict(batch_size=size) for env in envs}
        td = td.exclude(ENV_INDEX).clone()
        rows = [td] if td.batch_size == size else list(td.unbind(0)) if td.batch_dims else []
        if len(rows) != len(envs) or any(row.batch_size != size for row in rows):
            raise BatchSizeError(
                f"the TensorDict has batch size {tuple(td.batch_size)}, but {len(envs)} envs of batch size "
                f"{tuple(size)} are meant, {envs}: pass one row for each."
            )
        return dict(zip(envs, rows, strict=True))

    def recv(
        self,
        kind: JobKind,
        min_get: int,
        env_index: int | None,
        max_get: int | None,
        timeout: float | None,
    ) -> Made:
        """Wait for jobs of a kind and give what they have made; see `AsyncEnvPool.async_step_recv`."""
        if env_index is not None:
            return self._recv_slot(kind, env_index, timeout)
        least = as_int("min_get", min_get, least=1, meaning="the results to wait for")
        if max_get is not None and as_int("max_get", max_get, least=1, meaning="the most") < least:
            raise ArgumentError(f"max_get is {max_get}, but must be at least min_get, {least}.")
        queue = [sent for sent in self._sent.values() if sent.kind == kind and not sent.is_slot]
        if len(queue) < least:
            raise BusyEnvError(
                f"{least} results of {kind!r} are asked for, but {len(queue)} such jobs are under way. "
                f"Send more, or pass min_get={max(len(queue), 1)}."
            )
        made = self._take(self._ready(queue, least, timeout)[:max_get])
        envs = sorted(made)
        data = self._joined(envs, [made[env][0] for env in envs])
        if kind != "step_and_maybe_reset":
            return data, None
        return data, self._joined(envs, [cast(TensorDictBase, made[env][1]) for env in envs])

    def _recv_slot(self, kind: JobKind, env: int, timeout: float | None) -> Made:
        sent = self._sent.get(env)
        if sent is None or sent.kind != kind or not sent.is_slot:
            raise BusyEnvError(
                f"no {kind!r} was sent with env_index={env!r}. Send it so, or receive without env_index."
            )
        made = self._take(self._ready([sent], 1, timeout))[env]
        for part in made:
            if part is not None:
                part.set(ENV_INDEX, NonTensorData(env, batch_size=part.batch_size))
        return made

    def _ready(self, queue: list[_Sent], least: int, timeout: float | None) -> list[_Sent]:
        pool = cast(JobPool, self._owner._started())
        done = set(pool.wait([sent.job for sent in queue], least, timeout))
        ready = [sent for sent in queue if sent.job in done]
        if len(ready) < least:
            raise TimeoutError(
                f"{len(ready)} of {least} results came within {timeout} s. They and the others can still be "
                "received."
            )
        return ready

    def _take(self, ready: list[_Sent]) -> dict[int, Made]:
        """Take what jobs have made, by env. One that failed is told first; what others made is kept then."""
        for sent in sorted(ready, key=lambda sent: not sent.job.request.failures):
            if sent.made is not None:
                continue
            try:
                outcome = self._exchange.take_one(sent.env, sent.kind, sent.td, sent.job)
            except WorkerError:
                del self._sent[sent.env]
                raise
            sent.made = self._made(sent, *outcome)
        return {sent.env: cast(Made, self._sent.pop(sent.env).made) for sent in ready}

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

    def _joined(self, envs: Sequence[int], parts: Sequence[TensorDictBase]) -> TensorDictBase:
        joined = stack_rows(parts, individual=bool(self._owner.share_individual_td))
        return joined.set(ENV_INDEX, env_indices(envs, self._owner.batch_size[1:]))


def _require_begun(envs: list[int]) -> None:
    if envs:
        raise NotResetError(
            f"envs {envs} were stepped before their first reset, so they are in no episode. Send them "
            "a reset first, and step from what it gives."
        )
