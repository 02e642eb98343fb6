"""Small torch envs of unusual shape: groups of agents, several actions and rewards, words.

Conventions
    Each counts its steps like `tests.zoo.envs.Count` and ends at ``n``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from tensordict import NonTensorData, TensorDict

from envkit.env.base import EnvBase
from envkit.specs import Bounded, Categorical, Composite, NonTensor, OneHot, Unbounded

FLAG = Categorical(2, shape=(1,), dtype=torch.bool)


class Quiet(EnvBase):
    """What the others share: a count, an end, and nothing to seed."""

    def __init__(self, n: int = 5, **kwargs):
        super().__init__(**kwargs)
        self.n, self.c = n, 0

    def _reset(self, td, **kwargs):
        self.c = 0
        return self._out()

    def _step(self, td):
        self.c += 1
        return self._out().update(self._rewards(td))

    def _rewards(self, td):
        return {}

    def _set_seed(self, seed):
        pass


class Groups(Quiet):
    """Two groups of agents, of 2 and of 3, each with its own entries and flags, and root flags.

    Every agent has flags of its own; those of group ``agent0`` end a step before the rest.
    """

    SIZES: ClassVar = {"agent0": 2, "agent1": 3}

    def __init__(self, n: int = 5, **kwargs):
        super().__init__(n, **kwargs)
        self.observation_spec = Composite(
            {
                name: Composite(position=Unbounded((size, 2)), shape=(size,))
                for name, size in self.SIZES.items()
            }
        )
        self.action_spec = Composite(
            {
                name: Composite(action=OneHot(4, shape=(size, 4)), shape=(size,))
                for name, size in self.SIZES.items()
            }
        )
        self.reward_spec = Composite(
            {
                name: Composite(reward=Unbounded((size, 1)), shape=(size,))
                for name, size in self.SIZES.items()
            }
        )
        self.done_spec = Composite(
            agent0=Composite(done=FLAG.expand(2, 1), shape=(2,)),
            agent1=Composite(terminated=FLAG.expand(3, 1), shape=(3,)),
            done=FLAG.clone(),
        )

    def _out(self):
        early = torch.full((2, 1), self.c >= self.n - 1)
        late = torch.full((3, 1), self.c >= self.n)
        return TensorDict(
            {
                "agent0": TensorDict(
                    {"position": torch.full((2, 2), float(self.c)), "done": early}, [2]
                ),
                "agent1": TensorDict(
                    {"position": torch.full((3, 2), float(self.c)), "terminated": late}, [3]
                ),
                "done": late[0],
            }
        )

    def _rewards(self, td):
        return TensorDict(
            {
                name: TensorDict({"reward": torch.ones(size, 1)}, [size])
                for name, size in self.SIZES.items()
            }
        )


class Several(Quiet):
    """Two actions and two rewards at different depths, and done flags at two levels."""

    def __init__(self, n: int = 5, **kwargs):
        super().__init__(n, **kwargs)
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), deep=Composite(twice=Unbounded((2,)))
        )
        self.action_spec = Composite(
            deep=Composite(force=Bounded(-1.0, 1.0, (2,))), button=Categorical(3, shape=(1,))
        )
        self.reward_spec = Composite(deep=Composite(cost=Unbounded((1,))), gain=Unbounded((1,)))
        self.done_spec = Composite(
            terminated=FLAG.clone(), truncated=FLAG.clone(), deep=Composite(done=FLAG.clone())
        )

    def _out(self):
        ended = torch.tensor([self.c >= self.n])
        return TensorDict(
            {
                "count": torch.tensor([self.c]),
                "deep": {"twice": torch.full((2,), 2.0 * self.c), "done": ended},
                "terminated": torch.zeros(1, dtype=torch.bool),
                "truncated": ended,
            }
        )

    def _rewards(self, td):
        return TensorDict(
            {"deep": {"cost": -td["deep", "force"].sum(-1, keepdim=True)}, "gain": torch.ones(1)}
        )


class Wordy(Quiet):
    """Says its count in words; non-tensor data."""

    WORDS = ("none", "one", "two", "three", "four", "many")

    def __init__(self, n: int = 5, **kwargs):
        super().__init__(n, **kwargs)
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), word=NonTensor(example_data="none")
        )
        self.action_spec = Categorical(2, shape=(1,))

    def _out(self):
        return TensorDict(
            {
                "count": torch.tensor([self.c]),
                "word": NonTensorData(self.WORDS[min(self.c, 5)]),
                "terminated": torch.tensor([self.c >= self.n]),
            }
        )


class Growing(Quiet):
    """Its observation grows by a row a step: a spec with a size only the data can tell."""

    def __init__(self, n: int = 5, **kwargs):
        super().__init__(n, **kwargs)
        self.observation_spec = Composite(history=Unbounded((-1, 2)))
        self.action_spec = Categorical(2, shape=(1,))

    def _out(self):
        return TensorDict(
            {"history": torch.zeros(self.c + 1, 2), "terminated": torch.tensor([self.c >= self.n])}
        )
