"""One env and one policy that make batches: what a collector runs here, and a worker runs in its process.

`EnvRunner` carries the root from one batch to the next and numbers trajectories. It does not know how many runners
there are, how much is to be collected, nor where batches go.

Conventions
    batch  transitions of batch size (*env_batch, steps), time last, and ``("collector", "traj_ids")``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from envkit.collectors.profiling import ProfileConfig, Profiling, Seconds, Timed
from envkit.collectors.trajectories import TrajectoryNumbers
from envkit.collectors.weights import (
    Weights,
    load_weights,
    only_tensors,
    require_same_architecture,
    tensors_of,
)
from envkit.data.paths import Key, as_key, as_path
from envkit.data.plain import from_plain, plain
from envkit.data.transition import without_device
from envkit.env.base import EnvBase
from envkit.env.bound_policy import BoundPolicy
from envkit.env.fragments import Fragment, begin_fragment
from envkit.env.own_state import WITHOUT_EPISODE
from envkit.env.policy import ExplorationType, HasParams, set_exploration_type
from envkit.env.rollout import truncate_last, unrecorded
from envkit.env.runs import Begun, Draws
from envkit.errors import ArgumentError, ResumeError, StaleDataError
from envkit.process_wide import warn
from envkit.rules import RESET


def _generator_states() -> dict[str, Any]:
    """Return the states of torch's generators, of the CPU and of each CUDA device that was used."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if used else [],
    }


def _set_generators(states: Mapping[str, Any]) -> None:
    """Set torch's generators to what `_generator_states` gave; devices that are not there are left out."""
    torch.set_rng_state(states["cpu"].cpu())
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])


COLLECTOR = "collector"
"""Node of the data that holds what the collector adds."""

POLICY_VERSION: tuple[Key, ...] = ("policy_version", ("next", "policy_version"))
"""Where the version of the policy that acted is recorded."""

RANDOM_ACTION = (COLLECTOR, "random_action")
"""Where `init_random_frames` records which actions were drawn from their specs, bool of the batch size."""

OWN_STEP_COUNT = "collector_step_count"
"""Name of the count of `StepCounter` in an env that has its own ``step_count``."""


@dataclass(frozen=True)
class RunnerOptions:
    """How a runner is built and makes its batches; see `CollectorOptions` for the entries."""

    create_env_kwargs: Mapping[str, Any] | None = None
    policy_factory: Callable[[], Any] | None = None
    env_device: torch.device | None = None
    policy_device: torch.device | None = None
    max_frames_per_traj: int = 0
    record_for_resume: bool = False
    trust_policy: bool | None = None
    compile_policy: bool | Mapping[str, Any] | None = None
    cudagraph_policy: bool | Mapping[str, Any] | None = None
    auto_register_policy_transforms: bool | None = None
    exploration_type: ExplorationType = ExplorationType.RANDOM  # type: ignore[assignment]
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    record_state: bool = False
    set_truncated: bool = False
    storing_device: torch.device | None = None
    track_policy_version: bool = False
    compact_obs: bool = False
    init_random_frames: int = 0


@dataclass(frozen=True)
class Order:
    """Size and kind of one batch.

    Attributes:
        steps: of each row of the env.
        random: draw actions from their specs instead of asking the policy.
        version: of the policy that acts.
        interrupted: asked after each step; True ends the batch there.
    """

    steps: int
    random: bool = False
    version: int = 0
    interrupted: Callable[[], bool] | None = None


@dataclass(frozen=True)
class Batch:
    """The collected data.

    Attributes:
        data: transitions, see the module.
        following: number of the trajectory that each row goes on with, shape ``(rows,)``.
    """

    data: TensorDictBase
    following: torch.Tensor


