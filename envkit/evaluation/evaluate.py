"""How good a policy is in an env: episodes played, counted without bias, the env left as it was.

`evaluate` decides how episodes are begun, played and cut, and on which seeds. `Tally` decides which of them count: each
row's first ones, however long they take, since to take the episodes that end first would count short ones more often.
Their results are computed in `outcome`, how steps are made in `envkit.env.fragments`: as one program where env and
policy compile.

Conventions
    rows   the flattened batch of an env; one for an env without.
    chunk  steps that are made before the episodes are looked at.
    quota  episodes that each row contributes.
    stale  of a row: ``max_steps`` has ended its episode, and no new one has begun yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, overload

import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool
from envkit.data.paths import Key, as_key, as_path
from envkit.env.base import EnvBase
from envkit.env.bound_policy import bind_policy
from envkit.env.fragments import Fragment, begin_fragment
from envkit.env.learning import ALL, left_as_it_was
from envkit.env.policy import ExplorationType, PolicyLike, set_exploration_type
from envkit.env.seeding import checked_seed, drawn_seed, seed_of_32_bits
from envkit.env.wrapper_hints import require_env
from envkit.errors import ArgumentError, MissingKeyError, RolloutError
from envkit.evaluation.outcome import Agents, Comparison, Evaluation, checked_agents, one_number
from envkit.process_wide import warn
from envkit.transforms.core.compose import Compose
from envkit.transforms.core.transform import Transform
from envkit.transforms.devices import DeviceCastTransform
from envkit.transforms.keys import RenameTransform
from envkit.transforms.running import VecNorm, VecNormV2
from envkit.transforms.shapes import FlattenObservation, PermuteTransform, UnsqueezeTransform
from envkit.transforms.values import DTypeCastTransform


class Tally:
    """The episodes of some rows so far.

    Args:
        rows: how many.
        quota: see the module.
        max_steps: of an episode; None for no limit.
    """

    def __init__(self, rows: int, quota: int, max_steps: int | None):
        self.quota, self.max_steps = quota, max_steps
        self.counted = torch.zeros(rows, dtype=torch.int64)
        self.elapsed = torch.zeros(rows, dtype=torch.int64)
        self.paid = torch.zeros(rows, dtype=torch.float64)
        self.stale = torch.zeros(rows, dtype=torch.bool)
        self.returns = torch.zeros(rows, quota, dtype=torch.float64)
        self.lengths = torch.zeros(rows, quota, dtype=torch.int64)
        self.terminated = torch.zeros(rows, quota, dtype=torch.bool)
        self.is_cut = torch.zeros(rows, quota, dtype=torch.bool)
        self._ends: list[tuple[torch.Tensor, TensorDictBase]] = []

    @property
    def open_rows(self) -> torch.Tensor:
        """Rows that have episodes to play."""
        return self.counted < self.quota

    def steps_left(self) -> int | None:
        """How many steps may be taken before ``max_steps`` ends an episode that counts; None for any number."""
        if self.max_steps is None:
            return None
        return self.max_steps - int(self.elapsed[self.open_rows].max())

    def add(
        self,
        reward: torch.Tensor,
        ended: torch.Tensor,
        terminated: torch.Tensor,
        following: TensorDictBase,
    ) -> None:
        """Count some steps.

        Args:
            reward: float64, shape ``(rows, steps)``.
            ended, terminated: bool, of that shape.
            following: what the steps led to, of that batch size.
        """
        begun, steps = 0, reward.shape[1]
        while begun < steps and bool((self.open_rows & ~self.stale).any()):
            stop = self._next_end(ended, begun)
            counts = self.open_rows & ~self.stale
            self.paid += reward[:, begun:stop].sum(1).where(counts, 0.0)  # elsewhere, it may be NaN
            self.elapsed += (stop - begun) * counts
            self._end(counts, ended[:, stop - 1], terminated[:, stop - 1], following[:, stop - 1])
            begun = stop

    def begin_stale(self) -> None:
        """Learn that new episodes have begun in rows that were stale."""
        self.stale[:] = False

    def _next_end(self, ended: torch.Tensor, begun: int) -> int:
        """Return the number of the step after the next one at which an episode that counts ends, or the last."""
        counts = self.open_rows & ~self.stale
        ends = ended[counts, begun:].any(0).nonzero()
        stop = begun + int(ends[0]) + 1 if len(ends) else ended.shape[1]
        if self.max_steps is not None:
            stop = min(stop, begun + self.max_steps - int(self.elapsed[counts].max()))
        return stop

    def _end(
        self,
        counts: torch.Tensor,
        ended: torch.Tensor,
        terminated: torch.Tensor,
        following: TensorDictBase,
    ) -> None:
        cut = torch.zeros_like(ended)
        if self.max_steps is not None:
            cut = counts & ~ended & (self.elapsed >= self.max_steps)
        over = (counts & ended) | cut
        if not bool(over.any()):
            return
        place = over, self.counted[over]
        self.returns[place] = self.paid[over]
        self.lengths[place] = self.elapsed[over]
        self.terminated[place] = terminated[over] & ended[over]
        self.is_cut[place] = cut[over]
        numbers = over.nonzero()[:, 0] * self.quota + self.counted[over]
        self._ends.append((numbers, following[over].clone()))
        self.counted[over] += 1
        self.elapsed[over] = 0
        self.paid[over] = 0.0
        self.stale |= cut

    def last(self) -> TensorDictBase:
        """Return what each episode led to, batch size ``(rows * quota,)``."""
        order = torch.cat([numbers for numbers, _ in self._ends]).argsort()
        ends = [TensorDict(dict(end.items()), end.batch_size) for _, end in self._ends]
        return torch.cat(ends)[order]  # type: ignore[arg-type]


_CHUNK = 64
_ENDLESS = 100_000
"""Steps of an episode after which it is taken for one without an end."""


@overload
def evaluate(
    env: EnvBase,
    policy: Mapping[str, PolicyLike],
    episodes: int = 100,
    *,
    seed: int | None = None,
    max_steps: int | None = None,
    deterministic: bool = True,
    update_stats: bool = False,
    reward_key: Key | None = None,
    agents: Agents = None,
) -> Comparison: ...
@overload
def evaluate(
    env: EnvBase,
    policy: PolicyLike,
    episodes: int = 100,
    *,
    seed: int | None = None,
    max_steps: int | None = None,
    deterministic: bool = True,
    update_stats: bool = False,
    reward_key: Key | None = None,
    agents: Agents = None,
) -> Evaluation: ...
def evaluate(
    env: EnvBase,
    policy: PolicyLike | Mapping[str, PolicyLike],
    episodes: int = 100,
    *,
    seed: int | None = None,
    max_steps: int | None = None,
    deterministic: bool = True,
    update_stats: bool = False,
    reward_key: Key | None = None,
    agents: Agents = None,
) -> Evaluation | Comparison:
    """Play episodes and say what they come to; the same call for every env.

    Each row contributes its first ``ceil(episodes / rows)`` episodes, however long they take: to take those that end
    first would count short ones more often. No gradients are recorded. Afterwards the env is where it was, its seed and
    generators included, as are torch's generators. Some envs cannot say where they are: a simulator in an episode
    that was not recorded (see `record_for_resume`), or your own class without ``get_extra_state``. A warning says so,
    and the next call must be a reset.

    Args:
        env: any env.
        policy: what `rollout` takes; or a dict of several, which play on the same seeds.
        episodes: the least number of episodes. All that are played count: ``len`` says how many.
        seed: of the env and of what the policy draws; None draws one from torch's global generator, and
            the result says which.
        max_steps: longest episode. One that is longer is cut, and counts with its return so far.
        deterministic: act by ``ExplorationType.DETERMINISTIC``; False: by ``RANDOM``.
        update_stats: True lets transforms that learn, such as `VecNorm`, learn while policies play. By default they
            do not change, so that each policy sees the same env.
        reward_key: the reward that is summed, as the env shows it behind its transforms; None: the only one. ``changed_by``
            of the result names those that changed it. One that learns, such as `NormalizeReward`, gives a warning.
        agents: ``"sum"`` or ``"mean"`` makes one number of those that a group of agents gets in a step.

    Returns:
        The episodes with their mean return and its interval; for a dict of policies these by name, and their
        differences.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env, or another argument of another type.
        ArgumentError: (a ValueError) ``episodes`` or ``max_steps`` is below 1, there is no policy, or the env
            has several rewards for each row, of which the arguments make no single one.
        MissingKeyError: (a KeyError) the env has no reward ``reward_key``.
        RolloutError: (a RuntimeError) an episode did not end in 100,000 steps, and ``max_steps`` is None.

    Example:
        >>> from envkit import GymEnv, evaluate
        >>> env = GymEnv("CartPole-v1")
        >>> policy = lambda observation: env.action_spec.rand()
        >>> result = evaluate(env, policy, episodes=5, seed=0)
        >>> result.returns.shape
        torch.Size([5])
        >>> env.close()
    """
    require_env("env", env)
    wanted = as_int("episodes", episodes, least=1, meaning="how many episodes to play")
    if max_steps is not None:
        max_steps = as_int("max_steps", max_steps, least=1, meaning="the longest episode, or None")
    reward = _reward(env, reward_key, agents)
    played = _Playing(env, math.ceil(wanted / env.numel()), max_steps, reward, agents)
    _warn_of_learnt(reward, played.changes)
    seed = seed_of_32_bits(drawn_seed()) if seed is None else checked_seed(seed)
    if isinstance(policy, Mapping) and not policy:
        raise ArgumentError("policy is an empty dict. Pass one policy, or several by name.")
    if policy is not None and not update_stats:
        _warn_of_unseen(env)
    acts_at_its_best = as_bool("deterministic", deterministic)
    kind = ExplorationType.DETERMINISTIC if acts_at_its_best else ExplorationType.RANDOM
    learns = as_bool("update_stats", update_stats)
    untouched = left_as_it_was(env, update_stats=learns, warns_as="evaluate()")
    with untouched, torch.no_grad(), set_exploration_type(kind):
        if not isinstance(policy, Mapping):
            return played.by(policy, seed)
        return Comparison({name: played.by(one, seed) for name, one in policy.items()})


class _Playing:
    """Episodes of one env, played by one policy after the other."""

    def __init__(
        self, env: EnvBase, quota: int, max_steps: int | None, reward: Key, agents: Agents
    ):
        self.env, self.quota, self.max_steps = env, quota, max_steps
        self.reward = reward
        self.agents: Agents = agents
        self.changes = _changes_of(env, reward)
        self.shown = [
            as_key(path)
            for path, _, spec in env._table.outputs
            if spec.dtype is not None
            and -1 not in spec.shape
            and path[0] not in env._facts.unrecorded
        ]

    def by(self, policy: PolicyLike, seed: int) -> Evaluation:
        """Play the episodes of one policy, from a seed on."""
        self.env.set_seed(seed)
        torch.manual_seed(seed)
        tally = self._played(policy)
        flat = (tally.returns, tally.lengths, tally.terminated, tally.is_cut)
        returns, lengths, terminated, is_cut = (value.flatten() for value in flat)
        rows = len(tally.counted)
        return Evaluation(
            returns, lengths, terminated, is_cut, tally.last(), rows, seed, tuple(self.changes)
        )

    def _played(self, policy: PolicyLike) -> Tally:
        env, act = self.env, bind_policy(self.env, policy)
        runs = env._runs()
        at_once = env._steps_by_itself and runs.is_program(policy)
        runs.expect("never", policy)
        root = env.reset()
        tally = Tally(root.batch_size.numel(), self.quota, self.max_steps)
        while bool(tally.open_rows.any()):
            steps, left = _CHUNK, tally.steps_left()
            if left is not None:  # a program is compiled for each number of steps
                steps = min(steps, self.max_steps or steps) if at_once else min(steps, left)
            data, root = begin_fragment(Fragment(env, policy, act, steps), root)()
            self._count(tally, data)
            self._require_end(tally)
            root = self._begun(tally, root)
        return tally

    def _count(self, tally: Tally, data: TensorDictBase) -> None:
        following, shape = data.get("next"), (len(tally.counted), data.batch_size[-1])
        ended = self.env._rows_done(following).reshape(shape).cpu()
        terminated = self._terminated(following).reshape(shape).cpu()
        reward = one_number(following.get(self.reward).reshape(*shape, -1), self.agents)
        shown = following.select(*self.shown, strict=False).reshape(shape)
        tally.add(reward, ended, terminated, shown)

    def _terminated(self, following: TensorDictBase) -> torch.Tensor:
        """Return which rows have ended by themselves: by the root's flag, or else by those of all agents."""
        levels = self.env.done_levels
        ended = []
        for level in [()] if () in levels else list(levels):
            flag = following.get(as_key((*level, "terminated")))
            ended.append(flag.flatten(len(following.batch_size)).all(-1))
        return torch.stack(ended).all(0)

    def _require_end(self, tally: Tally) -> None:
        longest = int(tally.elapsed[tally.open_rows].max()) if bool(tally.open_rows.any()) else 0
        if self.max_steps is None and longest >= _ENDLESS:
            raise RolloutError(
                f"an episode of {type(self.env).__name__} has not ended in {longest:,} steps. Say where to cut it: "
                "evaluate(..., max_steps=1000), or put a time limit on the env."
            )

    def _begun(self, tally: Tally, root: TensorDictBase) -> TensorDictBase:
        """Begin a new episode in rows whose last one was cut."""
        if not bool((tally.stale & tally.open_rows).any()):
            return root
        env = self.env
        mask = tally.stale.reshape(root.batch_size).to(root.device or "cpu")
        for level in [()] if () in env.done_levels else list(env.done_levels):
            flag = root.get(as_key((*level, env.done_levels[level][0])))
            wide = mask.reshape((*mask.shape, *(1,) * (flag.ndim - mask.ndim))).expand(flag.shape)
            root.set(as_key((*level, rules.RESET)), wide.clone())
        tally.begin_stale()
        return env._reset_anew(root)


