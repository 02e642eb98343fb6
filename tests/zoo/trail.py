"""A game whose observation tells everything: which episode it is, which step, and all actions so far.

Its arithmetic is whole numbers, exact in float32 and the same for Python, NumPy, torch and JAX, so that
every world plays it alike and data that is off by one row, step, action or episode shows.
`TrailGym` plays it for gymnasium, `TrailEnv`, `TrailBatch` and `TrailData` as envs of one's own, and
`tests.zoo.jax_trail` in JAX, apart from here so that workers import no JAX.

Conventions
    start        number that an episode begins with, 0 .. 22; the n-th of a seed is ``start_of(seed, n)``.
    trail        what the actions since then came to, 0 .. 996.
    observation  float32 (3,): start, steps, trail.
    action       one of four choices: numbers (`Discrete`), or a `Box` of one number that is rounded down.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from envkit.env.base import EnvBase
from envkit.specs import Bounded, Categorical, Composite, OneHot, Unbounded

CHOICES = 4
STARTS = 23


def start_of(seed, episode):
    return (seed + 7 * episode) % STARTS


def followed(start, trail, choice):
    """Give the trail after one more choice."""
    return (trail * 4 + choice + start + 1) % 997


def reward_of(trail):
    return trail + 1


def is_terminated(trail):
    return trail % 5 == 0


def is_truncated(start, steps):
    """The game ends itself for want of time, by steps that depend on where it began: 3 to 6."""
    return steps >= 3 + start % 4


def next_choice(steps, trail):
    """What the policy of all tests does."""
    return (3 * steps + trail) % CHOICES


class Trail:
    """One player's game, in plain Python.

    Args:
        seed: what its episodes begin from.
        episodes: how many have begun.
    """

    def __init__(self, seed: int = 0, episodes: int = 0):
        self.seed, self.episodes = seed, episodes
        self.start = self.steps = self.trail = 0

    def reset(self) -> None:
        self.start = start_of(self.seed, self.episodes)
        self.episodes += 1
        self.steps = self.trail = 0

    def step(self, choice: int) -> tuple[float, bool, bool]:
        """Give reward, terminated, truncated; both flags may be set."""
        self.trail = followed(self.start, self.trail, choice)
        self.steps += 1
        ends = is_terminated(self.trail), is_truncated(self.start, self.steps)
        return float(reward_of(self.trail)), *ends

    @property
    def observation(self) -> list[float]:
        return [float(self.start), float(self.steps), float(self.trail)]


class TrailGym(gymnasium.Env):
    """The game for gymnasium; ``box`` takes actions from a `Box`."""

    observation_space = spaces.Box(0, 1000, (3,))

    def __init__(self, box: bool = False):
        self.action_space = spaces.Box(0.0, 3.0, (1,)) if box else spaces.Discrete(CHOICES)
        self.game = Trail()

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.game = Trail(seed)
        self.game.reset()
        return np.array(self.game.observation, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        reward, terminated, truncated = self.game.step(int(np.asarray(action).item()))
        return np.array(self.game.observation, np.float32), reward, terminated, truncated, {}


class TrailEnv(EnvBase):
    """The game as a stateful env of one's own; actions are numbers of shape ()."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.game = Trail()
        self.observation_spec = Composite(observation=Unbounded((3,)))
        self.action_spec = Categorical(CHOICES, shape=())
        self.reward_spec = Unbounded((1,))
        self.add_truncated_keys()

    def _reset(self, td, **kwargs):
        self.game.reset()
        return TensorDict({"observation": torch.tensor(self.game.observation)}, [])

    def _step(self, td):
        reward, terminated, truncated = self.game.step(int(td["action"]))
        return TensorDict(
            {
                "observation": torch.tensor(self.game.observation),
                "reward": torch.tensor([reward]),
                "terminated": torch.tensor([terminated]),
                "truncated": torch.tensor([truncated]),
            },
            [],
        )

    def _set_seed(self, seed):
        self.game = Trail(seed)
        self.game.reset()  # as gymnasium does


