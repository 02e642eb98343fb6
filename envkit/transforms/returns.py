"""Running values of the rewards of an episode: their sum, what is left of a target, and the discounted return whose
deviation rewards are divided by.

Each is beside its reward and begins again with the episode; `episodes` says which reset it obeys,
`episode_counters` does the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right

from envkit import rules
from envkit.arrays import elementwise, episode_counters, statistics
from envkit.arrays.elementwise import dtype_name
from envkit.arrays.leaves import Changes, Leaves
from envkit.data.arguments import as_bool, as_number, require_option
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.data.timeline import seams
from envkit.errors import ArgumentError, MissingKeyError
from envkit.specs import Composite, TensorSpec, Unbounded
from envkit.transforms.core.coupled import by_rows
from envkit.transforms.core.fusable import FusableTransform, LeavesOf, written
from envkit.transforms.core.leafwise import float_leaf, require_regular
from envkit.transforms.core.transform import Keys, as_keys
from envkit.transforms.episodes import EpisodeTransform
from envkit.transforms.running import PriorMoments, RunningMoments, of_state


class _RewardTransform(FusableTransform, EpisodeTransform):
    """Base of transforms that keep one running value for each reward.

    Args:
        in_keys: rewards; None takes all of the env.
        out_keys: the running values; None derives their names.
        reset_keys: the `_reset` entry each value obeys; None takes that of the level it is at,
            or the only one there is.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, reset_keys: Keys):
        super().__init__(in_keys, out_keys)
        self._takes_all = in_keys is None
        self._names_given = out_keys is not None
        if in_keys is not None and out_keys is not None:
            self._require_as_many("out_keys", self.out_keys, self.in_keys)
        self.reset_keys = None if reset_keys is None else as_keys(reset_keys)

    def _out_name(self, name: str) -> str:
        """Derive the name of the running value of reward ``name``."""
        raise NotImplementedError

    def _first(self, constants: Mapping[str, Any]) -> Any:
        """Return the number every value begins with; None: zero."""
        return None

    def _pairs(self) -> list[tuple[Path, Path]]:
        """Pairs of a reward and its running value."""
        return self._read_once("pairs", self._found_pairs)

    def _found_pairs(self) -> list[tuple[Path, Path]]:
        sources = list(self._env().reward_keys) if self._takes_all else self.in_keys
        if self.container is not None:
            self._require_rewards(sources)
        targets = self._targets(sources)
        self._require_as_many("out_keys", targets, sources)
        if self.reset_keys is not None:
            self._require_as_many("reset_keys", self.reset_keys, sources)
        return list(zip(map(as_path, sources), map(as_path, targets), strict=True))

    def _require_rewards(self, sources: list[Key]) -> None:
        known = self._env().full_reward_spec
        if missing := [key for key in sources if known.get(key, None) is None]:
            raise MissingKeyError(
                f"{type(self).__name__} reads {missing}, but the env has the rewards {list(known.keys(True, True))}. Name "
                "rewards that exist with in_keys=."
            )

    def _targets(self, sources: list[Key]) -> list[Key]:
        """Return the names of the running values of rewards."""
        if self._names_given:
            return self.out_keys
        paths = [as_path(key) for key in sources]
        return [as_key((*path[:-1], self._out_name(path[-1]))) for path in paths]

    def _require_as_many(self, argument: str, keys: list[Key], sources: list[Key]) -> None:
        if len(sources) != len(keys):
            raise ArgumentError(
                f"{type(self).__name__} has {len(keys)} {argument} {keys} for the rewards {sources}. Pass "
                "one for each."
            )

    @property
    def _declared_keys(self) -> list[Key]:
        return [as_key(path) for path in self.memory()]

    def memory(self) -> list[Path]:
        return [target for _, target in self._values()]

    def _values(self) -> list[tuple[Path, Path]]:
        """Pairs of a reward and a value that travels for it: its running value, and what is kept beside that."""
        return self._pairs()

    def reset_leaves(self, fresh: Leaves, constants: Mapping[str, Any]) -> Changes:
        flags, first = self._first_flag(fresh), self._first(constants)
        return {
            target: episode_counters.begun(flags, fresh.batch_dims, shape, dtype, first)
            for target, (shape, dtype) in self._read_once("forms", self._found_forms).items()
        }

    def _found_forms(self) -> dict[Path, tuple[torch.Size, str]]:
        """Return shape and dtype of each running value, without batch axes."""
        env = self._env()
        specs = {
            target: self._value_leaf(env.full_reward_spec[source])
            for source, target in self._values()
        }
        return {
            target: (spec.shape[env.batch_dims :], dtype_name(spec.dtype))
            for target, spec in specs.items()
        }

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        if self.container is None:
            return self._reset_by_hand(td, td_reset)
        fresh, count = super()._reset(td, td_reset), len(self._pairs())
        for number, (_, target) in enumerate(self._values()):
            level = self._level_of(target, self._reset_key_of(number % count))
            fresh.set(target, self._kept_elsewhere(td, level, target, fresh.get(target)))
        return fresh

    def _reset_by_hand(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        """Begin the values without an env."""
        raise self._missing_env()

    def _reset_key_of(self, number: int) -> Key | None:
        """Return the `_reset` entry that a value obeys; None finds it by place."""
        return None if self.reset_keys is None else self.reset_keys[number]

    def _add_to(self, spec: Composite, values: list[tuple[Path, Path]] | None = None) -> Composite:
        rewards = self._env().full_reward_spec
        for source, target in self._values() if values is None else values:
            spec[target] = self._value_leaf(rewards[source])
        return spec

    def _value_leaf(self, reward: TensorSpec) -> TensorSpec:
        """Declare the running value of a reward."""
        return Unbounded(reward.shape, dtype=reward.dtype, device=reward.device)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._add_to(observation_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        return self._add_to(state_spec)


class RewardSum(_RewardTransform):
    """Add up the rewards of each episode.

    ``episode_reward`` is 0 at a reset; each step adds its reward.

    Args:
        in_keys: rewards to add up; None takes all.
        out_keys: where the sums go; None puts ``episode_<name>`` beside each reward.
        reset_keys: the `_reset` entry each sum obeys; None finds it by place.
        reward_spec: list the sums among the rewards instead of the observations.
        compensated: keep what rounding does to a sum in a private entry beside it, and take it off at the next step. A
            plain sum of 32 bits drifts in long episodes: 200,000 rewards of 0.1 make 19,959.5, compensated 20,000.
            `evaluate` and `episode_stats` sum in 64 bits.

    Example:
        >>> from envkit import GymEnv, RewardSum
        >>> env = GymEnv("CartPole-v1").append_transform(RewardSum())
        >>> env.rollout(3)["next", "episode_reward"].flatten()
        tensor([1., 2., 3.])
        >>> env.close()
    """

    keeps_books = True

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        reset_keys: Keys = None,
        *,
        reward_spec: bool = False,
        compensated: bool = False,
    ):
        super().__init__(in_keys, out_keys, reset_keys)
        self.reward_spec = as_bool("reward_spec", reward_spec)
        self.compensated = as_bool("compensated", compensated)

    def _out_name(self, name: str) -> str:
        return f"episode_{name}"

    def _values(self) -> list[tuple[Path, Path]]:
        return [*self._pairs(), *self._excesses()]

    def _excesses(self) -> list[tuple[Path, Path]]:
        """Pairs of a reward and the entry of how much rounding has made its sum too large."""
        pairs = self._pairs() if self.compensated else ()
        return [(source, (*path[:-1], f"_excess_{path[-1]}")) for source, path in pairs]

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        changes: dict[Path, Any] = {}
        pairs = self._pairs()
        excesses = [path for _, path in self._excesses()] or [None] * len(pairs)
        for (source, target), excess in zip(pairs, excesses, strict=True):
            reward, before = following[source], root.get(target)
            if excess is not None:
                none = episode_counters.filled(reward, 0)
                changes[target], changes[excess] = episode_counters.compensated(
                    none if before is None else before, root.get(excess, none), reward
                )
            else:
                is_first = before is None
                changes[target] = reward if is_first else episode_counters.added(before, reward)
        return changes

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add up rewards of recorded data along its axis named "time", in 64 bits.

        Rewards are read at the root, or under ``next`` where they are not at the root; the sums go
        beside them. Each episode has its own sum, if the data has ``("next", "done")``; see `MultiStep` for where one ends.

        Raises:
            ArgumentError: no axis is named "time", or the steps are not in its order.
        """
        if "time" not in tensordict.names:
            raise ArgumentError(
                f"RewardSum needs data with an axis named 'time', but the axes are named "
                f"{tensordict.names}. Name it: td.refine_names(..., 'time')."
            )
        axis = tensordict.names.index("time")
        sources: list[Key] = ["reward"] if self._takes_all else self.in_keys
        for source, target in zip(sources, self._targets(sources), strict=False):
            prefix: Path = () if tensordict.get(source, None) is not None else ("next",)
            reward = tensordict.get(as_key((*prefix, *as_path(source))))
            sums = self._summed(reward, tensordict, axis)
            tensordict.set(as_key((*prefix, *as_path(target))), sums)
        return tensordict

    def _summed(self, reward: torch.Tensor, data: TensorDictBase, axis: int) -> torch.Tensor:
        """Add up rewards along time, from the beginning of each episode on."""
        exact = reward.double() if reward.is_floating_point() else reward
        sums = exact.cumsum(axis)
        done = data.get(("next", "done"), None)
        if done is not None:
            ended = done.reshape(*data.batch_size, -1).any(-1)
            ended = (ended | seams(data, ended, axis)).movedim(axis, -1)
            steps = torch.arange(ended.shape[-1], device=ended.device)
            begins = torch.where(ended.roll(1, -1), steps, 0).cummax(-1).values.movedim(-1, axis)
            first = expand_as_right(begins, sums)
            sums = sums - (sums - exact).gather(axis, first)
        return sums.to(reward.dtype) if reward.is_floating_point() else sums

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._add_to(
            observation_spec, self._excesses() if self.reward_spec else self._values()
        )

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        return self._add_to(reward_spec, self._pairs()) if self.reward_spec else reward_spec


class TargetReturn(_RewardTransform):
    """Say which return is still to be reached in each episode.

    ``target_return`` is the target at a reset. Each step takes its reward from it, or leaves it.

    Args:
        target_return: what an episode shall return in total.
        mode: "reduce" takes each reward from the target; "constant" leaves it.
        in_keys: rewards; None takes all of the env.
        out_keys: the targets; None puts ``target_return`` beside each reward.
        reset_key: the `_reset` entry the targets obey; None finds it by place.

    Without an env it works where ``in_keys`` and ``reset_key`` are given: `_reset` begins targets of shape
    ``(*batch, 1)`` for the batch of its arguments.

    Raises:
        ArgumentError: (a ValueError) ``mode`` is another, or rewards that are side by side have no ``out_keys``.

    Example:
        >>> from envkit import GymEnv, TargetReturn
        >>> env = GymEnv("CartPole-v1").append_transform(TargetReturn(10.0))
        >>> env.rollout(3)["target_return"].flatten()
        tensor([10.,  9.,  8.])
        >>> env.close()
    """

    def __init__(
        self,
        target_return: float,
        mode: str = "reduce",
        in_keys: Keys = None,
        out_keys: Keys = None,
        reset_key: Key | None = None,
    ):
        require_option("mode", mode, ("reduce", "constant"))
        super().__init__(in_keys, out_keys, None)
        self.reset_key = reset_key
        as_number("target_return", target_return, meaning="the return that an episode shall reach")
        self.target_return = target_return
        self.mode = mode

    def _out_name(self, name: str) -> str:
        return "target_return"

    def _found_pairs(self) -> list[tuple[Path, Path]]:
        pairs = super()._found_pairs()
        if len({target for _, target in pairs}) < len(pairs):
            raise ArgumentError(
                f"the rewards {[as_key(source) for source, _ in pairs]} would share a target. Name one for each "
                "with out_keys=."
            )
        return pairs

    def _reset_key_of(self, number: int) -> Key | None:
        return self.reset_key

    def _reset_by_hand(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        if self._takes_all or self.reset_key is None:
            raise self._missing_env()
        mask = td.get(self.reset_key, None)
        for _, target in self._pairs():
            fresh = torch.full(
                (*td_reset.batch_size, 1), self.target_return, device=td_reset.device
            )
            kept = td.get(target, None)
            if mask is not None and kept is not None:
                fresh = rules.choose(
                    rules.reduce_mask(mask, fresh.shape, td.batch_dims), fresh, kept
                )
            td_reset.set(target, fresh)
        return td_reset

    def constants(self) -> dict[str, Any]:
        return {"target_return": self.target_return}

    def _first(self, constants: Mapping[str, Any]) -> Any:
        return constants["target_return"]

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        changes = {}
        for source, target in self._pairs():
            reward, before = following[source], root.get(target)
            if before is None:
                before = episode_counters.filled(reward, self._first(constants))
            is_fixed = self.mode == "constant"
            changes[target] = before if is_fixed else episode_counters.left(before, reward)
        return changes

    def extra_repr(self) -> str:
        return f"target_return={self.target_return}, mode={self.mode!r}"


class NormalizeReward(RunningMoments, _RewardTransform):
    """Divide rewards by the running deviation of the discounted return; nothing is subtracted.

    Each row adds up the rewards of its episode, ``total = gamma * total + reward``, beginning with 0 after a reset. The
    variance is that of all totals that all rows have had. A reward becomes ``reward / sqrt(variance + epsilon)``, so its
    sign stays, and the best policy with it. This is what Gymnasium's ``wrappers.vector.NormalizeReward`` and SB3's
    ``VecNormalize(norm_obs=False)`` do; Gymnasium's totals end where an episode terminates, and go on where it is truncated.

    Steps count the rows that were stepped. Statistics are buffers: clones share them, and so do the envs of one
    `EnvCreator` and modules whose memory is shared. They are saved in state dicts. It counts no rewards after `freeze`, nor
    in `evaluate`. It fuses unless processes or threads share it. The totals travel in the data, under a private name.

    Put it behind `RewardSum`, which then adds up the rewards of the environment.

    Args:
        in_keys: rewards, each with its own statistics.
        out_keys: where they go; in place by default.
        gamma: discount of the total.
        epsilon: what is added to the variance.
        clip: bring rewards into ``[-clip, clip]`` afterwards; SB3 takes 10.
        reset_keys: the `_reset` entry each total obeys; None finds it by place.
        shared_td: ``statistics`` of another NormalizeReward, which are shared with it.
        lock: held while statistics are read and written back.
        policies: keep statistics of so many policies apart, see `VecNorm`.

    A total that is not finite is left out of the statistics: ``skipped_rows`` counts them, and the first one gives a
    warning (none where the statistics are on a GPU).

    Raises:
        ArgumentError: (a ValueError) ``gamma`` is outside [0, 1], ``epsilon`` is below 0, or ``clip`` is not above 0.
        MissingKeyError: (a KeyError) when specs are read: the env has no such reward.

    Example:
        >>> from envkit import GymEnv, NormalizeReward
        >>> env = GymEnv("Pendulum-v1").append_transform(NormalizeReward(gamma=0.99))
        >>> following = env.set_seed(0)
        >>> reward = env.rollout(200)["next", "reward"]
        >>> bool((reward <= 0).all()), float(reward[1:].abs().max()) < 10
        (True, True)
        >>> env.close()
    """

    keeps_memory = True

    _in_repr = ("gamma", "epsilon", "clip")

    _kind = PriorMoments

    _twins = (*_RewardTransform._twins, ("_observe_rows", "seen_leaves"))

    def __init__(
        self,
        in_keys: Keys = "reward",
        out_keys: Keys = None,
        *,
        gamma: float = 0.99,
        epsilon: float = 1e-8,
        clip: float | None = None,
        reset_keys: Keys = None,
        shared_td: TensorDictBase | None = None,
        lock: Any = None,
        policies: int | None = None,
    ):
        super().__init__(as_keys(in_keys), None, reset_keys)
        if out_keys is not None:
            self.out_keys = as_keys(out_keys)
            self._require_as_many("out_keys", self.out_keys, self.in_keys)
        self.gamma = as_number("gamma", gamma, least=0, most=1, meaning="the discount of a step")
        as_number("epsilon", epsilon, least=0, meaning="what is added to the variance")
        self.clip = None
        if clip is not None:
            self.clip = as_number("clip", clip, above=0, meaning="the largest reward, or None")
        self._begin_moments(1.0, epsilon, lock, shared_td, policies)

    @property
    def epsilon(self) -> float:
        """Number added to the variance; assignable."""
        return self.eps

    @epsilon.setter
    def epsilon(self, value: float) -> None:
        self.eps = as_number("epsilon", value, least=0, meaning="what is added to the variance")

    def _out_name(self, name: str) -> str:
        return f"_discounted_{name}"

    @property
    def _declared_keys(self) -> list[Key]:
        return [*self.out_keys, *super()._declared_keys]

    def _value_leaf(self, reward: TensorSpec) -> TensorSpec:
        return float_leaf(reward)

    # ------------------------------------------------------------------------------------- one step

    def _totals(self, root: Leaves, following: Leaves, gamma: Any) -> dict[Key, Any]:
        """Return the totals of a step by the key of their reward."""
        totals, forms = {}, self._read_once("forms", self._found_forms)
        for key, (source, target) in zip(self.in_keys, self._pairs(), strict=True):
            reward = following.get(source)
            if reward is None:
                raise self._missing(key, following, "Name a reward: in_keys=.")
            reward = elementwise.cast(reward, elementwise.dtype_named(reward, forms[target][1]))
            before = root.get(target)
            is_first = before is None
            totals[key] = reward if is_first else episode_counters.discounted(before, reward, gamma)
        return totals

    def _count(self, root: Leaves, following: Leaves, stepped: Any) -> None:
        """Count the totals of a step; ``stepped`` says of which rows, None of all."""
        for key, total in self._totals(root, following, self.gamma).items():
            event = total.shape[following.batch_dims :]
            self._observe_among(key, *by_rows(total, event, stepped, following.batch_dims))

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        root, following = LeavesOf(td), LeavesOf(next_td)
        self._count(root, following, td.get(rules.STEP, None))
        return written(next_td, self.step_leaves(root, following, self._constants_outside()))

    def counted(
        self, leaves: Leaves, root: Leaves | None, rows: Sequence[int] | None
    ) -> dict[str, Any]:
        if root is not None:  # a reset has no reward
            self._count(root, leaves, None)
        return self._constants_outside()

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        totals, changes = self._totals(root, following, constants["gamma"]), {}
        pairs = zip(self.in_keys, self.out_keys, self._pairs(), strict=True)
        for key, out, (source, target) in pairs:
            total = changes[target] = totals[key]
            own = of_state(key, constants)
            deviation = statistics.deviation_of_moments(own, constants["eps"])
            deviation = self._of_rows(deviation, total)
            reward = elementwise.cast(following[source], total.dtype)
            reward = reward / elementwise.cast(deviation, total.dtype)
            most = constants["clip"]
            changes[as_path(out)] = elementwise.clipped(reward, -most, most)
        return changes

    def seen_leaves(
        self, leaves: Leaves, mask: Any, constants: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        if leaves.get(as_path(self.in_keys[0])) is None:  # at a reset
            return {}
        totals = self._totals(leaves, leaves, constants["gamma"])

        def rows_of(key: Key) -> tuple[Any, Any]:
            total = totals[key]
            return by_rows(total, total.shape[leaves.batch_dims :], mask, leaves.batch_dims)

        return self._seen(rows_of, constants)

    def constants(self) -> dict[str, Any]:
        clip = math.inf if self.clip is None else self.clip
        return {**super().constants(), "gamma": self.gamma, "clip": clip}

    # --------------------------------------------------------------------------------------- specs

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        for key, out in zip(self.in_keys, self.out_keys, strict=True):
            leaf = float_leaf(reward_spec[key])
            require_regular(self, key, leaf)
            event = leaf.shape[reward_spec.ndim :]
            self._begin_like(key, reward_spec.shape, event, torch.float64, leaf.device)
            reward_spec[out] = leaf
        return reward_spec