_KEEP_NUMBERS = (
    RenameTransform,
    DTypeCastTransform,
    DeviceCastTransform,
    FlattenObservation,
    UnsqueezeTransform,
    PermuteTransform,
)
"""Transforms that write an entry and leave its numbers as they are."""


def _changes_of(env: EnvBase, reward: Key) -> dict[str, bool]:
    """Return the names of the transforms that change a reward, the innermost first, and which of them learn."""
    return dict(_listed(env._visit_transforms(partial(_changing, reward), ALL)))


def _listed(answer: Any) -> Iterator[tuple[str, bool]]:
    """Yield what visits of transforms have answered by name, the innermost first."""
    if isinstance(answer, Mapping):
        for name, value in answer.items():
            yield from [(name, value)] if isinstance(value, bool) else _listed(value)
    for part in reversed(answer) if isinstance(answer, list | tuple) else ():
        yield from _listed(part)


def _changing(reward: Key, transform: Any, earlier: Any) -> dict[str, bool]:
    """List the transforms of a chain that change a reward; see `envkit.env.learning` for visits."""
    path = as_path(reward)
    return {
        type(one).__name__: one.learns
        for one in transform.modules()
        if isinstance(one, Transform)
        and not isinstance(one, (*_KEEP_NUMBERS, Compose))
        and path in map(as_path, one._declared_keys)
    }


