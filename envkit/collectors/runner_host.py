"""Where the runner of a worker lives: it makes a batch on request, and leaves it in shared memory.

Conventions
    row      number of a worker; a host has one.
    memory   arrays that parent and worker both see: "weights" (new ones lie there before a batch is ordered),
             "stop" (set by the parent to end a batch early), "batch" (what was collected).
    plan     of a stretch of memory: name, shape and dtype of each tensor in it, in order.
    reply    what the worker says of a batch. Data of other shapes than were planned goes along with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.batched.attributes import ask_single_envs, single_envs
from envkit.batched.caller_settings import holding
from envkit.collectors.attribute_paths import executed, followed
from envkit.collectors.build_runner import Parts, build_runner, recorded_leaves
from envkit.collectors.profiling import ProfileConfig
from envkit.collectors.runner import EnvRunner, Order, lengthened
from envkit.collectors.weights import Weights, tensors_of
from envkit.data.paths import Path
from envkit.data.transition import leaves, without_device
from envkit.env.own_state import loading
from envkit.env.torch_threads import ThreadLimit

_ALIGNMENT_BYTES = 64

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Packing(Generic[Name]):
    """Where each tensor lies.

    Attributes:
        plan: shape and dtype by name.
    """

    plan: Mapping[Name, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, tensors: Mapping[Name, torch.Tensor]) -> Packing[Name]:
        """Plan for tensors like these."""
        return cls({name: (tuple(value.shape), value.dtype) for name, value in tensors.items()})

    @cached_property
    def _placement(self) -> tuple[dict[Name, int], int]:
        offsets, end = {}, 0
        for name, (shape, dtype) in self.plan.items():
            offsets[name] = end
            size = torch.Size(shape).numel() * dtype.itemsize
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return offsets, max(end, _ALIGNMENT_BYTES)

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them, each aligned to 64."""
        return self._placement[1]

    def views(self, memory: np.ndarray) -> dict[Name, torch.Tensor]:
        """View memory of shape ``(*lead, size_bytes or more)`` as the tensors, of shape ``(*lead, *shape)``."""
        lead, whole = memory.shape[:-1], torch.from_numpy(memory)
        tensors: dict[Name, torch.Tensor] = {}
        for name, (shape, dtype) in self.plan.items():
            start = self._placement[0][name]
            size = torch.Size(shape).numel() * dtype.itemsize
            flat = whole[..., start : start + size].view(dtype)
            strides = (*flat.stride()[:-1], *torch.empty(shape, device="meta").stride())
            tensors[name] = flat.as_strided((*lead, *shape), strides, flat.storage_offset())
        return tensors

    def fits(self, tensors: Mapping[Name, torch.Tensor]) -> bool:
        """Check whether tensors are those of the plan."""
        return self.plan.keys() == tensors.keys() and all(
            (tuple(value.shape), value.dtype) == self.plan[name] for name, value in tensors.items()
        )


WEIGHTS, STOP, BATCH = "weights", "stop", "batch"
COMMAND_NAMES: dict[int | str, str] = {
    "collect": "collecting",
    "load_and_collect": "collecting",
    "begin_anew": "reset",
}
BUILDING = ("rebuild",)

