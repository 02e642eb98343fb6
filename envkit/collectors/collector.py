"""Iterables that run a policy in envs and give batches of transitions: what all of them share.

`Collector` counts, forms and delivers batches, and is the front door to its subclasses. Where envs run, and how raw
batches come from there, is theirs.

Conventions
    raw batch  what runners have collected, before it is split, cut into episodes or post-processed.
    frames     valid transitions that were delivered; ``iter``: batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from tensordict import TensorDictBase

from envkit.batched.settings import RayOptions
from envkit.collectors.delivery import Delivery
from envkit.collectors.kinds import kind_for, require_known
from envkit.collectors.metering import ProgressBar
from envkit.collectors.runner import COLLECTOR, Batch
from envkit.collectors.settings import WorkerOptions, checked
from envkit.collectors.turns import asked_for, in_turn, require_open
from envkit.collectors.whole_episodes import EpisodeStore
from envkit.data.keywords import ShownKeywords, completed
from envkit.data.plain import from_plain, plain
from envkit.data.results import EnvData
from envkit.env.base import EnvBase
from envkit.env.policy import PolicyLike
from envkit.errors import ArgumentTypeError, MissingKeyError

__all__ = ["Collector", "MakeEnv"]

MakeEnv = Callable[..., EnvBase] | EnvBase | Sequence[Callable[..., EnvBase]]
Backend = Literal["direct", "process", "ray"]

_EPISODE_STEPS = 32
"""Steps of each row between two looks for whole episodes."""


class Collector:
    """Collect batches of transitions with a policy; `Collector` itself gives the subclass that fits.

    Args:
        create_env_fn: what makes the env, or an env; with workers, a list of one for each, or one with
            ``num_collectors``.
        policy: see `envkit.env.policy.as_policy`; None for random actions. One that compiles (`JaxPolicy`, what
            `compile_policy` gave) makes a batch of a stateless env one program.
        backend: "direct" collects in this process (`SyncDataCollector`), "process" in workers, and "ray" in
            workers that are actors of a Ray cluster.
        backend_options: see `RayOptions`; the other backends have none.
        num_collectors: number of workers.
        sync: with workers, a batch has a part of each (`MultiSyncDataCollector`); False takes what is ready
            (`MultiaSyncDataCollector`).
        **options: see `CollectorOptions` and `WorkerOptions`.

    Raises:
        OptionError: (a TypeError) a keyword is unknown, does not apply to this kind, or excludes another.
        ArgumentError: (a ValueError) a number is out of range.
        PolicyError: (a TypeError) the policy is not callable, or writes no action.
    """

    _kind: str
    __signature__ = ShownKeywords()

    if not TYPE_CHECKING:  # which would look for the keywords here

        def __new__(
            cls, *args: Any, backend: str | None = None, sync: bool = True, **options: Any
        ) -> Any:
            made = kind_for(backend, sync) if cls is Collector else cls
            require_known(made, options, Collector)
            return super().__new__(made)

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
        told = place | {name: getattr(self._options, name) for name in asked}
        facts = [f"{name}={value!r}" for name, value in told.items() if value is not None]
        state = "shut down" if self._is_shut_down else f"frames={self.frames}"
        return f"{type(self).__name__}({', '.join([*facts, state])})"

    def _take(self, policy: PolicyLike, table: type, options: Mapping[str, Any]) -> Any:
        """Take over the options that every kind has; gives all of them, checked."""
        given = completed(table, options)
        given.policy = policy
        self._options = given = checked(given)
        self.frames = self.iter = 0
        self.policy_version = 0
        self._begun_frames = 0
        self._pending: Callable[[], Batch] | None = None
        self._received: list[Batch] = []
        self._delivery = Delivery(given)
        self._episodes: EpisodeStore | None = None
        self._bar: ProgressBar | None = None
        self._is_shut_down = False
        self._user: int | None = None
        return given

    def _prepare(self, workers: int = 1) -> None:
        """Make what keeps and shows episodes, now that nothing can be refused any more."""
        given = self._options
        if given.trajs_per_batch is not None:
            self._episodes = EpisodeStore(workers)
        if given.progress:
            self._bar = ProgressBar(given.total_frames, workers)

    # ------------------------------------------------------------------------- what subclasses say

    def _begin_batch(self, *, random: bool) -> Callable[[], Batch]:
        """Begin a raw batch, and give what waits for it; after an error that is called again."""
        raise NotImplementedError

    @property
    def _frames_each(self) -> int:
        """Frames of a raw batch."""
        raise NotImplementedError

    def _end(self) -> None:
        """Close envs, end workers; called once."""
        raise NotImplementedError

    def update_policy_weights_(self, policy_weights: Any = None) -> None:
        """Have the policy act with new weights from the next batch on.

        Args:
            policy_weights: a TensorDict or a mapping of them by name, as ``state_dict()`` gives, or a module; for a
                `JaxPolicy` another one, or params; None takes those of the policy that was passed, which a trainer has
                changed in place.

        Raises:
            ArgumentError: (a ValueError) they are of another architecture.
        """

    @property
    def requested_frames_per_batch(self) -> int | None:
        """Transitions in a batch, as they were asked for; None where batches are of whole episodes alone."""
        return self._options.frames_per_batch

    @property
    def frames_per_batch(self) -> int:
        """Transitions that a batch has, over all envs; more than were asked for where envs step side by side."""
        return self._frames_each

    @property
    def total_frames(self) -> int:
        """Transitions after which the collector is at its end; -1 where there is no end."""
        return -1 if self._options.total_frames is None else self._options.total_frames

    @property
    def _amounts(self) -> dict[str, Any]:
        """Give what `stats` of every kind says."""
        return {
            "total_frames": self.total_frames,
            "requested_frames_per_batch": self.requested_frames_per_batch,
            "completed": self.is_finished,
            "policy_version": self.policy_version,
        }

    def set_seed(self, seed: int, static_seed: bool = False) -> int | None:
        """Seed all envs of all workers, one chain; gives the seed after the last."""
        raise NotImplementedError

    def stats(self) -> Mapping[str, Any]:
        """Tell what was collected and where time went: ``frames``, ``batches``, ``episodes``, ``seconds``, ...."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- batches

    def __iter__(self) -> Iterator[EnvData]:
        while not self.is_finished:
            yield self.next()  # type: ignore[misc]  # and no call in between: Ctrl-C would lose it

    @property
    def is_finished(self) -> bool:
        """Whether ``total_frames`` were delivered."""
        total = self._options.total_frames
        return total is not None and self.frames >= total

    def next(self) -> EnvData | None:
        """Give the next batch; None at the end, and where batches go into a replay buffer.

        What a hook, ``postproc`` or the buffer raises loses nothing: the next call delivers the same batch.

        Raises:
            BusyError: another thread uses this collector.
            ClosedEnvError: it was shut down.
        """
        me = asked_for(self)
        before, self._user = self._user, me
        try:
            if self.is_finished:
                return None
            if self._options.pre_collect_hook is not None:
                self._options.pre_collect_hook()
            delivery = self._delivery
            if delivery.raw is None:
                delivery.raw = self._gathered()
            frames = self.frames + _valid_frames(delivery.raw)
            batch: Any = delivery.deliver()
            self.frames, self.iter, delivery.raw, delivery.formed = (
                frames,
                self.iter + 1,
                None,
                None,
            )
            return batch  # with no call since it is counted: Ctrl-C cannot come in between
        except Exception as error:
            require_open(self, error)
            raise
        finally:
            self._user = before

    def _gathered(self) -> TensorDictBase:
        """Give a raw batch, or whole episodes."""
        store, wanted = self._episodes, self._options.trajs_per_batch
        if store is None:
            data = self._next_raw().data
            del self._received[0]
            return data
        while len(store) < wanted:
            raw = self._next_raw()
            store.add(raw.data, raw.following)
            del self._received[0]
        return store.take(wanted, self._options.traj_format)

    def _next_raw(self) -> Batch:
        """Give a raw batch, which who asks takes out of ``_received`` when it is kept: Ctrl-C may come at any moment."""
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
        if self._options.prefetch and self._wants_more and self._pending is None:
            self._begin_next()

    def _begin_next(self) -> None:
        random = self._begun_frames < (self._options.init_random_frames or 0)
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
        total = self._options.total_frames
        return total is None or self._begun_frames < total

    # ---------------------------------------------------------------------------------------- resume

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """Give all that the batches to come depend on, as tensors, numbers, strings, lists and dicts.

        A batch under way is received first, and is part of it. Of the generators there are torch's, here and in the
        workers, and those of the envs.

        Raises:
            ResumeError: an env cannot say where it is; those on simulators can with ``record_for_resume=True``.
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
        """Go on as the collector that gave ``state_dict`` would have, to the bit.

        It is loaded into a collector built with the same arguments; ``total_frames`` may differ. The policy gets the
        weights that acted, in place, and torch's generators here become those of then.

        Args:
            state_dict: what `state_dict` gave.
            strict: False has envs that cannot go on where they were begin new episodes, see `docs/resume.md`.

        Raises:
            ArgumentTypeError: it is no dict.
            MissingKeyError: (a KeyError) it is none of a collector of this kind, and this many workers.
            ResumeError: an env cannot go on.
        """
        if not isinstance(state_dict, Mapping):
            raise ArgumentTypeError(
                f"the state dict is of type {type(state_dict).__name__}, but must be a dict. Pass what state_dict() "
                "gave."
            )
        own = {"frames", "iter", "received", *self._runner_names}
        if missing := sorted(own - state_dict.keys()):
            raise MissingKeyError(
                f"the state dict has {sorted(state_dict)}, but no {missing}, which a {type(self).__name__} like this one "
                "needs. Load it into one that is built as that which was saved."
            )
        if (state_dict["episodes"] is None) != (self._episodes is None):
            raise MissingKeyError(
                "the state dict is of a collector with frames_per_batch, and this one has trajs_per_batch, or the other "
                "way round. Build it as the one which was saved."
            )
        self._settle()
        self._load_runner_states(state_dict, strict=strict)
        self.frames, self.iter = state_dict["frames"], state_dict["iter"]
        self._begun_frames = state_dict["begun_frames"]
        self.policy_version = state_dict["policy_version"]
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
        """Give the states of policies, runners and generators."""
        raise NotImplementedError

    def _load_runner_states(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Take over what `_runner_states` gave."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------- amounts

    def _steps_each(self, rows: int, workers: int = 1, *, stacklevel: int) -> int:
        """Give how many steps each of the rows of a worker makes in a batch, with a warning where that is more frames."""
        frames = self._options.frames_per_batch
        if frames is None:
            return _EPISODE_STEPS
        steps = math.ceil(math.ceil(frames / workers) / rows)
        if (made := steps * rows * workers) != frames:
            total = self._options.total_frames
            end = "" if total is None else f", {math.ceil(total / made) * made} in all"
            warnings.warn(
                f"frames_per_batch is {frames}, no multiple of the {rows * workers} envs that step side by side: "
                f"batches have {made} frames{end}.",
                stacklevel=stacklevel,
            )
        return steps

    # ---------------------------------------------------------------------------------------- life

    def shutdown(self) -> None:
        """Close envs and end workers, for good; twice is as good as once."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._bar is not None:
            self._bar.close()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.shutdown()


def _valid_frames(batch: TensorDictBase) -> int:
    mask = batch.get((COLLECTOR, "mask"), None)
    return batch.batch_size.numel() if mask is None else int(mask.sum())