def _warn_of_learnt(reward: Key, changes: Mapping[str, bool]) -> None:
    if learnt := [name for name, learns in changes.items() if learns]:
        warn(
            f"evaluate() sums {reward!r} as {', '.join(learnt)} has changed it, in a unit that depends on what was seen "
            "before. For the reward of the env, let the transform write another entry, "
            f"{learnt[0]}(..., out_keys=['normal_reward']), and pass reward_key={reward!r}.",
        )


def _warn_of_unseen(env: EnvBase) -> None:
    """Warn of transforms that are to normalise observations and have seen none."""
    seen = dict(_listed(env._visit_transforms(_seeing, ALL)))
    if unseen := [name for name, has_seen in seen.items() if not has_seen]:
        warn(
            f"evaluate() passes the policy observations that {', '.join(unseen)} has not normalised, because it has seen no "
            "data. Load what it has seen in training: env.transform.load_state_dict(train_env.transform.state_dict()).",
        )


def _seeing(transform: Any, earlier: Any) -> dict[str, bool]:
    """Return which transforms of a chain that normalise observations have seen some."""
    return {
        f"{type(one).__name__}({one.in_keys})": one.has_seen_data
        for one in transform.modules()
        if isinstance(one, VecNorm | VecNormV2)
        and any(as_path(key)[-1] != "reward" for key in one.in_keys)
    }