Leaves = Mapping[Path, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Description:
    """Description that a worker sends at the start.

    Attributes:
        batch_size: of its env.
        leaves: shape and dtype of the entries of a step, by path.
        weights: those of its policy; None where it has none.
    """

    batch_size: torch.Size
    leaves: Leaves
    weights: Packing[str] | None


@dataclass(frozen=True)
class Reply:
    """The collected data.

    Attributes:
        following: see `Batch`.
        next_number: see `TrajectoryNumbers`.
        steps: that are valid; those behind them are zero, their ``traj_ids`` -1.
        data: the batch, pickled, where it is not in memory; None where it is.
        root: that the next batch begins with, if that was asked for.
        stats: what the runner has counted since it was built.
    """

    following: torch.Tensor
    next_number: int
    steps: int
    data: TensorDictBase | None
    root: TensorDictBase | None
    stats: dict[str, Any]


@dataclass
class RunnerFactory:
    """Make the host of a worker; travels to its process by value.

    Attributes:
        parts: what each worker builds.
        seeds: of torch's generator in each worker, from which policies draw.
        num_threads: torch threads of a worker.
        choices: see `caller_settings`.
        begin: called before anything is built; None: nothing.
        stops: look at "stop" after each step.
        with_root: tell the root that the next batch begins with.
    """

    parts: list[Parts]
    seeds: list[int]
    num_threads: int
    choices: Mapping[str, Any]
    begin: Callable[[], Any] | None = None
    stops: bool = False
    with_root: bool = False

    def __call__(self, rows: range) -> _RunnerHost:
        if self.begin is not None:
            self.begin()
        ThreadLimit(self.num_threads)  # as long as the worker lives
        torch.set_grad_enabled(False)
        (row,) = rows
        torch.manual_seed(self.seeds[row])
        return _RunnerHost(self, row)


class _RunnerHost:
    """The runner of a worker; see `envkit.transport.Host`."""

    def __init__(self, factory: RunnerFactory, row: int):
        self._factory, self._parts, self._row = factory, factory.parts[row], row
        self._runner = self._built()
        self._weights: Weights | None = None
        self._stop: np.ndarray | None = None
        self._memory: np.ndarray | None = None
        self._packing: Packing[Path] | None = None

    def _built(self) -> EnvRunner:
        with holding(self._factory.choices):
            stride = len(self._factory.parts)
            runner = build_runner(self._parts, first_number=self._row, stride=stride)
        runner.refuses_moved = True
        return runner

    def describe(self) -> Description:
        """Return what the env gives and which weights the policy has."""
        env = self._runner.env
        shapes = {
            path: (tuple(value.shape), value.dtype)
            for path, value in recorded_leaves(env, self._parts.options).items()
        }
        tensors = tensors_of(self._runner.policy)
        return Description(env.batch_size, shapes, Packing.of(tensors) if tensors else None)

    def bind(self, arrays: dict[str, np.ndarray], rows: range) -> None:
        """Store the memory of this worker."""
        row = rows.start
        if (memory := arrays.get(WEIGHTS)) is not None:
            self._weights = Packing.of(tensors_of(self._runner.policy)).views(memory[row])
        self._stop = arrays[STOP][row : row + 1]
        self._memory = arrays[BATCH][row] if BATCH in arrays else None

    def run(self, command: int, rows: list[int]) -> None:
        """Refused: a worker of a collector is called."""
        raise NotImplementedError("workers of collectors take no commands.")

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Carry out one of the methods below by name."""
        return getattr(self, f"call_{method}")(*args, **kwargs)

    def call_plan(self, packing: Packing[Path]) -> None:
        """Learn how batches lie in memory from the next `bind` on."""
        self._packing = packing

    def call_collect(self, order: Order) -> Reply:
        """Make a batch."""
        runner = self._runner
        if self._factory.stops:
            order = replace(order, interrupted=self._is_stopped)
        batch = runner.begin(order)()
        steps = batch.data.batch_size[-1]
        with runner.seconds.transferring():
            data = _on_host(batch.data)
            data = data if steps == order.steps else lengthened(data, order.steps)
            is_in_memory = self._laid_down(data)
        return Reply(
            batch.following,
            runner.numbers.following,
            steps,
            None if is_in_memory else data,
            _on_host(runner.shown_root()) if self._factory.with_root else None,
            runner.counted(),
        )

    def call_load_and_collect(self, order: Order, extra: Mapping[str, Any]) -> Reply:
        """Load new weights and the ``extra`` state of the policy that goes with them, then make a batch."""
        assert self._weights is not None
        with self._runner.seconds.transferring():
            self._runner.load_weights({**self._weights, **extra})
        return self.call_collect(order)

    def _is_stopped(self) -> bool:
        assert self._stop is not None
        return bool(self._stop[0])

    def _laid_down(self, data: TensorDictBase) -> bool:
        """Put a batch into memory, if it has a place there."""
        if self._packing is None or self._memory is None:
            return False
        tensors = dict(leaves(data))
        if not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            return False
        if not self._packing.fits(tensors):
            return False
        for path, place in self._packing.views(self._memory).items():
            place.copy_(tensors[path])
        return True

    def call_profile(self, config: ProfileConfig | None) -> None:
        """Profile the next batches of this worker; None ends that."""
        self._runner.profile(config, self._row)

    def call_count_envs(self) -> int:
        """Return how many single envs this worker has."""
        return single_envs(self._runner.env)

    def call_ask_envs(self, ask: Callable[[Any], Any], rows: list[int]) -> list[Any]:
        """Call ``ask`` with single envs of this worker, by their numbers here."""
        return ask_single_envs(self._runner.env, ask, rows)

    def call_follow(self, path: str) -> Any:
        """Return what a path leads to; see `envkit.collectors.attribute_paths`."""
        return followed(self._seen, path)

    def call_execute(self, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call what a path leads to."""
        return executed(self._seen, path, args, kwargs, must=True)

    @property
    def _seen(self) -> SimpleNamespace:
        runner = self._runner
        return SimpleNamespace(
            env=runner.env,
            policy=runner.policy,
            worker_idx=self._row,
            frames=runner.frames,
            episodes=runner.episodes,
            stats=runner.counted,
        )

    def call_begin_anew(self) -> list[int]:
        """Reset the env; give the numbers of the trajectories that end by this."""
        return self._runner.begin_anew()

    def call_seed(self, seed: int | None, static: bool) -> int | None:
        """Seed the env, and torch in this process; give the seed that follows."""
        following = self._runner.env.set_seed(seed, static_seed=static)
        if seed is not None:
            torch.manual_seed(seed)
        return following

    def call_set_seed(self, seeds: dict[int, int]) -> None:
        """Seed what was built again; see `Recovery`."""
        for seed in seeds.values():
            self.call_seed(seed, False)
            self._runner.root = None

    def call_rebuild(self, rows: list[int]) -> None:
        """Build env and policy again, after the env has failed."""
        self._runner.env.close(raise_if_closed=False)
        self._runner = self._built()

    def call_number_from(self, number: int) -> None:
        """Assign numbers that were not given yet to the trajectories that begin now."""
        self._runner.numbers.restart(number)

    def call_state(self) -> dict[str, Any]:
        """Return what the next batches of this worker depend on, in plain form."""
        return self._runner.state_dict()

    def call_load_state(self, state: dict[str, Any], strict: bool) -> None:
        """Load ``state``; this worker continues as the one that gave it would have."""
        with loading({}, strict=strict):  # the caller warns
            self._runner.load_state_dict(state, strict=strict)

    def close(self) -> None:
        """Close the env."""
        self._runner.env.close(raise_if_closed=False)


def _on_host(data: TensorDictBase) -> TensorDictBase:
    """Return data in memory of the CPU, through which all batches of workers go, whether there is a place for them or not."""
    if all(
        value.device.type == "cpu" for _, value in leaves(data) if isinstance(value, torch.Tensor)
    ):
        return data
    return without_device(data.cpu())
