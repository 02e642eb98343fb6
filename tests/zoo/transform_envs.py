"""Environments of the transform tests: several done levels, self-resetting simulators, rendering.

Conventions
    count    int64, +1 a step, as in `tests.zoo.envs.Count`.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict

from envkit import (
    ActionMask,
    Binary,
    Categorical,
    Compose,
    Composite,
    ConditionalSkip,
    EnvBase,
    NoopResetEnv,
    RemoveEmptySpecs,
    StepCounter,
    TrajCounter,
    TransformedEnv,
    Unbounded,
    VecNorm,
)
from tests.zoo.envs import Count


class TwoTeams(EnvBase):
    """Two groups with rewards and done flags of their own, and none at the root."""

    _batch_locked = False

    def __init__(self, ends=(2, 3), **kwargs):
        super().__init__(**kwargs)
        self.ends = dict(zip(("a", "b"), ends, strict=True))
        bs = self.batch_size
        counts = {
            name: Composite(count=Unbounded((*bs, 1), dtype=torch.int64), shape=bs)
            for name in self.ends
        }
        self.observation_spec = Composite(counts, shape=bs)
        self.state_spec = Composite({k: v.clone() for k, v in counts.items()}, shape=bs)
        self.action_spec = Categorical(2, shape=(*bs, 1))
        flag = Categorical(2, shape=(*bs, 1), dtype=torch.bool)
        self.done_spec = Composite(
            {name: Composite(done=flag.clone(), shape=bs) for name in self.ends}, shape=bs
        )
        self.reward_spec = Composite(
            {name: Composite(reward=Unbounded((*bs, 1)), shape=bs) for name in self.ends}, shape=bs
        )

    def _out(self, counts, batch, rewards):
        out = TensorDict(batch_size=batch)
        for name, end in self.ends.items():
            out[name, "count"] = counts[name]
            out[name, "done"] = counts[name] >= end
            if rewards:
                out[name, "reward"] = torch.ones(*batch, 1)
        return out

    def _reset(self, td, **kwargs):
        batch = self.batch_size if td is None else td.batch_size
        zeros = {name: torch.zeros(*batch, 1, dtype=torch.int64) for name in self.ends}
        return self._out(zeros, batch, rewards=False)

    def _step(self, td):
        counts = {name: td[name, "count"] + 1 for name in self.ends}
        return self._out(counts, td.batch_size, rewards=True)

    def _set_seed(self, seed):
        pass


class Team(EnvBase):
    """A root done flag, and one of each of three agents below it."""

    def __init__(self, end=9, **kwargs):
        super().__init__(**kwargs)
        self.end = end
        self.observation_spec = Composite(count=Unbounded((1,), dtype=torch.int64))
        self.action_spec = Categorical(2, shape=(1,))
        self.done_spec = Composite(
            done=Categorical(2, shape=(1,), dtype=torch.bool),
            agents=Composite(done=Categorical(2, shape=(3, 1), dtype=torch.bool)),
        )

    def _out(self):
        done = torch.tensor([self.c >= self.end])
        agents = TensorDict({"done": done.expand(3, 1).clone()})
        return TensorDict({"count": torch.tensor([self.c]), "done": done, "agents": agents})

    def _reset(self, td, **kwargs):
        self.c = 0
        return self._out()

    def _step(self, td):
        self.c += 1
        return self._out().set("reward", torch.ones(1))

    def _set_seed(self, seed):
        pass


class Twins(EnvBase):
    """Two agents that are alike, with observations, actions, rewards and done flags of their own."""

    def __init__(self, end=3):
        super().__init__()
        self.end = end
        count = Composite(count=Unbounded((1,), dtype=torch.int64))
        self.observation_spec = Composite(a=count, b=count.clone())
        action = Composite(action=Categorical(2, shape=(1,)))
        self.action_spec = Composite(a=action, b=action.clone())
        reward = Composite(reward=Unbounded((1,)))
        self.reward_spec = Composite(a=reward, b=reward.clone())
        flag = Composite(done=Categorical(2, shape=(1,), dtype=torch.bool))
        self.done_spec = Composite(a=flag, b=flag.clone())

    def _out(self, **reward):
        done = torch.tensor([self.c >= self.end])
        parts = {
            name: {"count": torch.tensor([self.c + place]), "done": done.clone(), **reward}
            for place, name in enumerate("ab")
        }
        return TensorDict(parts)

    def _reset(self, td, **kwargs):
        self.c = 0
        return self._out()

    def _step(self, td):
        self.c += 1
        return self._out(reward=torch.ones(1))

    def _set_seed(self, seed):
        pass


class SelfResetting(EnvBase):
    """One simulator that begins anew in the step that ends an episode."""

    def __init__(self, n=3, **kwargs):
        super().__init__(**kwargs)
        self.n, self.resets, self.c = n, 0, 0
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64),
            level=Unbounded((1,)),
            lamp=Categorical(2, shape=(1,), dtype=torch.bool),
            face=Categorical(6, shape=(1,), dtype=torch.int64),
        )
        self.action_spec = Categorical(2, shape=(1,))

    def _out(self, ended=False):
        return TensorDict(
            {
                "count": torch.tensor([self.c]),
                "level": torch.tensor([self.c / 2]),
                "lamp": torch.tensor([True]),
                "face": torch.tensor([self.c % 6]),
                "terminated": torch.tensor([ended]),
            }
        )

    def _reset(self, td, **kwargs):
        self.resets += 1
        self.c = 0
        return self._out()

    def _step(self, td):
        self.c += 1
        ended = self.c == self.n
        if ended:
            self.c = 0
        return self._out(ended).set("reward", torch.ones(1))

    def _set_seed(self, seed):
        pass


class SelfResettingRows(EnvBase):
    """A vector env that resets rows by itself and gives their last observations under ``final``."""

    def __init__(self, ends=(2, 3), final=True):
        super().__init__(batch_size=[len(ends)])
        self.ends = torch.tensor(ends)[:, None]
        self.count = torch.zeros_like(self.ends)
        self.final, self.resets = final, []
        n = len(ends)
        observation = Composite(count=Unbounded((n, 1)), shape=[n])
        if final:
            observation["final"] = Composite(count=Unbounded((n, 1)), shape=[n])
        self.observation_spec = observation
        self.action_spec = Categorical(2, shape=(n, 1))

    def _out(self, last):
        out = TensorDict({"count": self.count.float()}, self.batch_size)
        if self.final:
            out["final", "count"] = last.float()
        return out

    def _reset(self, td, **kwargs):
        mask = None if td is None else td.get("_reset", None)
        rows = torch.ones_like(self.ends, dtype=torch.bool) if mask is None else mask.reshape(-1, 1)
        self.resets.append(rows.flatten().tolist())
        self.count = torch.where(rows, 0, self.count)
        return self._out(self.count)

    def _step(self, td):
        moves = td.get("_step", torch.ones(self.batch_size, dtype=torch.bool))[:, None]
        last = self.count + moves
        ended = moves & (last == self.ends)
        self.count = torch.where(ended, 0, last)
        return self._out(last).update({"reward": moves.float(), "terminated": ended})

    def _set_seed(self, seed):
        pass


class Drawn(EnvBase):
    """Draws its count as a grey frame, once it was reset."""

    frame = None

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(count=Unbounded((1,), dtype=torch.int64))
        self.action_spec = Categorical(2, shape=(1,))

    def render(self, scale=1):
        if self.frame is None:
            raise RuntimeError("reset first")
        return self.frame * scale

    def _out(self, count):
        self.frame = torch.full((2, 2, 3), count, dtype=torch.uint8).numpy()
        self.count = count
        return TensorDict({"count": torch.tensor([count])})

    def _reset(self, td, **kwargs):
        return self._out(0)

    def _step(self, td):
        return self._out(self.count + 1).set("terminated", torch.tensor([self.count == 4]))

    def _set_seed(self, seed):
        pass


class Hollow(EnvBase):
    """Declares a node without leaves, among its outputs and among its inputs."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), extra=Composite(deep=Composite())
        )
        self.state_spec = Composite(options=Composite())
        self.action_spec = Categorical(2, shape=(1,))
        self.options_seen = None

    def _out(self, count):
        self.count = count
        extra = TensorDict({"deep": TensorDict()})
        return TensorDict({"count": torch.tensor([count]), "extra": extra})

    def _reset(self, td, **kwargs):
        return self._out(0)

    def _step(self, td):
        self.options_seen = td.get("options", None)
        return self._out(self.count + 1).set("terminated", torch.tensor([self.count == 4]))

    def _set_seed(self, seed):
        pass