def _reward(env: EnvBase, key: Key | None, agents: Agents) -> Key:
    """Return which reward makes returns; refuse several that are not told apart."""
    checked_agents(agents)
    sizes = {
        one: env.full_reward_spec[one].shape[env.batch_dims :].numel() for one in env.reward_keys
    }
    chosen = list(sizes) if key is None else [as_key(as_path(key))]
    name = type(env).__name__
    if not sizes.keys() >= set(chosen):
        raise MissingKeyError(
            f"reward_key is {key!r}, but {name} has the rewards {list(sizes)}. Pass one of these."
        )
    if len(chosen) == 1 and (agents is not None or sizes[chosen[0]] == 1):
        return chosen[0]
    if len(chosen) > 1:
        cure = (
            f"Name one: reward_key={min(chosen, key=lambda one: (sizes[one], one != 'reward'))!r}."
        )
    elif env.full_reward_spec[chosen[0]].shape[-1] > 1:
        cure = f"Append a transform that weighs them: LineariseRewards([{chosen[0]!r}])."
    else:
        cure = "Make one of those of several agents: agents='mean' or agents='sum'."
    raise ArgumentError(
        f"{name} gives the rewards {sizes} (entries, and how many numbers each for a row), but a return is the sum of "
        f"one number a step. {cure}"
    )
