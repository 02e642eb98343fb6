"""Small real environments that tests share.

Conventions
    Count(n)  observation ``count`` int64 (1,), starts at 0, +1 a step, reward 1.0, terminated at n.
"""

from __future__ import annotations

import os
import signal
import time

import torch
from tensordict import TensorDict

from envkit.base import EnvBase
from envkit.specs import Categorical, Composite, Unbounded


class Count(EnvBase):
    """Counts steps; a stateful env of batch size []."""

    def __init__(self, n: int = 5, **kwargs):
        super().__init__(**kwargs)
        self.n = n
        self.c = 0
        self.seed_seen = None
        self.steps = 0
        self.observation_spec = Composite(count=Unbounded((1,), dtype=torch.int64))
        self.action_spec = Categorical(2, shape=(1,))
        self.reward_spec = Unbounded((1,))

    @property
    def maxs(self) -> int:
        return self.n

    def hello(self, x: int) -> int:
        return self.n + x

    def _out(self) -> TensorDict:
        done = torch.tensor([self.c >= self.n])
        return TensorDict(
            {"count": torch.tensor([self.c]), "done": done, "terminated": done.clone()}, []
        )

    def _reset(self, td, **kwargs):
        self.c = 0
        return self._out()

    def _step(self, td):
        self.c += 1
        self.steps += 1
        return self._out().set("reward", torch.ones(1))

    def _set_seed(self, seed):
        self.seed_seen = seed


class Slow(Count):
    """Takes ``delay_s`` a step, and notes when its last step began and ended."""

    times = (0.0, 0.0)

    def __init__(self, delay_s: float):
        super().__init__(9)
        self.delay_s = delay_s

    def _step(self, td):
        began = time.monotonic()
        time.sleep(self.delay_s)
        self.times = began, time.monotonic()
        return super()._step(td)


class StatelessCount(EnvBase):
    """The same rule, batch-unlocked: reads the count from its input."""

    _batch_locked = False

    def __init__(self, n: int = 5, **kwargs):
        super().__init__(**kwargs)
        self.n = n
        self.calls = 0
        bs = self.batch_size
        spec = Composite(count=Unbounded((*bs, 1), dtype=torch.int64), shape=bs)
        self.observation_spec = spec
        self.state_spec = spec.clone()
        self.action_spec = Categorical(2, shape=(*bs, 1))

    def _reset(self, td, **kwargs):
        batch = self.batch_size if td is None else td.batch_size
        return TensorDict({"count": torch.zeros((*batch, 1), dtype=torch.int64)}, batch)

    def _step(self, td):
        self.calls += 1
        count = td["count"] + 1
        return TensorDict(
            {"count": count, "reward": torch.ones(count.shape), "done": count >= self.n},
            td.batch_size,
        )

    def _set_seed(self, seed):
        pass


class Chaos(Count):
    """Counts and draws numbers; its action says how the step goes wrong, see `FAULTS`.

    ``draw`` float32 (1,) comes from a generator that only `set_seed` touches.
    """

    FAULTS = ("none", "raise", "exit", "kill", "hang")

    def __init__(self, n: int = 7):
        super().__init__(n)
        self.generator = torch.Generator().manual_seed(0)
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), draw=Unbounded((1,))
        )
        self.action_spec = Categorical(len(self.FAULTS), shape=(1,))
        self.add_truncated_keys()

    def _out(self) -> TensorDict:
        return super()._out().set("draw", torch.rand(1, generator=self.generator))

    def _step(self, td):
        fault = self.FAULTS[int(td["action"])]
        if fault == "raise":
            raise ValueError(f"cannot go on from {self.c}")
        if fault == "exit":
            os._exit(3)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(1000)
        return super()._step(td)

    def _set_seed(self, seed):
        super()._set_seed(seed)
        self.generator.manual_seed(seed)