class Cards(EnvBase):
    """A few cards, each of which can be played once; ends with the last one."""

    def __init__(self, spec=None, cards=4, **kwargs):
        super().__init__(**kwargs)
        self.cards = cards
        self.observation_spec = Composite(action_mask=Binary(cards, dtype=torch.bool))
        self.action_spec = Categorical(cards) if spec is None else spec

    def _reset(self, td, **kwargs):
        self.mask = torch.ones(self.cards, dtype=torch.bool)
        return TensorDict({"action_mask": self.mask})

    def _step(self, td):
        card = td["action"].int().argmax() if td["action"].ndim else td["action"]
        assert self.mask[card], "played twice"
        self.mask = self.mask & (torch.arange(self.cards) != card)
        return TensorDict(
            {"action_mask": self.mask, "terminated": ~self.mask.any(), "reward": torch.ones(1)}
        )

    def _set_seed(self, seed):
        pass


def masked(cards=4) -> TransformedEnv:
    """Cards whose random actions are allowed ones. Made here, since workers import this module fast."""
    return TransformedEnv(Cards(cards=cards), ActionMask())


def counted() -> TransformedEnv:
    """A count behind what looks at masks itself, draws, and shares numbers; an action of 1 is skipped."""
    transforms = (
        StepCounter(4),
        NoopResetEnv(2, random=False),
        ConditionalSkip(lambda td: td["action"].bool().all()),
        RemoveEmptySpecs(),
        TrajCounter(),
        VecNorm(["count"], ["normal"]),
    )
    return TransformedEnv(Count(5), Compose(*transforms))
