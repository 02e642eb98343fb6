"""The workers of a collector: they get orders, make batches, and are built again where that is wanted.

A pool knows which worker has an order, what was received, and who was lost. It does not know which worker is waited
for, nor what becomes of what they made: that is said by `multi`.

Conventions
    part    batch of one worker: its data, in shared memory that the worker will write to when it gets the next
            order, or its own TensorDict where the data has no fixed form.
    lost    of a worker whose env raised, or whose process ended: it was built again, and the steps of the one before
            it are not reported yet.
    root    of a lost worker: what its next step would have begun with, batch size (*env_batch,).
    asked   workers that may have an order: noted before it is placed, until what they made was received. Where Ctrl-C
            came in between, the pool of processes knows whether it was placed, see `recall`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.batched.recovery import Recovery
from envkit.collectors.runner import POLICY_VERSION, Order
from envkit.collectors.runner_host import BATCH, STOP, WEIGHTS, Description, Packing, Reply
from envkit.collectors.weights import Weights, extra_of, require_same_architecture
from envkit.data.paths import Axes, Path, as_key, node_axes, tensordict_of
from envkit.data.plain import from_plain, plain
from envkit.data.transition import leaves
from envkit.errors import SpecError, WorkerError
from envkit.transport import Field, Job, Layout, Pool, Traffic

_CUT = ("truncated", "done")


def _with_loss(data: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
    """Put a step in front in which the episodes of a lost worker end.

    It begins and ends at ``root``, with no reward, ``truncated`` and ``done``; the action and what a policy writes
    beside it are zero.

    Args:
        data: what the new worker has collected, one step less than a batch has.
        root: of the lost one; it holds ``("collector", "traj_ids")``.
    """
    time = data.batch_dims - 1
    first = cast(TensorDictBase, data[..., :1])
    lost = cast(TensorDictBase, first.apply(torch.zeros_like))
    for path, value in leaves(root):
        if not isinstance(value, torch.Tensor):
            continue
        for place in (path, ("next", *path)):
            if lost.get(as_key(place), None) is not None:
                lost.set(as_key(place), value.unsqueeze(time))
    for path, flags in leaves(lost.get("next")):
        if path[-1] in _CUT:
            lost.set(as_key(("next", *path)), torch.ones_like(flags))
    for key in POLICY_VERSION:
        if (version := lost.get(key, None)) is not None:
            version.copy_(first.get(key))
    return cast(TensorDictBase, torch.cat([lost, data], time))


@dataclass(frozen=True)
class Part:
    """The batch of one worker; see `Reply` for the other entries.

    Attributes:
        data: batch size ``(*env_batch, steps)``, invalid steps included.
        valid: steps that are valid.
    """

    worker: int
    data: TensorDictBase
    valid: int
    following: torch.Tensor


@dataclass(frozen=True)
class _Newest:
    """The newest weights, packed, their version and extra state; one object, so that no reader sees half an update.

    ``packed`` is None where the policy has none.
    """

    version: int
    packed: np.ndarray | None
    extra: Mapping[str, Any] = field(default_factory=dict)


class WorkerPool:
    """The workers in a pool, one in each row.

    Args:
        pool: not started yet.
        count: how many workers it has.
        restarts: replace workers that are lost, so many times.

    Attributes:
        steps: that each worker makes in a batch.
        jobs: orders that were placed, by worker.
        packings: how batches of each worker lie in shared memory; none before that is known.
        counted: what each worker has counted.
    """

    def __init__(self, pool: Pool, count: int, restarts: int):
        advice = (
            "Build a new collector. With on_worker_failure='restart' such a worker is replaced."
        )
        self.recovery = Recovery(pool, restarts, advice=advice)
        self.count, self.steps = count, [0] * count
        self._newest = _Newest(0, None)
        self.jobs: dict[int, Job] = {}
        self._asked: dict[int, int] = {}  # how many requests there were before
        self.packings: list[Packing[Path]] = []
        self._axes: dict[Path, Axes] = {}
        self.counted: list[dict[str, Any]] = [{} for _ in range(count)]
        self._pool = pool
        self._ordered: dict[int, Order] = {}
        self._roots: dict[int, TensorDictBase] = {}
        self._next_numbers = list(range(count))
        self._lost: dict[int, Any] = {}
        self._memory: dict[str, np.ndarray] = {}
        self._loaded = [0] * count
        self._replaced: set[int] = set()

    # -------------------------------------------------------------------------------------- start

    def start(self) -> Description:
        """Start the workers, and tell what all of them are like.

        Raises:
            WorkerError: one could not be built.
            SpecError: (a ValueError) they are unlike.
        """
        described = cast("list[Description]", self._pool.start())
        first = described[0]
        for worker, one in enumerate(described):
            _require_alike(first, one, worker)
        self.batch_size = first.batch_size
        self._weights = first.weights
        if first.weights is not None:
            self._newest = _Newest(0, np.zeros(first.weights.size_bytes, np.uint8))
        self._knows_weights = False  # before an update, only the workers know them
        return first

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._pool.pids

    def end(self) -> None:
        """End the workers, in bounded time."""
        self.jobs, self._memory = {}, {}
        self._pool.close()

    def bind(self, packings: Sequence[Packing[Path]] = ()) -> None:
        """Share memory with the workers; that of batches once their form is known."""
        fields, written = [Field(STOP, (), "uint8")], (BATCH,) if packings else ()
        traffic: dict[int | str, Traffic] = {"collect": Traffic((STOP,), written)}
        if self._weights is not None:
            fields.append(Field(WEIGHTS, (self._weights.size_bytes,), "uint8"))
            traffic["load_and_collect"] = Traffic((STOP,), written)
        if packings:
            size = max(packing.size_bytes for packing in packings)
            fields.append(Field(BATCH, (size,), "uint8"))
        for worker, packing in enumerate(packings):
            self._pool.call("plan", packing, workers=[worker])
        self._memory = self._pool.bind(Layout(tuple(fields), self.count, traffic))
        self.packings = list(packings)

    # -------------------------------------------------------------------------------------- orders

    def order(self, worker: int, *, random: bool) -> None:
        """Order a batch from a free worker."""
        self.recall()
        if worker in self.jobs:
            return
        if worker in self._replaced:
            self._introduce(worker)
        steps = self.steps[worker] - (worker in self._lost)
        newest = self._newest  # once: another thread may update them
        order = Order(steps, random, newest.version)
        loads = self._lay_weights(worker, newest)
        method, extra = ("load_and_collect", [newest.extra]) if loads else ("collect", [])
        self._memory[STOP][worker] = 0
        self._ordered[worker] = order
        self._asked[worker] = self._pool.requests
        self.jobs[worker] = self._pool.begin_call(worker, method, order, *extra)
        self._loaded[worker] = newest.version

    def recall(self) -> None:
        """Find the orders that were placed, and that Ctrl-C has kept from being noted."""
        for worker in self._asked.keys() - self.jobs.keys():
            begun = self._pool.begun_since(worker, self._asked[worker])
            if begun is None:
                del self._asked[worker]
            else:
                self.jobs[worker] = begun

    def _lay_weights(self, worker: int, newest: _Newest) -> bool:
        """Put the newest weights where a worker that is free finds them, unless it has them."""
        if newest.packed is None or self._loaded[worker] == newest.version:
            return False
        # the version was counted, and the workers have what they began with
        if not self._knows_weights:
            return False
        self._pool.lay(worker, WEIGHTS, newest.packed)
        return True

    def wait(self, count: int) -> list[int]:
        """Wait until so many of the workers that have an order are done; give all that are."""
        workers = {id(job): worker for worker, job in self.jobs.items()}
        done = self._pool.wait(list(self.jobs.values()), count, None)
        return [workers[id(job)] for job in done]

    def receive(self, worker: int) -> Part | None:
        """Return what a worker has made; None where it was lost, and has a new order.

        Raises:
            WorkerError: it failed, and is not to be replaced, or too often.
        """
        try:
            reply: Reply = self._pool.outcome(self.jobs[worker])
        except WorkerError as error:
            del self._asked[worker]
            del self.jobs[worker]
            self._replace(error)
            self.order(worker, random=self._ordered[worker].random)
            return None
        self._next_numbers[worker] = reply.next_number
        self.counted[worker] = reply.stats
        data = self._data_of(worker, reply)
        if worker in self._lost:
            data = _with_loss(data, self._lost[worker])
        missing = self._ordered[worker].steps - reply.steps
        if reply.root is not None:
            self._roots[worker] = reply.root
        part = Part(worker, data, self.steps[worker] - missing, reply.following)
        if worker in self._lost:  # between here and the end Ctrl-C cannot come
            del self._lost[worker]
        del self._asked[worker]
        del self.jobs[worker]
        return part

    def _replace(self, error: WorkerError) -> None:
        """Build again what has failed.

        Raises:
            WorkerError: that is not to be, or was too often.
        """
        for failure in error.failures:
            worker = failure.worker
            self._replaced.add(worker)
            if (root := self._roots.pop(worker, None)) is not None:
                self._lost[worker] = root
        self.recovery.repair(error)
        self.recovery.lost.clear()
        self.recovery.unstarted.clear()

    def _introduce(self, worker: int) -> None:
        """Send a worker that was built again what the others know."""
        self.call("number_from", self._next_numbers[worker], workers=[worker])
        if self.packings:
            self.call("plan", self.packings[worker], workers=[worker])
        self._loaded[worker] = -1 if self._knows_weights else self._newest.version
        self._replaced.discard(worker)

    def _introduce_all(self) -> bool:
        """Introduce all workers that were built again; tell whether there were any."""
        fresh = sorted(self._replaced)
        for worker in fresh:
            self._introduce(worker)
        return bool(fresh)

    def _persistently(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call something of workers, and again when what has failed is built again."""
        while True:
            try:
                return call(*args, **kwargs)
            except WorkerError as error:
                self._replace(error)

    def _data_of(self, worker: int, reply: Reply) -> TensorDictBase:
        """Return what a worker has collected, wherever it lies."""
        batch = torch.Size((*self.batch_size, self._ordered[worker].steps))
        if reply.data is None:
            views = self.packings[worker].views(self._memory[BATCH][worker])
            data = tensordict_of(views, batch, None, self._axes)
            data.names = [*[None] * len(self.batch_size), "time"]
            return data
        return reply.data

    def learn_form(self, parts: Sequence[Part]) -> None:
        """Share memory for batches, once the first ones have shown their form; all workers are free."""
        if self.packings:
            return
        tensors = [dict(leaves(part.data)) for part in parts]
        if not all(isinstance(value, torch.Tensor) for value in tensors[0].values()):
            return
        form, self._axes = Packing.of(tensors[0]), node_axes(parts[0].data)
        packings = [_of_length(form, len(self.batch_size), steps) for steps in self.steps]
        if all(packings[part.worker].fits(own) for part, own in zip(parts, tensors, strict=True)):
            self._persistently(self.bind, packings)

    def call(self, method: str, *args: Any, workers: Sequence[int]) -> Any:
        return self._persistently(self._pool.call, method, *args, workers=workers)

    def stop(self, workers: Sequence[int]) -> None:
        """Stop the batches of workers at the step that they are making."""
        for worker in workers:
            self._memory[STOP][worker] = 1

    def begin_anew(self, workers: Sequence[int]) -> list[int]:
        """Reset the envs of workers that are free; give the numbers of the trajectories that end by this."""
        ended = self.call("begin_anew", workers=workers)
        for worker in workers:
            self._roots.pop(worker, None)
            self._lost.pop(worker, None)
        return [number for numbers in ended for number in numbers]

    # ------------------------------------------------------------------------------------- weights

    @property
    def has_weights(self) -> bool:
        """Whether the policy of the workers has weights that can be updated."""
        return self._weights is not None

    def take_weights(self, weights: Weights, extra: Mapping[str, Any]) -> None:
        """Store new weights and extra state for the workers, which get them with their next orders.

        Raises:
            ArgumentError: (a ValueError) they are of another architecture.
        """
        assert self._weights is not None and self._newest.packed is not None
        # Ctrl-C may come in between, or an order of another thread
        fresh = np.empty_like(self._newest.packed)
        views = self._weights.views(fresh)
        require_same_architecture(views, weights)
        with torch.no_grad():
            for name, place in views.items():
                place.copy_(weights[name])
        kept = {**self._newest.extra, **copy.deepcopy(extra)}
        self._knows_weights, self._newest = True, _Newest(self._newest.version + 1, fresh, kept)

    def count_to(self, version: int) -> None:
        """Count versions of the weights that the workers have, up to one."""
        if version > self._newest.version:
            self._newest = replace(self._newest, version=version)

    # -------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, Any]:
        """Return what the next batches depend on, in plain form; all workers are free."""
        states = self.call("state", workers=range(self.count))
        while self._introduce_all():  # whom that has found dead
            states = self.call("state", workers=range(self.count))
        packed = self._newest.packed
        newest = None if packed is None else torch.from_numpy(packed).clone()
        return {
            **{f"worker{row}": state for row, state in enumerate(states)},
            "next_numbers": list(self._next_numbers),
            "newest_weights": newest,
            "newest_extra": plain(dict(self._newest.extra), "the extra state of the policy"),
            "loaded_versions": list(self._loaded),
            "roots": _plain_by_worker(self._roots),
            "lost": _plain_by_worker(self._lost),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, version: int, strict: bool) -> None:
        """Load ``state``; this pool continues as the one that gave it would have."""
        self._introduce_all()
        for row in range(self.count):
            self.call("load_state", state[f"worker{row}"], strict, workers=[row])
        self._next_numbers = list(state["next_numbers"])
        self._roots, self._lost = _by_worker(state["roots"]), _by_worker(state["lost"])
        extra = from_plain(state.get("newest_extra", {}))  # which older files lack
        packed = None
        if self._newest.packed is not None:
            packed = np.empty_like(self._newest.packed)  # the one before may be laid for workers
            packed[:] = state["newest_weights"].numpy()
        self._newest = _Newest(version, packed, extra)
        self._loaded = list(state["loaded_versions"])
        if self._weights is None or packed is None:
            return
        # no update was made: what acts is all there is, if it is the same everywhere
        if not version:
            acting = [state[f"worker{row}"]["policy_state_dict"] for row in range(self.count)]
            for name, place in self._weights.views(packed).items():
                place.copy_(acting[0][name])
                if not all(torch.equal(other[name], acting[0][name]) for other in acting):
                    return
            self._newest = replace(self._newest, extra=extra_of(from_plain(acting[0])))
        self._knows_weights = True


