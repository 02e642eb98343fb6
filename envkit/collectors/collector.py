"""Iterables that run a policy in envs and give batches of transitions: what all of them share.

`Collector` counts, forms and delivers batches, and is the front door to its subclasses. Where envs run, and how raw
batches come from there, is theirs.

Conventions
    raw batch  what runners have collected, before it is split, cut into episodes or post-processed.
    frames     valid transitions that were delivered; ``iter``: batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, Unpack

from tensordict import TensorDictBase
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from envkit.batched.attributes import attribute_of, call_attribute, set_attribute
from envkit.batched.settings import RayOptions
from envkit.collectors.attribute_paths import executed, followed, paired
from envkit.collectors.delivery import Delivery
from envkit.collectors.profiling import ProfileConfig
from envkit.collectors.runner import COLLECTOR, Batch
from envkit.collectors.settings import (
    CollectorSettings,
    WorkerOptions,
    kind_for,
    parsed_options,
)
from envkit.collectors.threads import Background, asked_for, in_turn, require_open, require_own
from envkit.collectors.trajectories import EpisodeStore, ProgressBar
from envkit.data.arguments import require_callable, require_state_dict
from envkit.data.keywords import ShownSignature
from envkit.data.plain import from_plain, plain
from envkit.env.base import EnvBase
from envkit.env.own_state import loading
from envkit.env.policy import BindsToEnv, PolicyLike
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchCountError,
    MissingKeyError,
    NoBufferError,
    NotStartedError,
    OptionError,
    ReadOnlyError,
    UnsupportedError,
)
from envkit.process_wide import warn
from envkit.specs.annotations import EnvData

MakeEnv = Callable[..., EnvBase] | EnvBase | Sequence[Callable[..., EnvBase]]
Backend = Literal["direct", "process", "ray"]

_EPISODE_STEPS = 32
"""Steps of each row between two looks for whole episodes."""


def _require_order(create_env_fn: Any, policy: Any) -> None:
    """Check that env and policy were not exchanged.

    Raises:
        ArgumentTypeError: (a TypeError) the policy is an env, or a policy is to make envs.
    """
    makers = create_env_fn if isinstance(create_env_fn, list | tuple) else [create_env_fn]
    if isinstance(policy, EnvBase):
        raise ArgumentTypeError(
            f"policy is a {type(policy).__name__}, which is an env. Pass the env first: Collector(env, policy, ...)."
        )
    for make in makers:
        is_env = hasattr(make, "reset") and hasattr(make, "step")  # one of another library, too
        if isinstance(make, nn.Module | BindsToEnv) and not is_env:
            raise ArgumentTypeError(
                f"create_env_fn is of type {type(make).__name__}, which is a policy, but must be an env or make one. Pass "
                "the env first: Collector(env, policy, ...)."
            )


class ShownSetting:
    """An attribute of collectors that returns one of their settings, and cannot be assigned.

    Args:
        setting: its name; the attribute's own by default.
    """

    def __init__(self, setting: str | None = None):
        self._setting = setting

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, collector: Any, owner: type | None = None) -> Any:
        return (
            self if collector is None else getattr(collector._settings, self._setting or self._name)
        )

    def __set__(self, collector: Any, value: Any) -> None:
        raise ReadOnlyError(
            f"{self._name} of a {type(collector).__name__} was set to {value!r}, but it is read when the collector is "
            f"built. Build a new one: {type(collector).__name__}(..., {self._name}=...)."
        )


class Collector(IterableDataset):
    """Collect batches of transitions with a policy; `Collector` itself gives the subclass that fits.

    One of ``frames_per_batch`` and ``trajs_per_batch`` is passed. Those from ``num_workers`` on, with ``backend_options``
    and ``num_collectors``, are for collectors with workers.

    Args:
        create_env_fn: what makes the env, or an env; with workers, a list of one for each, or one with
            ``num_collectors``.
        policy: a function or module, called as ``policy(observation)``, which returns the action. One whose argument is
            named ``td`` or ``tensordict``, or is annotated as a TensorDict, is called as ``policy(td)``. None takes random
            actions. One that compiles (`JaxPolicy`, `compile_policy`) makes a batch of a stateless env one program.
        backend: "direct" collects in this process (`SyncDataCollector`), "process" in workers, and "ray" in
            workers that are actors of a Ray cluster.
        backend_options: see `envkit.batched.settings.RayOptions`; the other backends have none.
        num_collectors: number of workers; without a backend they are processes.
        sync: with workers, a batch has a part of each (`MultiSyncDataCollector`); False takes what is ready
            (`MultiaSyncDataCollector`).
        frames_per_batch: transitions in a batch, over all envs; with a batch of B envs, each makes
            ``ceil(frames_per_batch / B)`` steps, with a warning where that is more. With workers also a list of one
            number for each: of what the worker makes of a batch, or asynchronously of its batches.
        trajs_per_batch: whole episodes in a batch instead, in the order in which they end. Frames of
            unfinished ones wait; none is lost or used twice. ``frames_per_batch`` then is how many transitions are made
            at once; without it, 32 of each env.
        trajs_per_write: with ``trajs_per_batch`` and a ``replay_buffer``, how many episodes one call of ``extend`` puts in;
            None: all that were delivered together.
        traj_format: "padded", the default, gives episodes a row each, with a mask beside ``traj_ids``; "cat" one after the other. Into a
            ``replay_buffer`` they always go one after the other.
        total_frames: frames after which the collector is at its end; None or -1, the default, sets no end. The last batch is whole: a
            number that is no multiple of ``frames_per_batch`` collects some more, with a warning.
        device: stands in for each of the next three that is not given.
        storing_device: where batches are delivered; None leaves them where they are, in memory of the CPU where they come
            from workers, and their device unset.
        env_device: where the env is; its own by default.
        policy_device: where the policy acts, a copy if it is elsewhere.
        create_env_kwargs: keywords for ``create_env_fn``; with workers, a dict for all or a list of one each.
        max_frames_per_traj: steps after which an episode is truncated (`StepCounter`); None, 0 and -1 set no limit.
        init_random_frames: actions are random until so many frames were collected, in whole batches; with
            ``trajs_per_batch``, in what is made at once. Other entries that the policy writes are zero there;
            to learn their shapes, it is called once with the first root. All batches have ``("collector", "random_action")``, bool: which
            actions were drawn.
        reset_at_each_iter: reset all envs before each batch.
        postproc: callable from batch to batch, a transform for instance; called last. It is moved to ``storing_device`` if it
            has ``to``.
        split_trajs: pass each batch through `split_trajectories`.
        exploration_type: how the policy acts; the default is `ExplorationType.RANDOM`.
        reset_when_done: begin a new episode where one has ended, within the batch; the default is True.
        set_truncated: mark the last step of every batch ``truncated`` and ``done``.
        use_buffers: let batches of workers cross in shared memory; None does where their entries have fixed sizes.
        replay_buffer: what batches are put into, by ``extend``; the iterator then yields None.
        replay_buffer_chunk: True, the default, puts whole batches in; False adds every step as it comes.
        extend_buffer: TorchRL's name for ``replay_buffer_chunk``.
        trust_policy: call the policy with the TensorDict whatever its signature, and do not try it out.
        compile_policy: `torch.compile` the policy; True, or its keywords.
        cudagraph_policy: capture the policy as a CUDA graph; True, or keywords of ``CudaGraphModule``.
        policy_factory: makes the policy where it acts, instead of ``policy``; with workers, one for all or a
            list of one each.
        prefetch: 1 makes the next batch while the caller trains on this one, with weights one update older.
        track_policy_version: record the version of the policy that acted, ``"policy_version"`` and
            ``("next", "policy_version")``, int64 of the batch size. A new `PolicyVersion` does so too, and counts with it.
        track_traj_ids: False leaves ``("collector", "traj_ids")`` out of batches; the default is True.
        compact_obs: leave observations and states out of ``next``, which the next root has too; what follows the last
            step of a trajectory is lost then.
        return_contiguous: copy batches that lie time first in memory, as those that a stateless env makes in one program do,
            so that ``batch.view(-1)`` works. All others are contiguous anyway.
        auto_register_policy_transforms: append to the env what a policy with recurrent modules needs, where the env does
            not show it; None does so too, False never.
        seed: seed envs and torch's generators, here and in workers, as `Collector.set_seed` does, before anything is
            collected: the same seed gives the same data.
        progress: show a bar with frames per second, mean return and length of the episodes that ended.
        record_state: keep the state of a stateless env at every step.
        record_for_resume: have envs on simulators write down their episodes, so that `state_dict` can say where they are;
            see `EnvBase.record_for_resume` for what that costs.
        pre_collect_hook: called before each batch is asked for.
        post_collect_hook: called with each batch before it is delivered.
        interruptor: for collectors in this process: has ``collection_stopped()``, which is asked after each step; True ends
            the batch there. Steps that were not made are zero, with number -1 and ``("collector", "mask")`` False.
        worker_idx: number that `Collector.worker_idx` gives, for who runs collectors in their own workers.
        weight_sync_schemes: without effect, as ``{"policy": scheme}`` of TorchRL: weights of the policy travel through
            shared memory whenever ``update_policy_weights_`` is called.
        return_same_td, no_cuda_sync: without effect: batches are always new, and the collector does not synchronise
            devices itself. Programs for TorchRL pass them.
        num_workers: repeats one ``create_env_fn`` so many times.
        update_at_each_batch: call `update_policy_weights_` before (sync) or after (async) each batch.
        preemptive_threshold: share of the workers, in [0, 1]: when so many have finished, the others stop where
            they are.
        num_threads: torch threads of this process while the workers run, for policies too; None leaves them alone.
        num_sub_threads: torch threads of each worker; the default is 1.
        cat_results: how batches of workers are joined. "stack" puts an axis of workers in front, an int
            concatenates along that axis, -1 along time. None is "stack", -1 where workers make different numbers of
            steps, and with a ``replay_buffer`` it and "stack" are 0: a buffer holds transitions, not workers. Batches of `MultiaSyncDataCollector` come from one worker each.
        on_worker_failure: "raise", the default, or "restart": a lost worker is replaced by one with the newest weights, its
            unfinished episodes end with ``truncated``.
        max_restarts: with "restart", how many there may be before the error is raised after all; the default is 10.
        timeout: seconds a batch may take; the default is 60, and None sets no limit.
        start_timeout: seconds that building env and policy may take; the default is 60, and None sets no limit.
        init_fn: called in each worker before it builds its env and policy, e.g. to start a simulator's application.

    Most keywords can be read as attributes: ``collector.init_random_frames``. Where None and -1 set no limit, it is 0.

    Raises:
        OptionError: (a TypeError) a keyword is unknown, does not apply to this kind, or excludes another.
        ArgumentError: (a ValueError) a number is out of range.
        PolicyError: (a TypeError) the policy is not callable, or writes no action.
        ReadOnlyError: (an AttributeError) a keyword was assigned to the collector.

    Example:
        >>> from envkit import Collector, GymEnv
        >>> env = GymEnv("CartPole-v1")
        >>> collector = Collector(env, None, frames_per_batch=20, total_frames=40)
        >>> [batch.numel() for batch in collector]
        [20, 20]
        >>> collector.shutdown()
    """

    _kind: str
    _trained: Any
    __signature__ = ShownSignature()

    trajs_per_batch = ShownSetting()
    trajs_per_write = ShownSetting()
    traj_format = ShownSetting()
    device = ShownSetting()
    storing_device = ShownSetting()
    env_device = ShownSetting()
    policy_device = ShownSetting()
    create_env_kwargs = ShownSetting()
    max_frames_per_traj = ShownSetting()
    init_random_frames = ShownSetting()
    reset_at_each_iter = ShownSetting()
    postproc = ShownSetting()
    split_trajs = ShownSetting()
    exploration_type = ShownSetting()
    reset_when_done = ShownSetting()
    set_truncated = ShownSetting()
    replay_buffer = ShownSetting()
    replay_buffer_chunk = ShownSetting()
    extend_buffer = ShownSetting("replay_buffer_chunk")
    trust_policy = ShownSetting()
    policy_factory = ShownSetting()
    policy_version_tracker = ShownSetting()
    track_traj_ids = ShownSetting()
    compact_obs = ShownSetting()
    interruptor = ShownSetting()

    def __new__(
        cls, *args: object, backend: str | None = None, sync: bool = True, **options: object
    ) -> Self:
        """Build an object of the class that collects as it is asked to; ``__init__`` checks what is passed."""
        if hasattr(cls, "_kind"):
            return super().__new__(cls)
        has_workers = options.get("num_collectors") is not None
        return super().__new__(kind_for(backend, sync, cls, has_workers=has_workers))

    def __init__(
        self,
        create_env_fn: MakeEnv,
        policy: PolicyLike = None,
        *,
        backend: Backend | None = None,
        num_collectors: int | None = None,
        sync: bool = True,
        backend_options: RayOptions | None = None,
        **options: Unpack[WorkerOptions],
    ):
        raise NotImplementedError(f"{type(self).__name__} does not say how it collects.")

    def __repr__(self) -> str:
        if "_delivery" not in vars(self):  # its arguments were refused
            return super().__repr__()
        place = {name: vars(self)[name] for name in ("env", "num_workers") if name in vars(self)}
        asked = ("frames_per_batch", "trajs_per_batch", "total_frames")
        told = place | {name: getattr(self._settings, name) for name in asked}
        facts = [f"{name}={value!r}" for name, value in told.items() if value is not None]
        state = "shut down" if self._is_shut_down else f"frames={self.frames}"
        return f"{type(self).__name__}({', '.join([*facts, state])})"

    def _take(
        self, create_env_fn: Any, policy: PolicyLike, table: type, options: Mapping[str, Any]
    ) -> CollectorSettings:
        """Check all options, store those that every kind has, and return all of them."""
        _require_order(create_env_fn, policy)
        self._settings = settings = parsed_options(type(self), table, policy, options)
        self.frames = self.iter = 0
        self._counted_version = 0
        self._begun_frames = 0
        self._pending: Callable[[], Batch] | None = None
        self._received: list[Batch] = []
        self._delivery = Delivery(settings)
        self._pre_collect_hook = settings.pre_collect_hook
        self._episodes: EpisodeStore | None = None
        self._bar: ProgressBar | None = None
        self._is_shut_down = False
        self._user: int | None = None
        self._background: Background | None = None
        self._profiled: ProfileConfig | None = None
        self.worker_idx: int | None = settings.worker_idx
        return settings

    def _prepare(self, workers: int = 1) -> None:
        """Build what keeps and shows episodes, now that nothing can be refused any more."""
        if self._settings.trajs_per_batch is not None:
            self._episodes = EpisodeStore(workers)
        if self._settings.progress:
            self._bar = ProgressBar(self._settings.total_frames, workers)

    # ------------------------------------------------------------------------- what subclasses say

    def _begin_batch(self, *, random: bool) -> Callable[[], Batch]:
        """Begin a raw batch, and give what waits for it; after an error that is called again."""
        raise NotImplementedError

    @property
    def _frames_each(self) -> int:
        """Frames of a raw batch."""
        raise NotImplementedError

    def _end(self, *, close_env: bool | None = None) -> None:
        """Close envs, end workers; called once."""
        raise NotImplementedError

    def update_policy_weights_(
        self,
        policy_or_weights: object = None,
        *,
        weights: object = None,
        policy: object = None,
        policy_weights: object = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, object] | None = None,
    ) -> None:
        """Load new weights into the policy, which acts with them from the next batch on.

        Args:
            policy_or_weights: a TensorDict or a mapping of them by name, as ``state_dict()`` gives, or a module. For a
                `JaxPolicy` pass another one, or params. None takes those of the policy that was passed, which a
                trainer has changed in place.
            weights, policy, policy_weights: other names of the same; one is given.
            model_id: whose weights they are: "policy".
            weights_dict: the same as ``{"policy": weights}``, without ``model_id``.

        Raises:
            ArgumentError: (a ValueError) they are of another architecture, or given twice.
            MissingKeyError: (a KeyError) they are of another model than the policy.

        Example:
            >>> import torch
            >>> from envkit import Collector, GymEnv
            >>> policy, trained = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
            >>> collector = Collector(GymEnv("Pendulum-v1"), policy, frames_per_batch=8)
            >>> collector.update_policy_weights_(trained.state_dict())
            >>> bool((policy.weight == trained.weight).all()), collector.policy_version
            (True, 1)
            >>> collector.shutdown()
        """
        named = dict(weights_dict or {})
        if unknown := sorted({*named, model_id} - {None, "policy"}):
            raise MissingKeyError(
                f"there are weights for {unknown}, but a collector updates 'policy' alone. Write the others where their "
                "model is, e.g. with call() in the envs of workers."
            )
        if weights_dict is not None and model_id is not None:
            raise ArgumentError(
                f"model_id is {model_id!r}, and weights_dict names {sorted(named)}. Pass one of them."
            )
        candidates = [policy_or_weights, weights, policy, policy_weights, *named.values()]
        passed = [one for one in candidates if one is not None]
        if len(passed) > 1:
            raise ArgumentError(
                f"{len(passed)} sets of weights were given: policy_or_weights, weights, policy, policy_weights and "
                "weights_dict are names of one argument. Pass one of them."
            )
        self._update_weights(passed[0] if passed else None)

    def _update_weights(self, source: Any) -> None:
        """Load weights into the policy from ``source``; None: what was passed as policy, as it is now."""
        raise NotImplementedError

    @property
    def requested_frames_per_batch(self) -> int | None:
        """Transitions in a batch, as they were asked for; the sum where each worker has its own number, None where
        batches are of whole episodes alone."""
        frames = self._settings.frames_per_batch
        return sum(frames) if isinstance(frames, list) else frames

    @property
    def frames_per_batch(self) -> int:
        """Transitions that a batch has, over all envs; more than were asked for where envs step side by side, and the
        most where batches come from workers that make different numbers."""
        return self._frames_each

    @property
    def total_frames(self) -> int:
        """Transitions after which the collector is at its end; -1 where there is no end."""
        return -1 if self._settings.total_frames is None else self._settings.total_frames

    def frames_per_batch_worker(self, worker_idx: int | None = None) -> int:
        """Return how many transitions of a batch one worker makes.

        Args:
            worker_idx: of the worker; None where all make as many.

        Raises:
            ArgumentError: (a ValueError) there is no such worker, or none was named and they make different numbers.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> collector.frames_per_batch_worker()
            8
            >>> collector.shutdown()
        """
        return self._frames_each

    def __len__(self) -> int:
        """Number of batches until ``total_frames``, those that were delivered included.

        Raises:
            BatchCountError: (a RuntimeError) there is no end, or batches of whole episodes differ in length.
        """
        total = self._settings.total_frames
        if total is None or self._settings.trajs_per_batch is not None:
            why = "no total_frames" if total is None else "batches of whole episodes"
            raise BatchCountError(
                f"this {type(self).__name__} has {why}, so it is not known how many batches there will be. Pass "
                "frames_per_batch= and total_frames=, or iterate over it."
            )
        return math.ceil(total / self._frames_each)

    def __bool__(self) -> bool:
        return True  # whatever its length

    @property
    def pre_collect_hook(self) -> Callable[[], Any] | None:
        """Function that is called before each batch is asked for; can be assigned, None takes it away."""
        return self._pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Callable[[], Any] | None) -> None:
        require_callable("pre_collect_hook", hook, is_optional=True)
        self._pre_collect_hook = hook

    @property
    def post_collect_hook(self) -> Callable[[Any], Any] | None:
        """Function that is called with each batch before it is delivered; can be assigned, None takes it away."""
        return self._delivery.post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        require_callable("post_collect_hook", hook, is_optional=True)
        self._delivery.post_collect_hook = hook

    def set_post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        """Assign `post_collect_hook`, where an assignment cannot be written, e.g. through a handle of Ray.

        Args:
            hook: called with each batch before it is delivered; None calls none.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> collector.set_post_collect_hook(lambda batch: print(batch.numel()))
            >>> batch = collector.next()
            8
            >>> collector.shutdown()
        """
        self.post_collect_hook = hook

    def increment_version(self) -> None:
        """Count one more version of the policy, without new weights."""
        if self.policy_version_tracker is None:
            self._counted_version += 1
        else:
            self.policy_version_tracker.increment_version()

    @property
    def policy_version(self) -> int:
        """Number of updates of the policy: that of the `PolicyVersion` that was passed, if one was."""
        tracker = self.policy_version_tracker
        return self._counted_version if tracker is None else tracker.version

    def get_policy_version(self) -> int:
        """Return ``policy_version``, where an attribute cannot be read, e.g. through a handle of Ray."""
        return self.policy_version

    @property
    def _amounts(self) -> dict[str, int | float | bool]:
        """Return what `stats` of every kind says."""
        asked = self.requested_frames_per_batch
        amounts: dict[str, int | float | bool] = {"batches": self.iter}
        amounts["policy_version"] = self.policy_version
        if asked is not None:
            amounts["requested_frames_per_batch"] = asked
        if self._settings.total_frames is not None:
            amounts |= {"total_frames": self.total_frames, "completed": self.is_finished}
        return amounts

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """Seed all envs of all workers, one chain; gives the seed after the last.

        Args:
            seed: of the first env; the others follow from it.
            static_seed: give all of them this seed.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> following = collector.set_seed(0)
            >>> first = collector.next()["observation"]
            >>> following = collector.set_seed(0)
            >>> bool((collector.next()["observation"] == first).all())
            True
            >>> collector.shutdown()
        """
        raise NotImplementedError

    def stats(self) -> dict[str, int | float | bool]:
        """Return what was collected and where time went, as a flat dict of numbers.

        Returns:
            ``frames``, ``batches``, ``episodes``, ``policy_version``; ``requested_frames_per_batch``, and with an end
            ``total_frames`` and ``completed``, where they were asked for; seconds spent as ``seconds/envs``,
            ``seconds/policy`` and ``seconds/transfer`` (to ``storing_device``). A program that makes a whole batch counts
            as "envs".

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> batch = collector.next()
            >>> found = collector.stats()
            >>> found["frames"], found["batches"]
            (8, 1)
            >>> collector.shutdown()
        """
        raise NotImplementedError

    # ----------------------------------------------------------------------- envs, policies, buffers

    def get_attr(self, name: str, indices: int | Iterable[int] | None = None) -> list[Any]:
        """Return an attribute of envs, of their wrappers or of their simulators, between two batches.

        Args:
            name: of the attribute.
            indices: numbers of single envs, over all workers; None: all of them. A batched env has one for each of
                its sub-envs, any other env is one.

        Returns:
            One value for each, in their order. From workers values are copies.

        Raises:
            AttributeError: an env has none of this name.

        Example:
            >>> from envkit import Collector, GymEnv, SerialEnv
            >>> env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
            >>> collector = Collector(env, frames_per_batch=8)
            >>> collector.set_attr("gravity", 5.0, indices=[1])
            >>> collector.get_attr("gravity")
            [9.8, 5.0]
            >>> collector.shutdown()
        """
        return self._ask_envs(partial(attribute_of, name), indices)

    def set_attr(
        self, name: str, value: object, indices: int | Iterable[int] | None = None
    ) -> None:
        """Set an attribute of envs, where it is: in the env, a wrapper, or the simulator.

        It holds from the next batch that is begun. A new name is set on the simulator.

        Args:
            name: of the attribute.
            value: its new value.
            indices: numbers of single envs, as for `get_attr`; None: all of them.

        Raises:
            AttributeError: an env has several rows in one object, which has none of this name.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> collector.set_attr("gravity", 1.6)
            >>> collector.get_attr("gravity")
            [1.6]
            >>> collector.shutdown()
        """
        self._ask_envs(partial(set_attribute, name, value), indices)

    def call(
        self,
        name: str,
        *args: object,
        indices: int | Iterable[int] | None = None,
        **kwargs: object,
    ) -> list[Any]:
        """Call a method of envs, of their wrappers or of their simulators, between two batches.

        An attribute that cannot be called is given as it is.

        Args:
            name: of the method.
            *args: of the call.
            **kwargs: its keywords.
            indices: numbers of single envs, as for `get_attr`; None: all of them.

        Returns:
            The results of the calls, in order.

        Example:
            >>> from envkit import Collector, GymEnv, SerialEnv
            >>> env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
            >>> collector = Collector(env, frames_per_batch=8)
            >>> collector.call("has_wrapper_attr", "gravity")
            [True, True]
            >>> collector.shutdown()
        """
        return self._ask_envs(partial(call_attribute, name, args, kwargs), indices)

    def _ask_envs(
        self, ask: Callable[[Any], Any], indices: int | Iterable[int] | None
    ) -> list[Any]:
        """Call ``ask`` with each single env, and give what it returned."""
        raise NotImplementedError

    def fake_tensordict(self) -> EnvData:
        """Return zeros that look like a batch: for the storage of a buffer, or to compile what trains.

        No env is stepped. Steps that `set_truncated` marks are marked, and ``split_trajs`` and ``postproc`` are
        applied.

        Returns:
            Data with the entries, shapes and dtypes of a batch, batch size ``(*env_batch, steps)``.

        Raises:
            UnsupportedError: (a NotImplementedError) the envs are in workers.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(lambda: GymEnv("Pendulum-v1"), frames_per_batch=8)
            >>> collector.fake_tensordict()["observation"].shape
            torch.Size([8, 3])
            >>> collector.shutdown()
        """
        raise UnsupportedError(
            f"the envs of {type(self).__name__} are in workers, so there is none here to look like. Ask a "
            "SyncDataCollector of one env, or take a first batch."
        )

    def getattr_env(self, attr: str) -> object:
        """Return an attribute of the env; with workers, of that of the first one.

        Args:
            attr: its name.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> collector.getattr_env("batch_size")
            torch.Size([])
            >>> collector.shutdown()
        """
        return self._asked_of_first("env", attr)

    def getattr_policy(self, attr: str) -> object:
        """Return an attribute of the policy that acts; with workers, of that of the first one.

        Args:
            attr: its name.

        Example:
            >>> import torch
            >>> from envkit import Collector, GymEnv
            >>> policy = torch.nn.Linear(3, 1)
            >>> collector = Collector(GymEnv("Pendulum-v1"), policy, frames_per_batch=8)
            >>> collector.getattr_policy("out_features")
            1
            >>> collector.shutdown()
        """
        return self._asked_of_first("policy", attr)

    def getattr_rb(self, attr: str) -> object:
        """Return an attribute of the replay buffer.

        Args:
            attr: its name.

        Example:
            >>> from collections import deque
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(
            ...     GymEnv("CartPole-v1"), frames_per_batch=8, replay_buffer=deque(maxlen=100)
            ... )
            >>> collector.getattr_rb("maxlen")
            100
            >>> collector.shutdown()
        """
        return getattr(self._settings.replay_buffer, attr)

    def _asked_of_first(self, part: str, attr: str) -> Any:
        """Return an attribute of "env" or "policy"."""
        raise NotImplementedError

    def get_model(self, model_id: str) -> object:
        """Return "policy", the policy that was passed or made here, or what a path of attributes leads to.

        Args:
            model_id: "policy", or a path of attributes of the collector.

        Raises:
            ArgumentError: (a ValueError) there is no policy here.

        Example:
            >>> import torch
            >>> from envkit import Collector, GymEnv
            >>> policy = torch.nn.Linear(3, 1)
            >>> collector = Collector(GymEnv("Pendulum-v1"), policy, frames_per_batch=8)
            >>> collector.get_model("env").batch_size
            torch.Size([])
            >>> collector.shutdown()
        """
        if model_id != "policy":
            return followed(self, model_id)
        model = getattr(self, "policy", None)
        model = self._trained if model is None else model
        if model is None:
            raise ArgumentError(
                "there is no policy here: actions are random, or the workers have made their policies themselves. Pass "
                "policy=."
            )
        return model

    def cascade_execute(self, attr_path: str, *args: object, **kwargs: object) -> object:
        """Call what a path of attributes and items leads to; what cannot be called is given as it is.

        Args:
            attr_path: names with dots between them, and items as ``[0]`` or ``['name']``.
            *args: of the call.
            **kwargs: its keywords.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> collector.cascade_execute("env.fake_tensordict")["observation"]
            tensor([0., 0., 0., 0.])
            >>> collector.shutdown()
        """
        return executed(self, attr_path, args, kwargs)

    def get_distant_attr(self, attr: str) -> object:
        """Return what a path of attributes and items of the collector leads to; with workers, a list of one for each.

        A worker has ``env``, ``policy``, ``worker_idx``, ``frames`` and ``episodes``.

        Args:
            attr: names with dots between them, and items as ``[0]`` or ``['name']``.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> collector.get_distant_attr("env.batch_size")
            torch.Size([])
            >>> collector.shutdown()
        """
        return followed(self, attr)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[object]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, object]] | None = None,
    ) -> list[Any]:
        """Call a method, named by a path, once with each of the arguments; with workers, once in each of them.

        Args:
            method_name: path to it; see `get_distant_attr` for what a worker has.
            list_of_args: positional arguments of each call.
            list_of_kwargs: keywords of each call.

        Raises:
            ArgumentError: (a ValueError) there are other numbers of them.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> collector.map_fn("env.set_seed", [[0], [1]]) == [
            ...     collector.env.set_seed(0),
            ...     collector.env.set_seed(1),
            ... ]
            True
            >>> collector.shutdown()
        """
        calls = paired(list_of_args, list_of_kwargs, None)
        return [executed(self, method_name, args, kwargs, must=True) for args, kwargs in calls]

    def enable_profile(
        self,
        *,
        workers: list[int] | None = None,
        num_rollouts: int = 3,
        warmup_rollouts: int = 1,
        save_path: str | Path | None = None,
        activities: list[str] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = False,
        with_stack: bool = True,
        with_flops: bool = False,
        on_trace_ready: Callable[[Any], object] | None = None,
    ) -> None:
        """Profile the next batches with torch's profiler, where they are made; see `ProfileConfig` for the arguments.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> collector.enable_profile(num_rollouts=2, save_path="{worker_idx}.json")
            >>> for _ in range(2):
            ...     batch = collector.next()
            >>> Path("0.json").exists()
            True
            >>> collector.shutdown()
        """
        self._profiled = ProfileConfig(
            workers=[0] if workers is None else workers,
            num_rollouts=num_rollouts,
            warmup_rollouts=warmup_rollouts,
            save_path=save_path,
            activities=["cpu", "cuda"] if activities is None else activities,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            on_trace_ready=on_trace_ready,
        )
        self._profile(self._profiled)

    def disable_profile(self) -> None:
        """End profiling; nothing happens where it was not enabled."""
        if self._profiled is not None:
            self._profiled = None
            self._profile(None)

    @property
    def profile_config(self) -> ProfileConfig | None:
        """Settings of the profiler; None where it is off."""
        return self._profiled

    def _profile(self, config: ProfileConfig | None) -> None:
        """Profile the runners that make batches."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------- in the background

    def start(self) -> None:
        """Collect in its own thread from now on, into the replay buffer, until `async_shutdown`.

        An error there is raised by the next call of `pause`, `start`, `async_shutdown` or `shutdown`. Calls that take a
        turn (`state_dict`, `set_seed`, `reset`, `update_policy_weights_`, `set_attr`) wait for the batch under way.

        Raises:
            NoBufferError: (a RuntimeError) there is no replay buffer.

        Example:
            >>> from collections import deque
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(
            ...     GymEnv("CartPole-v1"),
            ...     frames_per_batch=8,
            ...     replay_buffer=deque(maxlen=100),
            ... )
            >>> collector.start()
            >>> collector.is_running()
            True
            >>> collector.async_shutdown()
        """
        require_open(self)
        if self._settings.replay_buffer is None:
            raise NoBufferError(
                "start() collects into a replay buffer, but this collector has none. Pass replay_buffer=."
            )
        if self._background is not None:
            self._background.raise_error()
        if not self.is_running():
            self._background = Background(self._collect_one, f"{type(self).__name__}.start")
            self._background.begin()

    def _collect_one(self) -> bool:
        self.next()
        return not self.is_finished

    def is_running(self) -> bool:
        """Check whether a thread that `start` has begun collects, paused or not.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> collector.is_running()
            False
            >>> collector.shutdown()
        """
        return self._background is not None and self._background.is_alive

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Hold the collection that `start` has begun between two batches, for a ``with`` block.

        Raises:
            NotStartedError: (a RuntimeError) nothing runs.

        Example:
            >>> from collections import deque
            >>> from envkit import Collector, GymEnv
            >>> steps = deque(maxlen=100)
            >>> collector = Collector(
            ...     GymEnv("CartPole-v1"), frames_per_batch=8, replay_buffer=steps
            ... )
            >>> collector.start()
            >>> with collector.pause():
            ...     before = len(steps)
            ...     len(steps) == before
            True
            >>> collector.async_shutdown()
        """
        background = self._background
        if background is not None:
            background.raise_error()
        if background is None or not background.is_alive:
            raise NotStartedError(
                f"this {type(self).__name__} does not collect in the background, so it cannot be paused. Call start() first."
            )
        with background.held():
            yield

    def async_shutdown(self, timeout: float | None = None, close_env: bool | None = None) -> None:
        """End what `start` has begun, then `shutdown`; see there.

        Args:
            timeout: seconds to wait for the batch under way; None waits for it.
            close_env: see `shutdown`.

        Raises:
            BusyError: (a RuntimeError) the batch under way is not done after ``timeout`` seconds.
        """
        self.shutdown(timeout=timeout, close_env=close_env)

    # ------------------------------------------------------------------------------------- batches

    def iterator(self) -> Iterator[EnvData]:
        """Return an iterator over the batches, as ``iter(collector)`` does.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> env = GymEnv("CartPole-v1")
            >>> collector = Collector(env, frames_per_batch=8, total_frames=16)
            >>> [batch.numel() for batch in collector.iterator()]
            [8, 8]
            >>> collector.shutdown()
        """
        return iter(self)

    @in_turn
    def rollout(self) -> EnvData:
        """Collect a batch that is not counted, nor post-processed or put anywhere.

        Returns:
            Transitions as they were collected, ``frames_per_batch`` of them. The next batch goes on where they end.

        Raises:
            OptionError: (a TypeError) batches are of whole episodes, of which it would take steps away.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> collector.rollout().batch_size, collector.frames
            (torch.Size([8]), 0)
            >>> collector.shutdown()
        """
        if self._episodes is not None:
            raise OptionError(
                "rollout() would take steps out of the episodes that trajs_per_batch puts together. Use next()."
            )
        self._settle()
        raw = self._begin_batch(random=False)()
        return raw.data

    def __iter__(self) -> Iterator[EnvData]:
        loading_worker = get_worker_info()
        if loading_worker is not None:
            raise UnsupportedError(
                f"num_workers of a DataLoader is {loading_worker.num_workers}, so that copies of this {type(self).__name__} "
                "would collect the same batches. Pass num_workers=0 there; Collector(..., num_workers=n) collects in workers."
            )
        while not self.is_finished:
            yield self.next()  # type: ignore[misc]  # and no call in between: Ctrl-C would lose it

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._is_shut_down

    @property
    def is_finished(self) -> bool:
        """Whether ``total_frames`` were delivered."""
        total = self._settings.total_frames
        return total is not None and self.frames >= total

    def next(self) -> EnvData | None:
        """Return the next batch; None at the end, and where batches go into a replay buffer.

        What a hook, ``postproc`` or the buffer raises loses nothing: the next call delivers the same batch.

        Raises:
            BusyError: another thread uses this collector.
            ClosedEnvError: it was shut down.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> batch = collector.next()
            >>> batch.batch_size, collector.frames
            (torch.Size([8]), 8)
            >>> collector.shutdown()
        """
        background = self._background
        if background is not None and background.is_alive:
            require_own(background, self)
        me = asked_for(self)
        before, self._user = self._user, me
        try:
            if self.is_finished:
                return None
            if self._pre_collect_hook is not None:
                self._pre_collect_hook()
            delivery = self._delivery
            if delivery.raw is None:
                delivery.raw = self._gathered()
            frames = self.frames + _valid_frames(delivery.raw)
            batch: Any = delivery.deliver()
            done = self.iter + 1
            self.frames, self.iter, delivery.raw, delivery.formed = frames, done, None, None
            return batch  # with no call since it is counted: Ctrl-C cannot come in between
        except Exception as error:
            require_open(self, error)
            raise
        finally:
            self._user = before

    def _gathered(self) -> TensorDictBase:
        """Return a raw batch, or whole episodes."""
        store, wanted = self._episodes, self._settings.trajs_per_batch
        if store is None or wanted is None:
            data = self._next_raw().data
            del self._received[0]
            return data
        while len(store) < wanted:
            raw = self._next_raw()
            store.add(raw.data, raw.following)
            del self._received[0]
        return store.take(wanted, self._settings.traj_format)

    def _next_raw(self) -> Batch:
        """Return a raw batch, which who asks takes out of ``_received`` when it is kept: Ctrl-C may come at any moment."""
        if not self._received:
            if self._pending is None:
                self._begin_next()
            self._receive_pending()
        raw = self._received[0]
        self._go_on()
        self._show(raw)
        return raw

    def _show(self, raw: Batch) -> None:
        if self._bar is not None:
            self._bar.add(raw.data, raw.following, _valid_frames(raw.data))

    def _receive_pending(self) -> None:
        if self._pending is not None:
            self._received, self._pending = [*self._received, self._pending()], None

    def _go_on(self) -> None:
        """Begin what is made while the caller has a batch."""
        if self._settings.prefetch and self._wants_more and self._pending is None:
            self._begin_next()

    def _begin_next(self) -> None:
        random = self._begun_frames < self._settings.init_random_frames
        frames = self._begun_frames + self._frames_each
        pending = self._begin_batch(random=random)
        self._pending, self._begun_frames = pending, frames  # together, or Ctrl-C counts it twice

    def _settle(self) -> None:
        """Receive the batch under way, so that it is delivered before whatever is changed now."""
        self._receive_pending()
        while self._episodes is not None and self._received:
            raw = self._received[0]
            self._show(raw)
            self._episodes.add(raw.data, raw.following)
            del self._received[0]

    @property
    def _wants_more(self) -> bool:
        total = self._settings.total_frames
        return total is None or self._begun_frames < total

    # ---------------------------------------------------------------------------------------- resume

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """Return all that the batches to come depend on, as tensors, numbers, strings, lists and dicts.

        A batch under way is received first, and is part of it. Of the generators there are torch's, here and in the
        workers, and those of the envs. Of episodes of simulators it holds those that ``record_for_resume=True`` records.

        Raises:
            ResumeError: it is set, and the episode of an env cannot be restored exactly.

        Example:
            >>> from envkit import Collector, PendulumEnv
            >>> collector = Collector(PendulumEnv(), frames_per_batch=8)
            >>> batch, state = collector.next(), collector.state_dict()
            >>> state["frames"]
            8
            >>> collector.shutdown()
        """
        self._settle()
        return {
            **self._runner_states(),
            "frames": self.frames,
            "iter": self.iter,
            "begun_frames": self._begun_frames,
            "policy_version": self.policy_version,
            "received": [
                {"data": plain(raw.data), "following": raw.following.clone()}
                for raw in self._received
            ],
            "delivery": self._delivery.state_dict(),
            "episodes": None if self._episodes is None else self._episodes.state_dict(),
            "progress": None if self._bar is None else self._bar.state_dict(),
        }

    @in_turn
    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load a state; the collector continues exactly as the one that gave ``state_dict`` would have.

        It is loaded into a collector built with the same arguments; ``total_frames`` may differ. The policy gets the
        weights that acted, in place, and torch's generators here become those of then. Of an episode that is no part of
        the state dict, the next step is the last, truncated and without effect. A warning names such envs.

        Args:
            state_dict: what `state_dict` gave.
            strict: False has envs that cannot go on where they were begin new episodes, see `docs/resume.md`.

        Raises:
            ArgumentTypeError: it is no dict.
            MissingKeyError: (a KeyError) it is none of a collector of this kind, and this many workers.
            ResumeError: an env cannot go on.

        Example:
            >>> from envkit import Collector, PendulumEnv
            >>> first = Collector(PendulumEnv(), frames_per_batch=8)
            >>> batch, state = first.next(), first.state_dict()
            >>> expected = first.next()
            >>> second = Collector(PendulumEnv(), frames_per_batch=8)
            >>> second.load_state_dict(state)
            >>> bool((second.next() == expected).all())
            True
            >>> first.shutdown()
            >>> second.shutdown()
        """
        require_state_dict(state_dict)
        own = {"frames", "iter", "received", *self._runner_names}
        if missing := sorted(own - state_dict.keys()):
            raise MissingKeyError(
                f"the state dict has {sorted(state_dict)}, but no {missing}, which a collector like this one "
                "needs. Load it into one that is built as that which was saved."
            )
        if (state_dict["episodes"] is None) != (self._episodes is None):
            raise MissingKeyError(
                "the state dict is of a collector with frames_per_batch, and this one has trajs_per_batch, or the other "
                "way round. Build it as the one which was saved."
            )
        self._settle()
        with loading(state_dict, strict=strict):
            self._load_runner_states(state_dict, strict=strict)
        self.frames, self.iter = state_dict["frames"], state_dict["iter"]
        self._begun_frames = state_dict["begun_frames"]
        self._counted_version = state_dict["policy_version"]
        if self.policy_version_tracker is not None:
            self.policy_version_tracker.version = self._counted_version
        self._received = [
            Batch(from_plain(raw["data"]), raw["following"].clone())
            for raw in state_dict["received"]
        ]
        self._delivery.load_state_dict(state_dict["delivery"])
        if self._episodes is not None:
            self._episodes.load_state_dict(state_dict["episodes"])
        if self._bar is not None:
            self._bar.load_state_dict(state_dict.get("progress"), self.frames)

    _runner_names: Sequence[str]
    """Names of entries that `_runner_states` gives."""

    def _runner_states(self) -> dict[str, Any]:
        """Return the states of policies, runners and generators."""
        raise NotImplementedError

    def _load_runner_states(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load what `_runner_states` returned."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- amounts

    def _steps_each(self, rows: int, workers: int = 1) -> int:
        """Return how many steps each of the rows of a worker makes in a batch, with a warning where that is more frames."""
        frames = self.requested_frames_per_batch
        if frames is None:
            return _EPISODE_STEPS
        steps = math.ceil(math.ceil(frames / workers) / rows)
        total, side_by_side = self._settings.total_frames, rows * workers
        self._warn_of_more(frames, steps * side_by_side, side_by_side, total)
        return steps

    def _warn_of_more(
        self, asked: int | list[int], collected: int, rows: int, total: int | None
    ) -> None:
        """Warn where a batch has more frames than were asked for, or all batches more than ``total``."""
        frames = sum(asked) if isinstance(asked, list) else asked
        if (
            self._settings.trajs_per_batch is None
            and collected == frames
            and (total or 0) % collected
        ):
            assert total is not None
            warn(
                f"total_frames is {total}, no multiple of frames_per_batch ({collected}): the last batch is whole, so "
                f"{math.ceil(total / collected) * collected} frames are collected.",
            )
        elif collected != frames:
            end = "" if total is None else f", {math.ceil(total / collected) * collected} in all"
            warn(
                f"frames_per_batch is {asked}, no multiple of the {rows} envs that step side by side: "
                f"batches have {collected} frames{end}.",
            )

    # ---------------------------------------------------------------------------------------- life

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool | None = None,
        raise_on_error: bool = True,
    ) -> None:
        """End workers and close what the collector made, for good; a second call has no effect.

        Args:
            timeout: seconds to wait for a batch that is made in the background (`start`); None waits for it.
            close_env: whether the env of a collector in this process is closed. None closes one that ``create_env_fn`` made,
                and leaves one open that was passed as an env. Workers end with theirs.
            raise_on_error: False warns of what goes wrong instead of raising it.

        Raises:
            BusyError: (a RuntimeError) a batch in the background is not done in time; nothing is closed then.

        Example:
            >>> from envkit import Collector, GymEnv
            >>> collector = Collector(GymEnv("CartPole-v1"), frames_per_batch=8)
            >>> collector.shutdown()
            >>> collector.shutdown()
        """
        try:
            self._shut_down(timeout, close_env)
        except Exception as error:
            if raise_on_error:
                raise
            warn(f"shutdown() failed: {error}")

    def _shut_down(self, timeout: float | None, close_env: bool | None) -> None:
        background = self._background
        if background is not None:
            background.end(timeout)
        if not self._is_shut_down:
            self._is_shut_down = True
            if self._bar is not None:
                self._bar.close()
            self._end(close_env=close_env)
        if background is not None:
            background.raise_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.shutdown()


BaseCollector = Collector


def flat_stats(counted: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | bool]:
    """Write what a runner has counted as one dict of numbers, with names as ``seconds/envs``."""
    flat: dict[str, int | float | bool] = {}
    for name, value in counted.items():
        flat |= (
            flat_stats(value, f"{prefix}{name}/")
            if isinstance(value, Mapping)
            else {f"{prefix}{name}": value}
        )
    return flat


def _valid_frames(batch: TensorDictBase) -> int:
    mask = batch.get((COLLECTOR, "mask"), None)
    return batch.batch_size.numel() if mask is None else int(mask.sum())
