"""Sub-envs that step and reset at their own pace, in threads or in processes.

`AsyncEnvPool` is a batched env whose sub-envs can also be sent to work one by one, and whose results are
received as they come. This module holds what its users see. Who is busy and what is received is known to
`job_queues`, how one row's data travels to `exchange.jobs`.

Conventions
    job     a step, a reset, or a step and a reset of what is done, of one sub-env. A sub-env has at most one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, Unpack, cast

import torch
from tensordict import TensorDictBase

from envkit.arrays.integers import as_int
from envkit.batched.attributes import WorkerAttribute
from envkit.batched.batched_env import BatchedEnv
from envkit.batched.caller_settings import chosen
from envkit.batched.env_host import HostFactory, Maker
from envkit.batched.exchange.jobs import BufferJobs, TensorDictJobs
from envkit.batched.job_queues import ENV_INDEX, JobQueues, rows_of
from envkit.batched.lazy_stacks import stack_rows
from envkit.batched.metadata import EnvMetaData
from envkit.batched.settings import AsyncOptions, RayOptions, require_names
from envkit.batched.workers import (
    cores_of,
    limits_of,
    ray_workers,
    usable_options,
    worker_processes,
)
from envkit.data.arguments import require_option
from envkit.data.paths import Key, as_key
from envkit.env.base import EnvBase
from envkit.env.drawing import allow_options
from envkit.env.facts import Facts
from envkit.env.runs import Runs
from envkit.env.tickets import Ticket
from envkit.errors import ArgumentError, BusyEnvError, UnsupportedError
from envkit.lazy_imports import late
from envkit.specs import Composite, NonTensor, TensorSpec, draws_in_order
from envkit.specs.annotations import EnvData
from envkit.transport import Pool, Threads
from envkit.transport.pool import call_by_row

Stack = Literal["dense", "lazy", "maybe_dense"]
_INDIVIDUAL: dict[str, bool | None] = {"dense": False, "lazy": True, "maybe_dense": None}

Exchange = Literal["queue", "shm", "auto"]
_EXCHANGES: dict[Exchange, bool | None] = {"queue": False, "shm": True, "auto": None}
Affinity = Sequence[Sequence[int]] | Callable[[int], Sequence[int]]

Makers = Callable[..., EnvBase] | EnvBase | str | Sequence[Callable[..., EnvBase] | EnvBase | str]


class AsyncEnvPool(BatchedEnv):
    """Step and reset several envs, each at its own pace, while the caller does something else.

    `reset`, `step`, `rollout` and the other calls of an env wait for all of them, as in any batched env.
    ``async_*_send`` gives work to some and returns at once; ``async_*_recv`` gives what is done. Every
    result says in the non-tensor entry ``env_index`` which env each row belongs to, and is sent back to it by
    that. An env that raises does so in the call that receives its result, and is free then.

    Args:
        env_makers: callable that makes an env, an env (which is copied), or a list of them: one env each.
        backend: "threading" (or "thread"), one thread an env, gives a `ThreadingAsyncEnvPool`.
            "multiprocessing" (or "process"), one process an env, gives a `ProcessorAsyncEnvPool`. "ray", one actor of
            a Ray cluster an env, gives a `RayAsyncEnvPool`. "envpool" means threads of the EnvPool library, whose
            env ids are the makers then: ``["CartPole-v1"] * 8``.
        backend_options: of Ray, see `envkit.batched.settings.RayOptions`; the others have none.
        stack: how results of several envs are joined: "dense" asks for equal keys and shapes, "lazy" gives a
            lazy stack, "maybe_dense" the first where that is possible and else the second.
        create_env_kwargs: keywords for the makers: a dict for all, or a list of one for each.
        exchange: how data travels to processes. "shm" means in shared memory, "queue" as messages, "auto" (as None)
            in shared memory where the specs allow it. "queue" and "shm" are ``use_buffers=False`` and ``True``, but
            "shm" raises where the specs do not allow it. Other backends take "queue" and "auto", without effect.
        worker_affinity: numbers of the processor cores that each process may run on: a sequence of one sequence for
            each, or a function of the number of the process that gives it. Linux only, and processes only.
        envs_per_worker: taken as in TorchRL, without effect: each env has its own thread, process or actor.
        device, num_sub_threads, timeout, start_timeout, on_worker_failure, max_restarts: see `ParallelEnv`.
        use_buffers, allow_done_after_reset: see `ParallelEnv`.

    Attributes:
        min_get: results that ``async_*_recv`` waits for unless configured otherwise; 1.
        exchange, worker_affinity, envs_per_worker: as they were given.

    Raises:
        UnsupportedError: (a NotImplementedError) ``backend`` or ``stack`` is none of these.
        ArgumentError: ``exchange`` is unknown or contradicts ``use_buffers``, or an argument is for processes only.
        OptionError: (a TypeError) an option of the backend is unknown.
        MissingLibraryError: (an ImportError) Ray or EnvPool is asked for and not installed.

    Example:
        >>> from envkit import AsyncEnvPool, GymEnv
        >>> make = lambda: GymEnv("CartPole-v1")
        >>> env = AsyncEnvPool([make, make, make], backend="threading")
        >>> env.async_reset_send(env_index=[0, 1, 2])
        >>> td = env.async_reset_recv(min_get=3)
        >>> env.async_step_send(env.rand_action(td))
        >>> ready = env.async_step_recv(min_get=2)
        >>> ready.batch_size[0] >= 2, len(ready["env_index"]) == ready.batch_size[0]
        (True, True)
        >>> env.close()
    """

    _attribute_type = WorkerAttribute
    _buffer_exchange = BufferJobs
    _tensordict_exchange = TensorDictJobs
    _fast_path_bypasses = BatchedEnv._fast_path_bypasses
    backend: str

    def __new__(cls, *args: object, backend: str | None = None, **kwargs: object) -> Self:
        """Build a pool of the class of a backend."""
        kind: Any = cls if backend is None and cls is not AsyncEnvPool else _class_of(backend)
        if not issubclass(kind, cls):
            raise ArgumentError(
                f"backend is {backend!r}, but {cls.__name__} has another. Leave it out, or take AsyncEnvPool."
            )
        return super().__new__(kind)

    def __init__(
        self,
        env_makers: Makers,
        *,
        backend: str | None = None,
        stack: Stack = "dense",
        create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        exchange: Exchange | None = None,
        worker_affinity: Affinity | None = None,
        envs_per_worker: int = 1,
        min_get: int = 1,
        backend_options: RayOptions | None = None,
        **options: Unpack[AsyncOptions],
    ):
        require_names(type(self), AsyncOptions, options)
        self.backend_options = usable_options(self.backend, backend_options)
        require_option("stack", stack, _INDIVIDUAL, error=UnsupportedError)
        is_list = isinstance(env_makers, Iterable) and not isinstance(env_makers, EnvBase)
        makers: Any = list(cast(Iterable[Any], env_makers)) if is_list else env_makers
        self.exchange = exchange
        if exchange is not None:
            self._require_exchange(exchange, options.get("use_buffers"))
            if exchange == "queue" and self.backend == "multiprocessing":
                options["use_buffers"] = False
        super().__init__(
            len(makers) if isinstance(makers, list) else 1,
            makers,
            create_env_kwargs=create_env_kwargs,
            share_individual_td=_INDIVIDUAL[stack],
            **options,  # type: ignore[misc]
        )
        self.stack = stack
        self.envs_per_worker = as_int(
            "envs_per_worker", envs_per_worker, least=1, meaning="the envs of each process"
        )
        self.worker_affinity = worker_affinity
        if self.backend != "multiprocessing":
            self._require_no_processes()
        self._cores = cores_of(worker_affinity, self.num_workers)
        self.min_get = as_int("min_get", min_get, least=1, meaning="the results to wait for")
        self._queues = JobQueues(self)

    def _require_exchange(self, exchange: object, use_buffers: bool | None) -> None:
        require_option("exchange", exchange, [*_EXCHANGES, None])
        if exchange == "shm" and self.backend != "multiprocessing":
            raise ArgumentError(
                f"exchange is 'shm', but backend={self.backend!r} has no processes that share memory. Leave exchange "
                "out, or pass backend='multiprocessing'."
            )
        meant = _EXCHANGES[cast(Exchange, exchange)]
        if None not in (meant, use_buffers) and meant is not use_buffers:
            raise ArgumentError(
                f"exchange={exchange!r} means use_buffers={meant}, but use_buffers is {use_buffers}. Leave one of them "
                "out."
            )

    def _require_no_processes(self) -> None:
        """Check that no argument was passed that only processes have."""
        names = ["envs_per_worker"] if self.envs_per_worker > 1 else []
        names += [] if self.worker_affinity is None else ["worker_affinity"]
        if names:
            raise ArgumentError(
                f"{names[0]} was given, but backend={self.backend!r} has no processes. Leave it out, or pass "
                "backend='multiprocessing'."
            )

    def _choose_exchange(self, pool: Pool, metadata: list[EnvMetaData]) -> None:
        super()._choose_exchange(pool, metadata)
        if self.exchange == "shm" and not self._use_buffers:
            raise ArgumentError(
                "exchange is 'shm', but a spec has no fixed size or is no tensor, or the envs differ in keys, shapes "
                "or dtypes. Pass exchange='auto' or 'queue'."
            )

    @property
    def env_makers(self) -> list[Callable[..., Any]]:
        """The maker of each env; an env that was passed is one that makes copies."""
        return self.create_env_fn

    @property
    def resolved_exchange(self) -> Literal["queue", "shm"]:
        """How data travels: "shm" in memory that processes share, else "queue"; reading it starts the envs."""
        self._started()
        return "shm" if self._use_buffers and self.backend == "multiprocessing" else "queue"

    @property
    def exchange_keys(self) -> tuple[Key, ...]:
        """The entries that travel in shared memory; none where `resolved_exchange` is "queue"."""
        if self.resolved_exchange == "queue":
            return ()
        exchange = cast(BufferJobs, self._the_exchange)
        regions = (exchange.roots[0], exchange.inputs[0])
        paths = [*regions[0], *(path for path in regions[1] if path not in regions[0])]
        return tuple(as_key(path) for path in [*paths, *(("next", *p) for p in exchange.nexts[0])])

    def stats(self, *, reset: bool = False) -> dict[str, float | int]:
        """Count what ``async_*_recv`` gave from shared memory; {} where `resolved_exchange` is "queue".

        Args:
            reset: begin to count again.

        Returns:
            ``batches`` and ``items`` (rows) that were received, ``avg_batch_size``, ``batch_fill_ratio`` (rows for
            each that ``max_get`` allowed), and ``partial_batch_fraction`` (batches smaller than their ``max_get``).
            ``avg_batch_to_action_ms`` is the time from a root to the action that follows. ``consumer_busy_fraction``
            is the part of the time since the first batch in which some env waits for its action. TorchRL's
            ``avg_observation_to_batch_ms`` is not measured: a process says nothing of when it was ready.

        Example:
            >>> from envkit import AsyncEnvPool, GymEnv
            >>> make = lambda: GymEnv("CartPole-v1")
            >>> env = AsyncEnvPool([make, make], backend="multiprocessing")
            >>> env.async_reset_send(env_index=[0, 1])
            >>> _ = env.async_reset_recv(min_get=2)
            >>> env.stats()["items"]
            2
            >>> env.close()
        """
        if self.resolved_exchange == "queue":
            return {}
        return self._queues.stats.report(reset=reset)

    def _make_pool(self, makers: list[Maker], described: frozenset[int]) -> Pool:
        count = self.num_workers
        if self.backend == "multiprocessing":
            cores = self._cores
            return worker_processes(self, makers, described, num_processes=count, cores=cores)
        if self.backend == "ray":
            options = self.backend_options
            return ray_workers(self, makers, described, num_actors=count, options=options)
        choices = self._choices or chosen()
        factory = HostFactory(makers, described, without_gradients=True, choices=choices)
        return Pool(Threads(factory, count, count), **limits_of(self))

    def _prefers_rows(self, pool: Pool) -> bool:
        """A thread that was given up may still write into rows, which must not be those of its successor."""
        return self.backend != "threading" or self.on_worker_failure == "raise"

    # --------------------------------------------------------------------------------------- specs

    @property
    def num_envs(self) -> int:
        """The number of envs."""
        return self.num_workers

    @property
    def env_batch_sizes(self) -> list[torch.Size]:
        """The batch size of each env; reading it starts them."""
        self._started_specs()
        return [one.batch_size for one in self._metadata]

    def _with_own_entries(self, specs: Composite) -> Composite:
        specs = specs.clone()
        index = NonTensor(self._batch_size, example_data=0, device=self._device)
        specs["input_spec", "full_state_spec", ENV_INDEX] = index
        return specs

    def _is_of_all(self, td: TensorDictBase) -> bool:
        return self._queues.index.read(td) == list(range(self.num_workers))

    def _indices(self) -> Any:
        return self._queues.index.entry(range(self.num_workers), self._batch_size[1:], self._device)

    # ------------------------------------------------------------------------------ all at once

    def _require_idle(self) -> None:
        if busy := self._queues.busy:
            raise BusyEnvError(
                f"envs {sorted(busy)} are still processing what was sent to them. Receive it "
                "before all envs are asked for something at once."
            )

    def reset(self, *args: Any, **kwargs: Any) -> EnvData:
        self._require_idle()
        return super().reset(*args, **kwargs)

    def _reset(self, td: TensorDictBase | None, sub_kwargs: Any = None) -> TensorDictBase:
        root = None if td is None else td.exclude(ENV_INDEX)
        return super()._reset(root, sub_kwargs).set(ENV_INDEX, self._indices())

    def _make_step(self, td: TensorDictBase, *, advance: bool, is_ahead: bool = False) -> Ticket:
        self._require_idle()
        if td.get(ENV_INDEX, None) is None:
            td.set(ENV_INDEX, self._indices())
        elif td.batch_size == self.batch_size and not self._is_of_all(td):
            raise ArgumentError(
                f"the rows belong to envs {list(td[ENV_INDEX])}, but where all envs step at once row i is that of "
                "env i. Put them in order, or send them: async_step_send goes by env_index."
            )
        return super()._make_step(td, advance=advance, is_ahead=is_ahead)

    def _set_seeds(self, seed: int | None, *, static: bool) -> int:
        self._require_idle()
        return super()._set_seeds(seed, static=static)

    def _find_facts(self) -> Facts:
        return replace(super()._find_facts(), works_elsewhere=True)

    def _runs(self) -> Runs:
        """Return none: jobs of single envs are asked for one by one."""
        return Runs()

    # ------------------------------------------------------------------------------- one by one

    def rand_action(self, tensordict: TensorDictBase | None = None) -> EnvData:
        """Sample actions from their specs, for all envs or for those whose rows ``tensordict`` holds.

        See `BatchedEnv.rand_action`. Which envs some rows belong to is said by ``env_index``.
        """
        if tensordict is None or tensordict.get(ENV_INDEX, None) is None:
            return super().rand_action(tensordict)
        if tensordict.batch_size == self.batch_size and self._is_of_all(tensordict):
            return super().rand_action(tensordict)
        envs, size = self._queues.index.read(tensordict), self._batch_size[1:]
        form = self._declared.cached("drawn_together", self._action_of_a_row)
        if form is not None and tensordict.batch_size == (len(envs), *size):
            key, leaf = form
            return tensordict.set(key, leaf.rand((len(envs),), self._action_generator))
        rows = rows_of(tensordict.exclude(ENV_INDEX), envs, size)
        drawn = [self._drawn_by(env, row) for env, row in zip(envs, rows, strict=True)]
        if tensordict.batch_size == size:
            return tensordict.update(drawn[0])
        return tensordict.update(stack_rows(drawn, individual=bool(self._share_individual_td)))

    def _action_of_a_row(self) -> tuple[Key, TensorSpec] | None:
        """Return the only action of all rows, and its spec, where many draws at once are those of one after the other.

        See `test_actions_drawn_together_are_those_drawn_one_by_one`.
        """
        if self._share_individual_td:
            return None
        actions = list(self.full_action_spec.items(True, True))
        own = self._facts.action_masks or self._facts.draws_own_actions
        if own or len(actions) != 1 or not draws_in_order(actions[0][1]):
            return None
        key, leaf = actions[0]
        return key, leaf[0]

    def _drawn_by(self, env: int, row: TensorDictBase) -> TensorDictBase:
        if self._metadata[env].facts.draws_own_actions:
            return call_by_row(self._started(), "rand_action", {env: row.to("cpu")})[env]
        spec = cast(Composite, self.full_action_spec[env]).clone()
        allow_options(spec, row, self._facts.action_masks)
        return spec.rand((), self._action_generator)

    def async_step_send(
        self, tensordict: TensorDictBase, env_index: int | Sequence[int] | None = None
    ) -> None:
        """Start a step of some envs, and return at once.

        Args:
            tensordict: roots with actions, one row for each env, in their order; one without an axis of rows
                is one row. Entries under ``next``, which win in `step`, are left out here.
            env_index: the envs; by default what the entry ``env_index`` says. An int has its own
                slot, which ``async_step_recv(env_index=...)`` gives.

        Raises:
            BusyEnvError: (a RuntimeError) one of them has not been received.
            NotResetError: one of them was never reset.
            InputError: an action is none of its env's.
            MissingKeyError: (a KeyError) nothing says which envs are meant.
        """
        self._queues.send("step", tensordict, env_index)

    def async_reset_send(
        self,
        tensordict: TensorDictBase | None = None,
        env_index: int | Sequence[int] | None = None,
    ) -> None:
        """Start a reset of some envs, and return at once; see `async_step_send`."""
        self._queues.send("reset", tensordict, env_index)

    def async_step_and_maybe_reset_send(
        self, tensordict: TensorDictBase, env_index: int | Sequence[int] | None = None
    ) -> None:
        """Start a step of some envs, and a reset of what is done then, and return at once; see `async_step_send`."""
        self._queues.send("step_and_maybe_reset", tensordict, env_index)

    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> EnvData:
        """Return the steps that are done, at least ``min_get``, one row each, in the order of their envs.

        Args:
            min_get: how many to wait for; `min_get` of the pool by default. All that are done then are given.
            env_index: the slot to give; what it gives has no axis of rows.
            max_get: how many are given at most; the others stay ready.
            timeout: seconds to wait.

        Returns:
            Roots as they were sent, with ``next``; batch size ``(taken, *sub_batch)``.

        Raises:
            BusyEnvError: (a RuntimeError) fewer than ``min_get`` such jobs are under way.
            ResultTimeoutError: (a TimeoutError) fewer are done in time. No result is lost.
            WorkerError: (a RuntimeError) an env raised or was lost. It is free then, and results of others stay
                ready.
        """
        return self._queues.recv("step", min_get, env_index, max_get, timeout)[0]

    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> EnvData:
        """Return the resets that are done: new roots; see `async_step_recv`."""
        return self._queues.recv("reset", min_get, env_index, max_get, timeout)[0]

    def async_step_and_maybe_reset_recv(
        self,
        min_get: int | None = None,
        env_index: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> tuple[EnvData, EnvData]:
        """Return the steps that are done, and the roots that follow them; see `async_step_recv`.

        Example:
            >>> from envkit import AsyncEnvPool, GymEnv
            >>> make = lambda: GymEnv("CartPole-v1")
            >>> env = AsyncEnvPool([make, make], backend="threading")
            >>> td = env.reset()
            >>> env.async_step_and_maybe_reset_send(env.rand_action(td), env_index=[0, 1])
            >>> data, root = env.async_step_and_maybe_reset_recv(min_get=2)
            >>> data["next", "reward"].shape, root["observation"].shape
            (torch.Size([2, 1]), torch.Size([2, 4]))
            >>> env.close()
        """
        return self._queues.recv("step_and_maybe_reset", min_get, env_index, max_get, timeout)

    # --------------------------------------------------------------------------------------- close

    def close(self, *, raise_if_closed: bool = False) -> None:
        """End the envs; what was sent and not received is dropped. See `BatchedEnv.close`."""
        self._queues = JobQueues(self)
        super().close(raise_if_closed=raise_if_closed)

    def shutdown(self) -> None:
        """End the envs; twice is as good as once."""
        self.close(raise_if_closed=False)


class ThreadingAsyncEnvPool(AsyncEnvPool):
    """Run an `AsyncEnvPool` with one thread for each env: for envs that wait, or compute in native code.

    Example:
        >>> from envkit import GymEnv, ThreadingAsyncEnvPool
        >>> make = lambda: GymEnv("CartPole-v1")
        >>> env = ThreadingAsyncEnvPool([make, make])
        >>> env.rollout(5, break_when_any_done=False).batch_size
        torch.Size([2, 5])
        >>> env.close()
    """

    backend = "threading"


class ProcessorAsyncEnvPool(AsyncEnvPool):
    """Run an `AsyncEnvPool` with one process for each env. Makers travel by value, as those of `ParallelEnv`.

    Example:
        >>> from envkit import GymEnv, ProcessorAsyncEnvPool
        >>> make = lambda: GymEnv("CartPole-v1")
        >>> env = ProcessorAsyncEnvPool([make, make])
        >>> env.rollout(5, break_when_any_done=False).batch_size
        torch.Size([2, 5])
        >>> env.close()
    """

    backend = "multiprocessing"


class RayAsyncEnvPool(AsyncEnvPool):
    """Run an `AsyncEnvPool` with one actor of a Ray cluster for each env. Makers travel by value, as those of `ParallelEnv`.

    Example:
        >>> from envkit import GymEnv, RayAsyncEnvPool
        >>> make = lambda: GymEnv("CartPole-v1")
        >>> env = RayAsyncEnvPool([make, make])  # doctest: +SKIP
        >>> env.rollout(5, break_when_any_done=False).batch_size  # doctest: +SKIP
        torch.Size([2, 5])
        >>> env.close()  # doctest: +SKIP
    """

    backend = "ray"


_BACKENDS: dict[str | None, type[AsyncEnvPool]] = {
    None: ThreadingAsyncEnvPool,
    "threading": ThreadingAsyncEnvPool,
    "thread": ThreadingAsyncEnvPool,
    "multiprocessing": ProcessorAsyncEnvPool,
    "process": ProcessorAsyncEnvPool,
    "ray": RayAsyncEnvPool,
}


def _class_of(backend: str | None) -> type[AsyncEnvPool]:
    if backend == "envpool":
        return late("EnvPoolAsyncEnvPool")
    names = [*(name for name in _BACKENDS if name is not None), "envpool", None]
    require_option("backend", backend, names, error=UnsupportedError)
    return _BACKENDS[backend]
