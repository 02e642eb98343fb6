"""Small real environments that tests share.

Conventions
    Count(n)  observation ``count`` int64 (1,), starts at 0, +1 a step, reward 1.0, terminated at n.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch
from tensordict import TensorDict

from envkit.env.base import EnvBase
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
    """Counts and draws numbers, and goes wrong as `FAULTS` says.

    In a step its action says how. Anywhere else an order does, see `order_fault`.
    ``draw`` float32 (1,) comes from a generator that only `set_seed` touches.
    """

    FAULTS = ("none", "raise", "exit", "kill", "hang", "misfit")

    def __init__(self, n: int = 7, orders: Path | None = None):
        self.orders = orders
        self._obey("constructor")
        super().__init__(n)
        self.generator = torch.Generator().manual_seed(0)
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), draw=Unbounded((1,))
        )
        self.action_spec = Categorical(len(self.FAULTS), shape=(1,))
        self.add_truncated_keys()

    def _out(self) -> TensorDict:
        return super()._out().set("draw", torch.rand(1, generator=self.generator))

    def _reset(self, td, **kwargs):
        self._obey("reset")
        return super()._reset(td)

    def _step(self, td):
        fault = self.FAULTS[int(td["action"])]
        fail(fault, f"cannot go on from {self.c}")
        out = super()._step(td)
        return out.set("count", torch.zeros(3)) if fault == "misfit" else out

    def _set_seed(self, seed):
        self._obey("set_seed")
        super()._set_seed(seed)
        self.generator.manual_seed(seed)

    def visit(self) -> int:
        """Give the count, unless ordered otherwise."""
        self._obey("visit")
        return self.c

    def lock(self):
        """Give what no process can send to another."""
        return threading.Lock()

    def _obey(self, place: str) -> None:
        if self.orders is not None:
            obey(self.orders, place)


def obey(orders: Path, place: str) -> None:
    """Go wrong if `order_fault` has said so."""
    order = orders / place
    if not order.exists():
        return
    fault, times = order.read_text().split()
    if times == "1":
        order.unlink()
    else:
        order.write_text(f"{fault} {int(times) - 1}")
    fail(fault, f"was told to fail in {place}")


def order_fault(orders: Path, place: str, fault: str, times: int = 1) -> None:
    """Make the next ``times`` visits of a `Chaos` to a place go wrong, in whatever process it is.

    Args:
        orders: folder that the env was given.
        place: constructor, reset, set_seed or visit.
    """
    (orders / place).write_text(f"{fault} {times}")


def fail(fault: str, message: str) -> None:
    """Raise, or end or stop this process; do nothing for what is no such fault."""
    if fault == "raise":
        raise ValueError(message)
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(1000)