def _of_length(form: Packing[Path], axis: int, steps: int) -> Packing[Path]:
    """Return a form with so many steps along an axis."""
    return Packing(
        {
            name: ((*shape[:axis], steps, *shape[axis + 1 :]), dtype)
            for name, (shape, dtype) in form.plan.items()
        }
    )


def _plain_by_worker(tds: dict[int, TensorDictBase]) -> dict[str, Any]:
    return {str(worker): plain(td) for worker, td in tds.items()}


def _by_worker(state: dict[str, Any]) -> dict[int, TensorDictBase]:
    return {int(worker): from_plain(td) for worker, td in state.items()}


def _require_alike(first: Description, other: Description, worker: int) -> None:
    """Check that workers make batches of one form.

    Raises:
        SpecError: (a ValueError) they do not.
    """
    if other.batch_size != first.batch_size:
        raise SpecError(
            f"the env of worker {worker} has batch size {tuple(other.batch_size)}, that of worker 0 "
            f"{tuple(first.batch_size)}. All workers must make batches of one form."
        )
    for path in first.leaves.keys() | other.leaves.keys():
        own, theirs = first.leaves.get(path), other.leaves.get(path)
        if own != theirs:
            raise SpecError(
                f"the envs of workers are unlike: {path} is {theirs} in worker {worker}, and {own} in worker 0. All "
                "workers must make batches of one form; collect from unlike envs with a collector each."
            )
    if first.weights != other.weights:
        raise SpecError(
            f"the policies of workers 0 and {worker} have other weights. Have policy_factory make policies of one "
            "architecture."
        )
