"""Games of PettingZoo stepped by hand beside envkit's: the same observations, rewards and flags, to the bit.

Conventions
    bare     the library's own object; dead agents take their turns, which do nothing, at once.
    expected what a moment of it says of one agent: observation (None of the dead), reward, flags, allowed actions.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from tensordict import TensorDictBase

from envkit import PettingZooEnv

PACKAGES = {"mpe": "mpe2"}


class Told(NamedTuple):
    observation: Any
    reward: float
    ends: tuple[bool, bool]
    acts: bool
    allowed: Any


def make_bare(task: str, parallel: bool, **kwargs: Any) -> Any:
    family, _, name = task.partition("/")
    with told_nothing():
        module = importlib.import_module(f"{PACKAGES.get(family, f'pettingzoo.{family}')}.{name}")
        return (module.parallel_env if parallel else module.env)(**kwargs)


class ByHand:
    """A bare env and what it told last, by agent."""

    def __init__(self, task: str, parallel: bool, **kwargs: Any):
        self.env, self.parallel = make_bare(task, parallel, **kwargs), parallel
        self.shown: dict[str, Told] = {}

    def reset(self, seed: int | None = None) -> None:
        result = self.env.reset(seed=seed)
        ends = dict.fromkeys(self.env.possible_agents, (False, False))
        if self.parallel:
            observations, infos = result
        else:
            observations, infos = self._observed(), self.env.infos
        self._tell(observations, {}, ends, infos)

    def step(self, actions: dict[str, Any]) -> None:
        ends = {name: shown.ends for name, shown in self.shown.items()}
        if self.parallel:
            living = {name: actions[name] for name in self.env.agents}
            observations, rewards, terminated, truncated, infos = self.env.step(living)
        else:
            env = self.env
            env.step(actions[env.agent_selection])
            observations, infos = self._observed(), dict(env.infos)
            rewards, terminated = dict(env.rewards), dict(env.terminations)
            truncated = dict(env.truncations)
        ends |= {name: (bool(terminated[name]), bool(truncated[name])) for name in terminated}
        if not self.parallel and not all(map(any, ends.values())):
            while env.terminations[env.agent_selection] or env.truncations[env.agent_selection]:
                env.step(None)
        self._tell(observations, rewards, ends, infos)

    def _observed(self) -> dict[str, Any]:
        return {name: self.env.observe(name) for name in self.env.agents}

    def _tell(self, observations: Any, rewards: Any, ends: Any, infos: Any) -> None:
        acting = self.env.agents if self.parallel else [self.env.agent_selection]
        for name in self.env.possible_agents:
            seen = observations.get(name)
            allowed = infos.get(name, {}).get("action_mask") if seen is not None else None
            if isinstance(seen, dict):
                allowed, seen = seen["action_mask"], seen["observation"]
            space = self.env.observation_space(name)
            if isinstance(space, gymnasium.spaces.Discrete) and seen is not None:
                seen = np.eye(int(space.n), dtype=np.int64)[seen]
            acts = name in acting
            allowed = allowed if acts and np.any(allowed) else None
            seen = None if seen is None else np.array(seen)
            self.shown[name] = Told(seen, rewards.get(name, 0), ends[name], acts, allowed)


def require_same(env: PettingZooEnv, td: TensorDictBase, hand: ByHand, *, stepped: bool) -> None:
    """Compare what a root or ``next`` says of each agent with what was told by hand."""
    for group, names in env.group_map.items():
        node = td.get(group)
        for index, name in enumerate(names):
            agent, expected = node[index], hand.shown[name]
            seen = agent.get("observation")
            seen = seen.get("observation") if isinstance(seen, TensorDictBase) else seen
            if expected.observation is None:
                assert not seen.any(), name
            else:
                assert seen.numpy().dtype == expected.observation.dtype, name
                assert np.array_equal(seen.numpy(), expected.observation), name
            assert bool(agent["terminated"]) == expected.ends[0], name
            assert bool(agent["truncated"]) == expected.ends[1], name
            assert bool(agent["done"]) == any(expected.ends), name
            assert bool(agent["mask"]) == expected.acts, name
            if stepped:
                reward = expected.reward if expected.observation is not None else 0
                assert agent["reward"].item() == np.float32(reward), name
            if env.has_action_mask[group]:
                allowed = agent["action_mask"].numpy()
                assert np.array_equal(
                    allowed, np.ones_like(allowed) if expected.allowed is None else expected.allowed
                )


def actions_in(env: PettingZooEnv, td: TensorDictBase) -> dict[str, Any]:
    """Spell the actions of all agents as the library takes them; discrete ones are integers."""
    actions = {}
    for group, names in env.group_map.items():
        for index, name in enumerate(names):
            value = td.get(group)[index].get("action").numpy()
            actions[name] = value if value.ndim else int(value)
    return actions


@contextmanager
def told_nothing() -> Iterator[None]:
    """Leave out what the bare library warns of: Cooperative Pong says at each step that it shows nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def play_beside_the_library(
    task: str,
    parallel: bool,
    steps: int,
    *,
    seeds: Iterator[int | None] | None = None,
    **kwargs: Any,
) -> int:
    """Step both with random actions and compare all they say; gives the number of games that ended.

    ``seeds`` are given to each reset; without them only the first one is seeded.
    """
    seeds = itertools.chain((3,), itertools.repeat(None)) if seeds is None else seeds
    env = PettingZooEnv(task, parallel, use_mask=True, done_on_any=False, **kwargs)
    hand = ByHand(task, parallel, **kwargs)

    def reset() -> TensorDictBase:
        seed = next(seeds)
        with told_nothing():
            hand.reset(seed=seed)
        return env.reset(seed=seed)

    ended, td = 0, reset()
    require_same(env, td, hand, stepped=False)
    for _ in range(steps):
        td = env.rand_action(td)
        with told_nothing():
            hand.step(actions_in(env, td))
        following = env.step(td)["next"]
        require_same(env, following, hand, stepped=True)
        over = all(any(shown.ends) for shown in hand.shown.values())
        assert bool(following["done"]) == over
        ended += over
        td = reset() if over else env.step_mdp(td)
        require_same(env, td, hand, stepped=False)
    env.close()
    return ended
