"""Random sequences of calls and faults: a pool of processes against its serial twin.

Both get the same calls. Where a row of the pool is to die, hang, be killed or raise, the same row of
the twin raises, and so do the rows that share its process if that ends. So all data must be equal, bit
for bit. Every sequence begins with a seed and a reset, so it can be run alone: the seed of one that
failed is shown.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from envkit import GymWrapper, ParallelEnv, SerialEnv
from tests.zoo.envs import Chaos, fail, obey, order_fault
from tests.zoo.policies import Replay

ROWS, LENGTH = 3, 4
BLOCKS, BLOCK = 5, 100  # of sequences, for each of two ways to exchange data
SHARING = 2  # processes, where rows share one
PATIENCE_S = 2.0  # with a row that hangs
FATAL = ("exit", "kill", "hang")  # for the process

pytestmark = [pytest.mark.usefixtures("warm_fork_server"), pytest.mark.slow]


class GymChaos(gymnasium.Env):
    """What `Chaos` is, as a gymnasium env: its own simulator steps on rows without TensorDicts."""

    action_space = spaces.MultiDiscrete([len(Chaos.FAULTS)])
    observation_space = spaces.Dict(
        count=spaces.Box(0, 99, (1,), np.int64), draw=spaces.Box(0.0, 1.0, (1,), np.float32)
    )

    def __init__(self, n: int, orders: Path):
        self.maxs, self.orders, self.c, self.seed_seen = n, orders, 0, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed_seen = self.seed_seen if seed is None else seed
        obey(self.orders, "reset")
        self.c = 0
        return self._seen(), {}

    def step(self, action):
        fault = Chaos.FAULTS[action[0]]
        fail(fault, f"cannot go on from {self.c}")
        self.c += 1
        seen = self._seen()
        if fault == "misfit":
            seen["count"] = np.zeros(3, np.int64)
        return seen, 1.0, self.c >= self.maxs, False, {}

    def hello(self, x: int) -> int:
        return self.maxs + x

    def _seen(self):
        return {"count": np.array([self.c]), "draw": self.np_random.random(1, np.float32)}


def make_gym(n: int, orders: Path) -> GymWrapper:
    return GymWrapper(GymChaos(n, orders), True)


class Twins:
    """A pool and its serial twin, driven side by side; every answer is compared."""

    def __init__(
        self,
        folder: Path,
        make: Callable = Chaos,
        *,
        use_buffers: bool | None,
        num_processes: int = ROWS,
    ):
        self.orders = [folder / kind for kind in ("parallel", "serial")]
        options = {
            "use_buffers": use_buffers,
            "on_worker_failure": "restart",
            "max_restarts": 10**6,
        }
        kwargs = []
        for kind in self.orders:
            rows = [kind / str(row) for row in range(ROWS)]
            for row in rows:
                row.mkdir(parents=True)
            kwargs.append([{"n": 4, "orders": row} for row in rows])
        self.parallel = ParallelEnv(
            ROWS, make, create_env_kwargs=kwargs[0], num_processes=num_processes, **options
        )
        self.serial = SerialEnv(ROWS, make, create_env_kwargs=kwargs[1], **options)
        self.groups = [list(rows) for rows in self.parallel._started().rows_of]
        self.hangs = False

    def beside(self, row: int) -> list[int]:
        """List the rows of the process that holds a row."""
        return next(group for group in self.groups if row in group)

    def close(self) -> None:
        self.parallel.close(raise_if_closed=False)
        self.serial.close(raise_if_closed=False)

    # ------------------------------------------------------------------------------ one sequence

    def play(self, seed: int, *, hangs: bool = False) -> None:
        self.rng, self.hangs = random.Random(seed), hangs
        self.both(lambda env: env.set_seed(seed))
        self.roots = self.both(lambda env: env.reset())
        kinds = [
            *[self.step, self.step] * 2,
            *[self.advance, self.advance, self.rollout],
            *[self.reset, self.reset_some, self.look, self.seed_again],
        ]
        for _ in range(LENGTH):
            self.rng.choice(kinds)()
        assert not [order for kind in self.orders for order in kind.glob("*/*")]

    def both(self, call: Callable, *lists: list) -> list:
        """Call something on both envs, with arguments of their own, and compare the answers."""
        answers = [
            call(env, *(given[number] for given in lists))
            for number, env in enumerate((self.parallel, self.serial))
        ]
        assert_equal(*answers)
        return answers

    def plan(self, steps: int, rows: list[int]) -> list[torch.Tensor]:
        """Draw actions for both, shape (rows, steps, 1), with a fault in some of ``rows``."""
        taken = [torch.zeros(ROWS, steps, 1, dtype=torch.int64) for _ in range(2)]
        ended: set[int] = set()
        for row in rows:
            if self.rng.random() < 0.12 or self.hangs:
                step = self.rng.randrange(steps)
                fault = self.rng.choices(["raise", "misfit", "exit", "kill"], [16, 4, 1, 1])[0]
                if self.hangs:
                    fault, self.hangs = "hang", False
                beside = self.beside(row)
                if fault in FATAL and not set(beside) <= set(rows):
                    fault = "raise"  # a twin cannot lose rows that are not stepped
                if row in ended:
                    continue
                taken[0][row, step] = Chaos.FAULTS.index(fault)
                for lost in beside if fault in FATAL else [row]:
                    if fault in FATAL:
                        taken[0][lost] *= lost == row  # one fault a process, so that none is hidden
                        taken[1][lost] = 0
                    taken[1][lost, step] = Chaos.FAULTS.index("raise")
                    ended.add(lost)
        return taken

    def mask(self) -> torch.Tensor:
        return torch.tensor([self.rng.random() < 0.6 for _ in range(ROWS)])

    def partial_or_not(self) -> tuple[torch.Tensor | None, list[int]]:
        mask = self.mask() if self.rng.random() < 0.5 else None
        rows = range(ROWS) if mask is None else mask.nonzero().flatten().tolist()
        return mask, list(rows)

    # ------------------------------------------------------------------------------- what can come

    def step(self) -> None:
        mask, rows = self.partial_or_not()
        plan = self.plan(1, rows)
        if mask is None and self.rng.random() < 0.03:
            self.kill(self.rng.choice(rows), plan[1])
        inputs = self.acted(plan, mask)
        done = self.both(lambda env, td: env.step(td), inputs)
        self.roots = self.both(lambda env, td: env.step_mdp(td), done)
        if self.rng.random() < 0.7:
            self.roots = self.both(lambda env, td: env.maybe_reset(td), self.roots)

    def advance(self) -> None:
        mask, rows = self.partial_or_not()
        inputs = self.acted(self.plan(1, rows), mask)
        pairs = self.both(lambda env, td: env.step_and_maybe_reset(td), inputs)
        self.roots = [root for _, root in pairs]

    def rollout(self) -> None:
        steps = self.rng.randint(1, 5)
        plan = self.plan(steps, list(range(ROWS)))
        stop = {"break_when_any_done": False}
        if self.rng.random() < 0.5 and len(self.groups) == ROWS:  # it leaves rows out of steps
            stop = {"break_when_all_done": True}
        runs = self.both(
            lambda env, root, actions: env.rollout(
                steps, Replay(actions), tensordict=root, auto_reset=False, **stop
            ),
            self.roots,
            plan,
        )
        self.roots = self.both(lambda env, td: env.step_mdp(td[:, -1]), runs)

    def reset(self) -> None:
        self.fail_in_reset(list(range(ROWS)))
        self.roots = self.both(lambda env: env.reset())

    def reset_some(self) -> None:
        mask = self.mask()
        self.fail_in_reset(mask.nonzero().flatten().tolist())
        self.roots = self.both(
            lambda env, td: env.reset(td.set("_reset", mask.unsqueeze(-1).clone())), self.roots
        )

    def look(self) -> None:
        self.both(lambda env: list(env.c))
        self.both(lambda env: env.hello(3))
        self.both(lambda env: list(env.seed_seen))

    def seed_again(self) -> None:
        seed = self.rng.randrange(1000)
        self.both(lambda env: env.set_seed(seed))
        self.reset()  # simulators that were seeded are in no episode

    def fail_in_reset(self, rows: list[int]) -> None:
        for group in self.groups:
            ends = len(group) > 1 and self.rng.random() < 0.05 and set(group) <= set(rows)
            if ends:
                order_fault(self.orders[0] / str(group[0]), "reset", "exit")
            for row in group:
                if ends:
                    order_fault(self.orders[1] / str(row), "reset", "raise")
                elif row in rows and self.rng.random() < 0.1:
                    fault = "raise"
                    if len(group) == 1:
                        fault = self.rng.choices(["raise", "exit"], [8, 1])[0]
                    for folder, name in zip(self.orders, (fault, "raise"), strict=True):
                        order_fault(folder / str(row), "reset", name)

    def kill(self, row: int, actions_of_twin: torch.Tensor) -> None:
        """Kill the idle worker of a row; the next step of the rows it held raises in the twin."""
        beside = self.beside(row)
        victim = psutil.Process(self.parallel.worker_pids[self.groups.index(beside)])
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait(10.0)
        actions_of_twin[beside] = Chaos.FAULTS.index("raise")

    def acted(self, plan: list[torch.Tensor], mask: torch.Tensor | None) -> list[TensorDictBase]:
        inputs = [
            root.copy().set("action", actions[:, 0].clone())
            for root, actions in zip(self.roots, plan, strict=True)
        ]
        if mask is not None:
            for td in inputs:
                td.set("_step", mask.clone())
        return inputs


def assert_equal(left, right) -> None:
    """Compare answers bit for bit; what was asked of either is its own."""
    if not isinstance(left, TensorDictBase):
        if isinstance(left, tuple):
            for pair in zip(left, right, strict=True):
                assert_equal(*pair)
        else:
            assert left == right
        return
    assert left.batch_size == right.batch_size
    left, right = left.exclude("action"), right.exclude("action")
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        assert torch.equal(left[key], right[key]), f"{key!r}: {left[key]} and {right[key]}"


KINDS = {
    "buffers": {"use_buffers": True},
    "tds": {"use_buffers": False},
    "shared": {"use_buffers": None, "num_processes": SHARING},
    "shared tds": {"use_buffers": False, "num_processes": SHARING},
    "gym": {"make": make_gym, "use_buffers": None, "num_processes": SHARING},
}


@pytest.fixture(scope="module", params=KINDS)
def twins(request, tmp_path_factory):
    twins = Twins(tmp_path_factory.mktemp("orders"), **KINDS[request.param])
    yield twins
    twins.close()


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=pytest.mark.sweep if block > 1 else ()) for block in range(BLOCKS)],
)
def test_random_calls_and_faults_give_the_data_of_the_serial_twin(twins, block):
    count = BLOCK if len(twins.groups) == ROWS else BLOCK // 4
    for seed in range(block * count, (block + 1) * count):
        try:
            twins.play(seed)
        except BaseException as error:
            error.add_note(f"This was sequence {seed}: Twins(...).play({seed}) runs it alone.")
            raise

    assert len(set(twins.parallel.worker_pids)) == len(twins.groups)
    assert twins.serial._recovery.restarts > 0


def test_rows_of_a_process_that_hangs_are_those_of_rows_that_raise(twins):
    twins.parallel.timeout = PATIENCE_S
    try:
        twins.play(3, hangs=True)
    finally:
        twins.parallel.timeout = 60.0

    assert not twins.hangs
