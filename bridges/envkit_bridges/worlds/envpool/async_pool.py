"""`AsyncEnvPool` over EnvPool's own way of giving results as they come: each row of a pool is a worker.

The library gives results one at a time as they come, and waits without limit. A thread receives them, writes
them into the rows in memory, and begins the reset that follows a step where an episode has ended.

Conventions
    row    number of an env, and of its worker.
    job    a step, a reset, or a step and a reset, of one row; calls are made at once.
    ended  rows whose next step the library would turn into a reset.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np

from envkit.batched.async_pool import AsyncEnvPool
from envkit.batched.env_host import ADVANCE, RESET, RESTART, Maker
from envkit.batched.exchange.memory import SLOT, BufferPlan
from envkit.batched.metadata import EnvMetaData
from envkit.batched.workers import limits_of
from envkit.data.keywords import known_to, refuse_unknown
from envkit.env.base import EnvBase
from envkit.env.own_state import NEVER_SAVED, OWN, WITHOUT_EPISODE, envs_without_episode
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    OptionError,
    ResumeError,
    StepMaskError,
    UnsupportedError,
)
from envkit.transport import Backend, Layout, Pool
from envkit.transport.failure import Failure, failures_of
from envkit.transport.in_process import Arrivals
from envkit.transport.pool import Request, Worker
from envkit_bridges.gym.simulator_rows import DONE, Rows
from envkit_bridges.gym.vector import Stepped
from envkit_bridges.worlds.envpool.library import (
    built_anew,
    make_pool,
    require_keywords,
    require_name,
)
from envkit_bridges.worlds.envpool.multithreaded_env import MultiThreadedEnv


class EnvPoolAsyncEnvPool(AsyncEnvPool):
    """An `AsyncEnvPool` whose envs EnvPool steps with its own threads.

    Args:
        env_makers: the id of an env of the library, or a list that names it once for each env.
        create_env_kwargs: go to ``envpool.make_gymnasium``, the same for all.
        **options: of `AsyncEnvPool`. Rows are always exchanged in memory, and none is built again.

    Raises:
        MissingLibraryError: (an ImportError) EnvPool is not installed.
        ArgumentTypeError: (a TypeError) ``env_makers`` holds no names.
        ArgumentError: the names or keywords of the envs differ, or the library has no such env.
        OptionError: (a TypeError) another way of exchanging data, or going on without rows, is asked for.
    """

    backend = "envpool"

    def _visit_transforms(self, visit: object, earlier: object) -> Any:
        return None  # envs of the library have no transforms

    def __init__(
        self,
        env_makers: str | Sequence[str],
        *,
        create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        **options: Any,
    ):
        refuse_unknown("AsyncEnvPool", options, known_to(AsyncEnvPool) or [])
        is_list = isinstance(env_makers, Iterable) and not isinstance(env_makers, str | EnvBase)
        names: list[Any] = list(env_makers) if is_list else [env_makers]
        if not names or not all(isinstance(name, str) for name in names):
            raise ArgumentTypeError(
                f"env_makers is {env_makers!r}, but with backend='envpool' must be the id of an env of EnvPool, or a "
                "list of it. Name it once for each env: ['CartPole-v1'] * 8."
            )
        if len(set(names)) > 1:
            raise ArgumentError(
                f"env_makers names {sorted(set(names))}, but a pool of EnvPool holds envs of one kind. Make one "
                "pool for each, or take backend='threading'."
            )
        require_name(names[0])
        if options.get("use_buffers") is False or options.get("on_worker_failure") == "restart":
            raise OptionError(
                "with backend='envpool' rows are exchanged in memory and none is built again. Leave use_buffers and "
                "on_worker_failure out."
            )
        self.env_name = names[0]
        make = partial(_pool_of_one, names[0])
        super().__init__([make] * len(names), create_env_kwargs=create_env_kwargs, **options)
        if any(kwargs != self._kwargs[0] for kwargs in self._kwargs):
            raise ArgumentError(
                f"create_env_kwargs is {create_env_kwargs!r}, but all envs of a pool of EnvPool are made alike. "
                "Pass one dict."
            )
        require_keywords(names[0], self._kwargs[0])

    def _make_pool(self, makers: list[Maker], described: frozenset[int]) -> Pool:
        rows = EnvPoolRows(self.env_name, self.num_workers, self._kwargs[0])
        return Pool(rows, **limits_of(self))


def _pool_of_one(env_name: str, **kwargs: Any) -> MultiThreadedEnv:
    return MultiThreadedEnv(1, env_name, create_env_kwargs=kwargs)


_CLOSE_S = 3.0


class EnvPoolRow(Worker):
    """A row: what it does, in which moment of the memory, and whether the reset of that is under way."""

    def __init__(self, index: int) -> None:
        super().__init__(index, range(index, index + 1))
        self.command, self.slot = RESET, 0
        self.resets, self.ended = False, True


class EnvPoolRows(Backend[EnvPoolRow]):
    """The rows of an EnvPool that gives results as they come.

    Args:
        env_name: id of the library.
        num_rows: number of envs.
        kwargs: what `make_pool` takes.
    """

    ends_with_pool = False

    def __init__(self, env_name: str, num_rows: int, kwargs: Mapping[str, Any]):
        super().__init__(tuple(range(row, row + 1) for row in range(num_rows)))
        self._env_name, self._kwargs = env_name, kwargs
        self._answers = Arrivals()
        self._awaited: SimpleQueue[bool] = SimpleQueue()  # one entry for each result that will come
        self._thread = threading.Thread(target=self._receive, name="EnvPool results", daemon=True)
        self._seeds: dict[int, int] = {}

    @property
    def pids(self) -> list[int]:
        """This process, while open."""
        return [os.getpid()] if self.workers else []

    # ------------------------------------------------------------------------------ start and end

    def open(self) -> None:
        """Build the pool."""
        self.owner_pid, num_rows = os.getpid(), len(self.rows_of)
        with MultiThreadedEnv(1, self._env_name, create_env_kwargs=self._kwargs) as one:
            assert one.core.observation is not None  # there are no pixels beside it
            self._observed, self._acted = one.core.observation, one.core.action
            self._metadata = EnvMetaData.metadata_from_env(one)[0]
        self._pool = make_pool(self._env_name, num_rows, self._kwargs, batch_size=1)
        self.workers = [EnvPoolRow(index) for index in range(num_rows)]
        self._thread.start()

    def start(self, worker: EnvPoolRow, request: Request) -> None:
        """Answer what a row is like: the first one describes them all."""
        described = {} if worker.index else {0: self._metadata}
        request.settle(worker.index, described, [])

    def allocate(self, layout: Layout) -> dict[str, np.ndarray]:
        """Allocate ordinary memory."""
        arrays = layout.zeros()
        plan = BufferPlan.of(self._metadata, layout.rows).fitted(arrays)
        self._slot = arrays[SLOT.name]
        regions = (
            {path: rows.numpy() for path, rows in plan.tensors(arrays, region).items()}
            for region in ("in", "root", "next")
        )
        self._inputs, self._roots, self._nexts = regions
        return arrays

    def bind(self, worker: EnvPoolRow, request: Request) -> None:
        """Do nothing: the memory is that of all rows."""
        request.settle(worker.index, None, [])

    def replace(self, index: int) -> NoReturn:
        """Refused: a row cannot live alone.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"row {index} of an EnvPool cannot be built again by itself. Close the pool: the next reset makes another."
        )

    def close(self) -> None:
        """End the thread once what is under way has come, and wait for that a few seconds."""
        workers, self.workers = self.workers, []
        if workers:
            self._awaited.put(False)
            self._thread.join(_CLOSE_S)

    # ---------------------------------------------------------------------------------------- jobs

    def run(
        self, workers: Sequence[EnvPoolRow], request: Request, command: int, mask: np.ndarray | None
    ) -> None:
        """Start a step or a reset of rows."""
        for worker in workers:
            if worker.lost is None:
                self._run(worker, request, command)
            else:
                request.miss(worker.lost)

    def _run(self, worker: EnvPoolRow, request: Request, command: int) -> None:
        worker.request = request
        worker.command, worker.slot = command, int(self._slot[0])
        worker.resets = command in (RESET, RESTART)
        if not worker.resets and worker.ended:
            self._settle_raised(worker, request, _ended(worker.index))
            return
        self.pending[worker.reply] = worker
        if worker.resets:
            self._send_reset(worker)
        else:
            self._awaited.put(True)
            rows = {
                path: ring[worker.slot, _slice_of(worker)] for path, ring in self._inputs.items()
            }
            self._pool.send(self._acted.decode_arrays(rows), _id(worker))

    def _send_reset(self, worker: EnvPoolRow) -> None:
        self._awaited.put(True)
        self._pool._reset(_id(worker))  # what `reset` does, without waiting for its result

    def call(self, worker: EnvPoolRow, request: Request, method: str, arguments: Any) -> None:
        """Call a method: seeds, states and attributes; what steps or resets is a command."""
        args, kwargs = arguments
        worker.request = request
        try:
            result = getattr(self, f"_call_{method}", self._refuse)(*args, **kwargs)
        except Exception as error:
            self._settle_raised(worker, request, error)
        else:
            request.settle(worker.index, result, [])

    def _settle_raised(self, worker: EnvPoolRow, request: Request, error: Exception) -> None:
        index, rows = worker.index, tuple(worker.rows)
        failures = failures_of(error, worker=index, rows=rows, command=request.name)
        request.settle(index, None, failures)

    def _call_set_seed(self, of_row: dict[int, int]) -> None:
        """Store seeds; once all rows have new ones, the pool is built again with them."""
        self._seeds.update(of_row)
        if len(self._seeds) == len(self.rows_of):
            seeds, self._seeds = self._seeds, {}
            self._pool = built_anew(self._pool, [seeds[row] for row in range(len(seeds))])
            for worker in self.workers:
                worker.ended = True

    def _call_has_attribute(self, path: tuple[str, ...]) -> bool:
        return False

    def _call_states(self) -> dict[int, Any]:
        """Return no state of any row, since EnvPool keeps them to itself."""
        name = f"EnvPool({self._env_name!r})"
        own = {OWN: {WITHOUT_EPISODE: name, NEVER_SAVED: name}}
        count = len(self.rows_of)
        return {row: {"env": own, "root": None, "numbers": None} for row in range(count)}

    def _call_load_states(self, strict: bool, states: dict[int, Any]) -> dict[int, bool]:
        """Return that the episode of each row is lost.

        Raises:
            ResumeError: the states are those of envs of another kind.
        """
        if not all(envs_without_episode(state) for state in states.values()):
            raise ResumeError(
                "the state dict holds episodes of other envs than those of EnvPool, which cannot take them. Load it "
                "into a pool that is built as that which was saved."
            )
        return dict.fromkeys(states, True)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError(
            "envs of EnvPool take no options when they are reset, and have no methods. Pass "
            "create_env_kwargs, and set_seed()."
        )

    def attend(self, until: float, left: int) -> bool:
        """Wait for results, which the thread takes."""
        return self._answers.attend(self.pending, until, left)

    def give_up(self, stuck: Sequence[tuple[EnvPoolRow, Failure]]) -> None:
        """Record that rows are lost."""
        with self._answers:
            for worker, why in stuck:
                if worker.reply in self.pending:
                    self.lose(worker, why)

    # ------------------------------------------------------------------------- results, in their thread

    def _receive(self) -> None:
        while self._awaited.get():
            self._take(self._pool.recv(reset=False))
        self._pool.close()

    def _take(self, result: Stepped) -> None:
        """Receive a result of some row; the result of a job that was given up is dropped."""
        with self._answers:
            if not self.workers:
                return
            *_, terminated, truncated, info = result
            worker = self.workers[int(info["env_id"][0])]
            worker.ended = bool(terminated[0] | truncated[0])
            if worker.reply not in self.pending:
                return
            try:
                self._record(worker, result)
            except Exception as error:
                self._settle_raised(worker, worker.request, error)
            else:
                if worker.command == ADVANCE and worker.ended:
                    worker.resets = True
                    self._send_reset(worker)
                    return
                worker.request.settle(worker.index, None, [])
            del self.pending[worker.reply]
            self._answers.came()

    def _record(self, worker: EnvPoolRow, stepped: Stepped) -> None:
        """Write what came into the memory of the row: its `next`, its root, or both."""
        observations, rewards, terminated, truncated, _ = stepped
        shown = {
            path: value.numpy()
            for path, value in self._observed.encode_arrays(observations).items()
        }
        if not worker.resets:
            flags = (terminated | truncated, terminated, truncated)
            columns = dict(zip((("reward",), *DONE), (rewards, *flags), strict=True))
            outcome = {**shown, **{path: column[:, None] for path, column in columns.items()}}
            _write(outcome, self._nexts, worker.slot, _slice_of(worker))
        if worker.resets or worker.command == ADVANCE:
            _write(shown, self._roots, worker.slot + 1, _slice_of(worker))


def _write(values: Rows, rings: Rows, slot: int, rows: slice) -> None:
    """Write values of some rows into a slot of arrays of shape (slots, rows, *leaf) by path."""
    for path, value in values.items():
        rings[path][slot, rows] = value


def _slice_of(worker: EnvPoolRow) -> slice:
    return slice(worker.index, worker.index + 1)


def _id(worker: EnvPoolRow) -> np.ndarray:
    return np.array([worker.index], np.int32)


def _ended(row: int) -> StepMaskError:
    return StepMaskError(
        f"the episode of row {row} has ended, or was never begun. Reset it first: async_reset_send, "
        "async_step_and_maybe_reset_send."
    )