class EnvRunner:
    """Collect batches, one after the other.

    Args:
        env: with the transforms that the policy and the collector need.
        policy: what the user passed; None draws random actions.
        bind: gives what acts for such a policy, a callable from TensorDict to TensorDict.
        options: how batches are made.
        first_number, stride: of the trajectories; see `TrajectoryNumbers`.
    """

    refuses_moved = False
    """An env that other code has used is an error: in workers, which hide warnings."""

    def __init__(
        self,
        env: EnvBase,
        policy: Any,
        bind: Callable[[Any], BoundPolicy],
        options: RunnerOptions,
        *,
        first_number: int = 0,
        stride: int = 1,
    ):
        self.env = env
        self.policy = policy
        self.act = bind(policy)
        self._bind = bind
        self.options = options
        self.numbers = TrajectoryNumbers(env.batch_size.numel(), first=first_number, stride=stride)
        self.root: TensorDictBase | None = None
        self._moves = 0  # of the env when there was that root
        self._written: TensorDictBase | None = None  # what the policy adds to a root
        self._draws, self._seeded = Draws(), env._action_generator
        self.seconds = Seconds()
        self.frames = self.episodes = 0
        self.profiling: Profiling | None = None

    # ------------------------------------------------------------------------------------- batches

    def begin(self, order: Order) -> Callable[[], Batch]:
        """Begin a batch, and give what ends it. With steps that are one program, that runs meanwhile."""
        began = perf_counter()
        root = self._first_root()
        if order.random and self.policy is not None and self._written is None:
            self._written = self._acted(root.clone()).exclude(*root.keys(True, True))
        with self._acting():
            begun = begin_fragment(self._fragment(order), root)
        self.seconds["envs"] += perf_counter() - began
        return lambda: self._finish(order, begun)

    def begin_anew(self, rows: torch.Tensor | None = None) -> list[int]:
        """Reset the env, or the rows that a bool mask of shape ``(*env_batch,)`` names.

        Returns:
            The numbers of the trajectories that end by this.
        """
        batch = self.env.batch_size
        if rows is None or self.root is None:
            rows = torch.ones(batch, dtype=torch.bool, device="cpu")
            self._draws = Draws()
            return self._take_root(self.env.reset(), rows)
        rows = rows if isinstance(rows, torch.Tensor) else torch.as_tensor(rows, device="cpu")
        if rows.shape != batch or rows.dtype != torch.bool:
            raise ArgumentError(
                f"index is of shape {tuple(rows.shape)} and dtype {rows.dtype}, but must be a bool mask of the "
                f"batch of the env, {tuple(batch)}. Pass True for each row that is to be reset."
            )
        self._leave_moved()
        if self.root is None:
            return self.begin_anew()
        root = self.root.copy()
        for level, names in self.env.done_levels.items():
            flags = root.get(as_key((*level, names[0])))
            mask = rows.reshape((*batch, *(1,) * (flags.ndim - len(batch))))
            root.set(as_key((*level, RESET)), mask.expand_as(flags).clone())
        self.root = None
        return self._take_root(self.env.reset(root), rows)

    def _take_root(self, root: TensorDictBase, begun: torch.Tensor) -> list[int]:
        """Number what has begun, then go on from there: without a number there is no root, whatever comes in between."""
        ended = self.numbers.begin_anew(begun.reshape(-1))
        self._moves, self.root = self.env._in_use.moves, root
        return ended

    def _leave_moved(self) -> None:
        """Drop the root where other code has used an env that keeps its episodes to itself, and say so once.

        Before the first batch no episode is lost by that, and nothing is said.

        Raises:
            StaleDataError: (a RuntimeError) it has, and ``refuses_moved``; else it is a warning.
        """
        if self.root is None or not self.env.batch_locked or self._moves == self.env._in_use.moves:
            return
        self.root = None
        if not self.frames:
            return
        message = (
            f"this {type(self.env).__name__} was stepped, reset, seeded or loaded by other code since the last batch of its "
            "collector, so the next batch begins new trajectories. To continue those under way, use another env or "
            "evaluate() between batches."
        )
        if self.refuses_moved:
            raise StaleDataError(message)
        warn(message)

    def seed(self, seed: int | None, *, static: bool) -> int | None:
        """Seed the env; a root that was not stepped yet is dropped."""
        following = self.env.set_seed(seed, static_seed=static)
        if not self.frames:
            self.root = None
        return following

    def load_weights(self, weights: Weights) -> None:
        """Load other weights into the policy, which acts with them from the next batch on.

        Raises:
            ArgumentError: (a ValueError) they are of another architecture.
        """
        loaded = load_weights(self.policy, weights)
        if loaded is not self.policy:
            self.act, self.policy = self._bind(loaded), loaded

    def _first_root(self) -> TensorDictBase:
        if self.options.reset_at_each_iter and self.frames:
            self.root = None
        self._leave_moved()
        if self.root is None:
            self.begin_anew()
        assert self.root is not None
        root, self.root = self.root, None  # what fails in the middle has none to go on from
        return root

    def _fragment(self, order: Order) -> Fragment:
        act, policy = self.act, self.policy
        if self._seeded is not self.env._action_generator:  # a seed was set since
            self._draws, self._seeded = Draws(), self.env._action_generator
        if order.random:
            act, policy = BoundPolicy(self.env.rand_action), None
        return Fragment(
            self.env,
            policy,
            Timed(act, self.seconds),
            order.steps,
            resets=self.options.reset_when_done,
            record_state=self.options.record_state,
            draws=self._draws,
            interrupted=order.interrupted,
        )

    @contextmanager
    def _acting(self) -> Iterator[None]:
        with set_exploration_type(self.options.exploration_type), torch.no_grad():
            yield

    def _finish(self, order: Order, begun: Begun) -> Batch:
        began = perf_counter()
        with self._acting():
            data, root = begun()
        self.seconds["envs"] += perf_counter() - began
        batch = Batch(self._marked(data, order), self.numbers.current)
        # not before it is numbered: Ctrl-C in between begins new trajectories
        self._moves, self.root = self.env._in_use.moves, root
        if self.profiling is not None:
            self.profiling()
        return batch

    def profile(self, config: ProfileConfig | None, worker_idx: int) -> None:
        """Profile the next batches; None ends that."""
        if self.profiling is not None:
            self.profiling.stop()
        self.profiling = None
        if config is not None and config.should_profile_worker(worker_idx):
            self.profiling = Profiling(config, worker_idx)

    def shown_root(self) -> TensorDictBase:
        """Return the root that the next batch begins with, as a batch shows it."""
        assert self.root is not None
        root = self.root.exclude(*_private(self.root))
        numbers = self.numbers.current.reshape(self.env.batch_size)
        root.set((COLLECTOR, "traj_ids"), numbers)
        return without_device(_with_own_counts(root))

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next batches depend on in plain form, see `envkit.data.plain`.

        Raises:
            ResumeError: episodes are recorded, and that of an env cannot be.
        """
        self._leave_moved()
        kind = self.env._facts.unsaved_state
        if kind and self.options.record_for_resume:
            raise ResumeError(
                f"{kind} is your own env, and does not say what it keeps of an episode, so its next steps could "
                "not be those it would have made. Give it get_extra_state and set_extra_state; "
                "where all is in the data, let the first return {} and the second do nothing."
            )
        policy = self.policy
        weights = (
            dict(policy.state_dict()) if isinstance(policy, torch.nn.Module) else tensors_of(policy)
        )
        return {
            **({WITHOUT_EPISODE: kind} if kind and self.root is not None else {}),
            "policy_state_dict": plain(weights, "the policy"),
            "generators": _generator_states(),
            "env_state_dict": dict(self.env.state_dict()),
            "root": plain(self.root, "the root"),
            "numbers": self.numbers.state_dict(),
            "counted": self.counted(),
            "draws": plain(vars(self._draws)),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue as the object that gave ``state`` would have.

        Raises:
            ResumeError: the env cannot be brought there; with ``strict=False`` it begins new episodes.
            ArgumentError: (a ValueError) its policy was of another architecture. Its weights were not loaded.
        """
        root = from_plain(state["root"])
        if root is not None and root.batch_size != self.env.batch_size:
            raise ResumeError(
                f"the state is of an env of batch size {tuple(root.batch_size)}, but this one has "
                f"{tuple(self.env.batch_size)}. Load it into one that is built as that which was saved."
            )
        if isinstance(self.policy, torch.nn.Module):
            weights = from_plain(state["policy_state_dict"])
            require_same_architecture(tensors_of(self.policy), only_tensors(weights))
            self.policy.load_state_dict(weights)
        elif isinstance(self.policy, HasParams):
            self.load_weights(from_plain(state["policy_state_dict"]))
        self.env.load_state_dict(state["env_state_dict"], strict=strict)
        self._draws = Draws(**from_plain(state.get("draws", {})))  # which older files lack
        self._seeded = self.env._action_generator
        # of a class that does not save its episode, all rows begin new ones
        self._moves = self.env._in_use.moves
        self.root = None if WITHOUT_EPISODE in state else root
        self.numbers.load_state_dict(state["numbers"])
        counted = state["counted"]
        self.frames, self.episodes = counted["frames"], counted["episodes"]
        self.seconds.update(counted["seconds"])
        _set_generators(state["generators"])

    def counted(self) -> dict[str, Any]:
        """Return frames and episodes collected, and seconds spent in "envs", "policy" and "transfer"."""
        return {"frames": self.frames, "episodes": self.episodes, "seconds": dict(self.seconds)}

    def fake_batch(self, steps: int) -> TensorDictBase:
        """Return zeros that look like a batch, and leave env, policy and generators as they are."""
        env = self.env
        step = env.fake_tensordict().exclude(*unrecorded(env, self.options.record_state))
        acted = self._acted(step.exclude("next", *env.action_keys).clone())
        step.update(acted.exclude(*step.keys(True, True)))
        dims = len(env.batch_size)
        zeros = cast(TensorDictBase, step.apply(torch.zeros_like))
        data = zeros.unsqueeze(dims).expand(*env.batch_size, steps).clone()
        data.names = [*[None] * dims, "time"]
        fresh = copy.copy(self)  # whose counts are its own
        fresh.numbers = TrajectoryNumbers(env.batch_size.numel())
        fresh.seconds = Seconds()
        return fresh._marked(data, Order(steps))

    def _acted(self, root: TensorDictBase) -> TensorDictBase:
        """Call a copy of the policy with a root; no later draw depends on that."""
        policy, generator = self.policy, self.env._action_generator
        trial = copy.deepcopy(policy) if isinstance(policy, torch.nn.Module) else policy
        before = None if generator is None else generator.get_state()
        with self._acting(), torch.random.fork_rng():
            acted = self._bind(trial)(root)
        if generator is not None and before is not None:
            generator.set_state(before)
        return acted

    # ------------------------------------------------------------------------- what is added to them

    def _completed(self, data: TensorDictBase, written: TensorDictBase) -> TensorDictBase:
        """Add what the policy writes in other batches, as zeros, to steps of random actions."""
        missing = written.exclude(*data.keys(True, True))
        zeros = missing.apply(torch.zeros_like, filter_empty=True)
        if zeros is None:
            return data
        dims = len(self.env.batch_size)
        return data.update(zeros.unsqueeze(dims).expand(*data.batch_size).clone())

    def _marked(self, data: TensorDictBase, order: Order) -> TensorDictBase:
        """Add what the collector says of a batch, take out what is private, and store it."""
        options, batch = self.options, data.batch_size
        if order.random and self._written is not None:
            data = self._completed(data, self._written)
        ended = self.env._rows_done(data.get("next")).reshape(-1, batch[-1])
        if not options.reset_when_done:
            ended = torch.zeros_like(ended)
        self.episodes += int(ended.sum())
        self.frames += batch.numel()
        if options.set_truncated:
            truncate_last(self.env, data)
        if private := _private(data):
            data = data.exclude(*private)
        device = data.device
        numbers = self.numbers.count(ended.cpu()).reshape(batch)
        data.set((COLLECTOR, "traj_ids"), numbers if device is None else numbers.to(device))
        data = _with_own_counts(data)
        if options.init_random_frames:
            is_random = order.random or self.policy is None
            data.set(RANDOM_ACTION, torch.full(batch, is_random, device=device))
        if options.track_policy_version:
            version = torch.full(batch, order.version, dtype=torch.int64, device=device)
            for key in POLICY_VERSION:
                data.set(key, version.clone())
        if options.compact_obs:
            data = data.exclude(*self._of_the_next_root)
        if options.storing_device is None:
            return without_device(data)
        with self.seconds.transferring():
            return data.to(options.storing_device)

    @property
    def _of_the_next_root(self) -> list[Key]:
        """List what is under ``next`` and again in the root that follows."""
        keys = (*self.env.observation_keys, *self.env.state_keys)
        return [as_key(("next", *as_path(key))) for key in keys]


def _private(data: TensorDictBase) -> list[Key]:
    """List what is in the data for envs and transforms alone."""
    return [key for key in data.keys(True) if as_path(key)[-1].startswith("_")]


def _with_own_counts(data: TensorDictBase) -> TensorDictBase:
    """Put counts that are beside those of the env into the node of the collector, each at its level."""
    counts = [path for path in map(as_path, data.keys(True, True)) if path[-1] == OWN_STEP_COUNT]
    if not counts:
        return data
    for path in counts:
        if path[0] != "next":
            data.set((COLLECTOR, *path[:-1], "step_count"), data.get(as_key(path)))
    return data.exclude(*map(as_key, counts))


def lengthened(data: TensorDictBase, steps: int) -> TensorDictBase:
    """Fill a batch that was ended early up with zeros, in steps of no trajectory."""
    batch, made = data.batch_size[:-1], data.batch_size[-1]
    whole = cast(TensorDictBase, data.new_zeros(torch.Size((*batch, steps))))
    whole[..., :made] = data
    whole.get((COLLECTOR, "traj_ids"))[..., made:] = -1
    return whole