class TrailBatch(EnvBase):
    """Several games in one object, which honours masks by itself; one-hot actions.

    Row i is seeded with ``seed + 100 * i``.
    """

    def __init__(self, rows: int = 3):
        super().__init__(batch_size=[rows])
        self.games = [Trail() for _ in range(rows)]
        self.observation_spec = Composite(observation=Unbounded((rows, 3)), shape=[rows])
        self.action_spec = OneHot(CHOICES, (rows, CHOICES))
        self.reward_spec = Unbounded((rows, 1))
        self.add_truncated_keys()

    def _shown(self) -> torch.Tensor:
        return torch.tensor([game.observation for game in self.games])

    def _reset(self, td, **kwargs):
        mask = None if td is None else td.get("_reset", None)
        chosen = [True] * len(self.games) if mask is None else mask.flatten().tolist()
        for game, begins in zip(self.games, chosen, strict=True):
            if begins:
                game.reset()
        return TensorDict({"observation": self._shown()}, self.batch_size)

    def _step(self, td):
        mask = td.get("_step", None)
        moving = [True] * len(self.games) if mask is None else mask.flatten().tolist()
        choices = td["action"].float().argmax(-1).tolist()
        flags = {name: td[name].flatten().tolist() for name in ("terminated", "truncated")}
        outcomes = [
            game.step(choice) if moves else (0.0, *kept)
            for game, choice, moves, *kept in zip(
                self.games, choices, moving, *flags.values(), strict=True
            )
        ]
        reward, terminated, truncated = (
            torch.tensor(column).unsqueeze(-1) for column in zip(*outcomes, strict=True)
        )
        return TensorDict(
            {
                "observation": self._shown(),
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
            },
            self.batch_size,
        )

    def _set_seed(self, seed):
        self.games = [Trail(seed + 100 * row) for row in range(len(self.games))]
        for game in self.games:
            game.reset()


class TrailData(EnvBase):
    """The game as a stateless env in torch: all of it is in the data, ``game``, and any batch will do.

    ``game`` holds seed, number of the next episode, start, steps and trail, int64. Each reset from
    nothing gives every row a seed of its own.
    """

    _batch_locked = False

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        batch = self.batch_size
        self.resets = self.seed = 0
        whole = Composite(game=Unbounded((*batch, 5), dtype=torch.int64), shape=batch)
        self.state_spec = whole
        self.observation_spec = Composite(
            observation=Unbounded((*batch, 3)), game=whole["game"].clone(), shape=batch
        )
        self.action_spec = Bounded(0.0, 3.0, (*batch, 1))
        self.reward_spec = Unbounded((*batch, 1))
        self.add_truncated_keys()

    def _reset(self, td, **kwargs):
        game = None if td is None else td.get("game", None)
        if game is None:
            batch = self.batch_size if td is None else td.batch_size
            rows = torch.arange(batch.numel()).reshape(batch)
            seed = (self.seed + 100 * rows + 10000 * self.resets) % 2**32
            episode = torch.zeros_like(seed)
            self.resets += 1
        else:
            batch, (seed, episode) = td.batch_size, game.unbind(-1)[:2]
        nothing = torch.zeros_like(seed)
        begun = [seed, episode + 1, start_of(seed, episode), nothing, nothing]
        return TensorDict(self._shown(torch.stack(begun, -1)), batch)

    def _step(self, td):
        seed, episode, start, steps, trail = td["game"].unbind(-1)
        trail = followed(start, trail, td["action"].squeeze(-1).long())
        steps = steps + 1
        ends = is_terminated(trail), is_truncated(start, steps)
        terminated, truncated = (flags.unsqueeze(-1) for flags in ends)
        game = torch.stack([seed, episode, start, steps, trail], -1)
        outcome = {
            "reward": reward_of(trail).float().unsqueeze(-1),
            "terminated": terminated,
            "truncated": truncated,
        }
        return TensorDict(self._shown(game) | outcome, td.batch_size)

    def _shown(self, game: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"game": game, "observation": game[..., 2:].float()}

    def _set_seed(self, seed):
        self.seed, self.resets = seed, 0
