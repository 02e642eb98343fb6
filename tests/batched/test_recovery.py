"""``on_worker_failure="restart"``: what a lost row gets, and that no other row notices.

Conventions
    plan  what goes wrong, one list of fault names per step, one name per row.
    calm  the same without faults.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gymnasium
import psutil
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import MixedEnv, ParallelEnv, SerialEnv
from envkit.env.base import EnvBase
from envkit.env.seeding import restart_seed, seed_chain
from envkit.errors import DoneError, InputError, MissingKeyError, WorkerError
from envkit.specs import Categorical, Composite, Unbounded
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.gym.gym_wrapper import GymWrapper
from tests.zoo.envs import Chaos, Count, StatelessCount, order_fault
from tests.zoo.policies import Replay
from tests.zoo.transform_envs import TwoTeams

SEED = 3
SEEDS = seed_chain(SEED, 3)[0]
CALM = "none"

each_its_own = partial(ParallelEnv, num_processes=3)
all_in_one = partial(ParallelEnv, num_processes=1)
restarting = {"on_worker_failure": "restart", "max_restarts": 30}

pytestmark = pytest.mark.usefixtures("warm_fork_server")

with_and_without_buffers = pytest.mark.parametrize(
    "use_buffers", [True, False], ids=["buffers", "tds"]
)


@pytest.fixture
def three(opened, tmp_path) -> Callable:
    """Open seeded envs of three rows each, which take orders from `orders_of`."""

    def open_env(batched: Callable = each_its_own, **options):
        orders = [orders_of(tmp_path, row) for row in range(3)]
        for folder in orders:
            folder.mkdir(exist_ok=True)
        kwargs = [{"orders": folder} for folder in orders]
        env = batched(3, Chaos, create_env_kwargs=kwargs, **{**restarting, **options})
        opened(env).set_seed(SEED)
        return env

    return open_env


def orders_of(tmp_path: Path, row: int) -> Path:
    return tmp_path / str(row)


def actions(plan: list[list[str]]) -> torch.Tensor:
    """Give the actions of a plan, shape (rows, steps, 1)."""
    numbers = [[Chaos.FAULTS.index(fault) for fault in step] for step in plan]
    return torch.tensor(numbers).T.unsqueeze(-1)


def planned(steps: int, **faults: str) -> list[list[str]]:
    """Plan a calm run but for faults named by step and row: ``s3r1="raise"``."""
    plan = [[CALM] * 3 for _ in range(steps)]
    for place, fault in faults.items():
        step, row = place[1:].split("r")
        plan[int(step)][int(row)] = fault
    return plan


def advance(env, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
    return env.step_and_maybe_reset(td)


def step_then_reset(env, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
    data = env.step(td)
    return data, env.maybe_reset(env.step_mdp(data))


both_ways = pytest.mark.parametrize("go", [advance, step_then_reset])


def run(env, plan: list[list[str]], go: Callable = advance) -> TensorDictBase:
    """Play a plan from a reset; steps are stacked along time."""
    taken = actions(plan)
    td, steps = env.reset(), []
    for index in range(len(plan)):
        data, td = go(env, td.set("action", taken[:, index].clone()))
        steps.append(data)
    return torch.stack(steps, 1)


def calm_run(steps: int, n: int = 7) -> TensorDictBase:
    env = SerialEnv(3, partial(Chaos, n))
    env.set_seed(SEED)
    return run(env, planned(steps))


def equal(left: TensorDictBase, right: TensorDictBase) -> bool:
    left, right = left.exclude("action"), right.exclude("action")
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    return all(torch.equal(left[key], right[key]) for key in left.keys(True, True))


def draws(seed: int, count: int) -> list[float]:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()


def assert_lost(data: TensorDictBase, row: int, step: int, seed: int) -> None:
    """Check the transition of a row that was lost, and the beginning of its next episode."""
    root, following = data[row, step], data[row, step]["next"]
    assert torch.equal(following["count"], root["count"])
    assert torch.equal(following["draw"], root["draw"])
    assert following["reward"].item() == 0.0
    assert following["done"].item() and following["truncated"].item()
    assert not following["terminated"].item()
    if step + 1 < data.shape[1]:
        fresh = data[row, step + 1]
        assert fresh["count"].item() == 0
        assert not fresh["done"].item()
        assert [fresh["draw"].item(), fresh["next", "draw"].item()] == draws(seed, 2)


# -------------------------------------------------------------------- what is lost and what is not

RAISED = planned(12, s3r1="raise", s8r0="raise", s9r1="raise")
DIED = planned(12, s3r1="exit", s8r0="kill", s9r1="exit")


@pytest.mark.parametrize(
    ("batched", "plan"),
    [
        pytest.param(SerialEnv, RAISED, id="serial"),
        pytest.param(all_in_one, RAISED, id="one process"),
        pytest.param(each_its_own, DIED, id="processes"),
    ],
)
@both_ways
@with_and_without_buffers
def test_a_lost_row_is_truncated_and_no_other_row_notices(three, batched, plan, go, use_buffers):
    env = three(batched, use_buffers=use_buffers)

    data = run(env, plan, go)

    calm = calm_run(12)
    assert_lost(data, 1, 3, restart_seed(SEED, 1, 1))
    assert_lost(data, 0, 8, restart_seed(SEED, 0, 1))
    assert_lost(data, 1, 9, restart_seed(SEED, 1, 2))
    assert equal(data[2], calm[2])
    assert equal(data[0, :8], calm[0, :8])
    assert equal(data[1, :3], calm[1, :3])
    assert data["next", "done"].squeeze(-1).nonzero().tolist() == [
        *[[0, 6], [0, 8]],
        *[[1, 3], [1, 9]],
        [2, 6],
    ]
    assert not any(key in data.keys(True) for key in ("_reset", "_step"))


@pytest.mark.parametrize(
    "fault", ["raise", "misfit", "exit", "kill", pytest.param("hang", marks=pytest.mark.slow)]
)
def test_however_a_row_is_lost_the_data_is_the_same(three, fault):
    reference = run(three(SerialEnv), planned(6, s2r1="raise"))
    env = three(each_its_own)
    env.timeout = 4.0 if fault == "hang" else 60.0

    data = run(env, planned(6, s2r1=fault))

    assert equal(data, reference)


@with_and_without_buffers
def test_a_process_that_dies_loses_all_its_rows_and_only_those(three, use_buffers):
    env = three(partial(ParallelEnv, num_processes=2), use_buffers=use_buffers)  # rows 0-1, row 2

    data = run(env, planned(6, s2r0="kill"))

    assert_lost(data, 0, 2, restart_seed(SEED, 0, 1))
    assert_lost(data, 1, 2, restart_seed(SEED, 1, 1))
    assert equal(data[2], calm_run(6)[2])


@pytest.mark.parametrize("batched", [SerialEnv, all_in_one, each_its_own])
def test_rows_that_are_lost_at_once_are_lost_each_on_its_own(three, batched):
    env = three(batched)

    data = run(env, planned(6, s2r0="raise", s2r2="raise"))

    assert_lost(data, 0, 2, restart_seed(SEED, 0, 1))
    assert_lost(data, 2, 2, restart_seed(SEED, 2, 1))
    assert equal(data[1], calm_run(6)[1])


def test_a_row_may_be_lost_in_every_step(three):
    env = three(SerialEnv)

    data = run(env, [["raise", CALM, CALM] for _ in range(6)])

    assert data["next", "truncated"][0].all()
    assert data["count"][0].eq(0).all()
    assert equal(data[1:], calm_run(6)[1:])


def test_all_rows_may_be_lost_at_once(three):
    env = three(all_in_one)

    data = run(env, planned(4, s1r1="kill"))

    for row in range(3):
        assert_lost(data, row, 1, restart_seed(SEED, row, 1))


@pytest.mark.parametrize("batched", [SerialEnv, each_its_own])
def test_lost_rows_are_begun_again_when_nobody_resets_them(three, batched):
    env = three(batched)
    taken = actions(planned(3, s0r1="raise"))
    td = env.reset()

    for index in range(3):
        td = env.step_mdp(env.step(td.set("action", taken[:, index].clone())))

    assert td["count"].flatten().tolist() == [3, 2, 3]


# ------------------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize("batched", [SerialEnv, each_its_own])
def test_the_same_faults_give_the_same_data_again(three, batched):
    plan = planned(9, s1r1="raise", s4r1="raise", s6r2="raise")
    env = three(batched)

    first = run(env, plan)
    env.set_seed(SEED)
    again = run(env, plan)

    assert equal(first, again)
    assert list(env.seed_seen) == [
        SEEDS[0],
        restart_seed(SEED, 1, 2),
        restart_seed(SEED, 2, 1),
    ]


def test_an_env_that_was_never_seeded_is_built_anew_without_a_seed(opened):
    env = opened(SerialEnv(3, Chaos, **restarting))

    data = run(env, planned(3, s1r1="raise"))

    assert data["next", "truncated"][1, 1].item()
    assert list(env.seed_seen) == [None, None, None]


def test_messages_name_the_seed_a_row_was_built_anew_with(three):
    env = three(SerialEnv, max_restarts=1)
    run(env, planned(2, s0r1="raise"))

    with pytest.raises(WorkerError, match=rf"row 1 \(seed {restart_seed(SEED, 1, 1)}\)"):
        run(env, planned(2, s0r1="raise"))


# -------------------------------------------------------------------------------- faults elsewhere


@pytest.mark.parametrize("fault", ["raise", "exit"])
@with_and_without_buffers
def test_a_fault_in_a_full_reset_shows_in_nothing_but_the_seed(three, tmp_path, use_buffers, fault):
    env = three(use_buffers=use_buffers)
    order_fault(orders_of(tmp_path, 1), "reset", fault)

    data = run(env, planned(9))

    calm = calm_run(9)
    assert equal(data[::2], calm[::2])
    assert data["next", "done"][1].flatten().nonzero().tolist() == [[6]]
    assert data["draw"][1, :2].flatten().tolist() == draws(restart_seed(SEED, 1, 1), 2)
    assert not (tmp_path / "1" / "reset").exists()


@pytest.mark.parametrize("batched", [SerialEnv, all_in_one])
@both_ways
@with_and_without_buffers
def test_a_fault_in_the_reset_after_an_episode_touches_no_other_row(
    three, tmp_path, batched, go, use_buffers
):
    env = three(batched, use_buffers=use_buffers)
    env.reset()
    order_fault(orders_of(tmp_path, 1), "reset", "raise")

    td, data = env.reset(), []
    order_fault(orders_of(tmp_path, 1), "reset", "raise")
    for _ in range(9):
        done, td = go(env, td.set("action", torch.zeros(3, 1, dtype=torch.int64)))
        data.append(done)
    data = torch.stack(data, 1)

    ended = data["next", "done"].squeeze(-1)
    assert ended.nonzero().tolist() == [[0, 6], [1, 6], [2, 6]]
    assert data["next", "count"][::2].flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2] * 2
    # a step whose reset fails is lost with it; a reset called on its own loses nothing
    assert data["next", "truncated"][1, 6].item() is (go is advance)
    assert data["next", "count"][1].flatten().tolist()[7:] == [1, 2]


@with_and_without_buffers
def test_rows_lost_in_the_reset_of_others_are_told_by_the_next_step(three, tmp_path, use_buffers):
    env = three(all_in_one, use_buffers=use_buffers)
    td = env.step_mdp(env.step(env.reset().set("action", actions(planned(1))[:, 0])))
    order_fault(orders_of(tmp_path, 2), "reset", "kill")

    td = env.reset(td.set("_reset", torch.tensor([[False], [False], [True]])))
    after_reset = td["count"].flatten().tolist()
    data, td = env.step_and_maybe_reset(td.set("action", actions(planned(1))[:, 0]))

    assert after_reset == [1, 1, 0]
    assert data["next", "truncated"].flatten().tolist() == [True, True, False]
    assert data["next", "count"].flatten().tolist() == [1, 1, 1]
    assert td["count"].flatten().tolist() == [0, 0, 1]


@pytest.mark.parametrize("fault", ["raise", "exit"])
@pytest.mark.parametrize("place", ["constructor", "set_seed"])
@with_and_without_buffers
def test_an_env_that_cannot_be_built_at_once_is_tried_again(
    three, tmp_path, use_buffers, place, fault
):
    env = three(use_buffers=use_buffers)
    order_fault(orders_of(tmp_path, 1), place, fault, times=2)

    data = run(env, planned(6, s2r1="raise"))

    assert_lost(data, 1, 2, restart_seed(SEED, 1, 3))
    assert equal(data[::2], calm_run(6)[::2])


def test_a_worker_that_cannot_start_at_once_is_tried_again(three, tmp_path):
    env = three(partial(ParallelEnv, num_processes=2))
    order_fault(orders_of(tmp_path, 1), "constructor", "raise", times=2)

    data = run(env, planned(6, s2r0="kill"))

    assert_lost(data, 0, 2, restart_seed(SEED, 0, 3))
    assert_lost(data, 1, 2, restart_seed(SEED, 1, 3))
    assert equal(data[2], calm_run(6)[2])


def test_a_fault_before_the_first_step_is_not_restarted(three, tmp_path):
    (tmp_path / "1").mkdir()
    order_fault(orders_of(tmp_path, 1), "constructor", "raise")

    with pytest.raises(WorkerError, match=r"ValueError in row 1 during 'start'"):
        three()


def kill(env, index: int) -> None:
    victim = psutil.Process(env.worker_pids[index])
    victim.kill()
    victim.wait(5.0)


@with_and_without_buffers
def test_a_worker_killed_while_idle_is_lost_at_the_next_step(three, use_buffers):
    env = three(use_buffers=use_buffers)
    td = env.reset()
    kill(env, 1)

    data = env.step(td.set("action", actions(planned(1))[:, 0]))

    assert data["next", "count"].flatten().tolist() == [1, 0, 1]
    assert data["next", "truncated"].flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("call", ["reset", "set_seed", "partial reset"])
def test_a_worker_killed_while_idle_is_replaced_by_whatever_needs_it(three, call):
    env = three()
    td = env.reset()
    kill(env, 1)

    if call == "set_seed":
        env.set_seed(SEED)
    mask = torch.tensor([[False], [True], [False]])
    td = env.reset(td.set("_reset", mask) if call == "partial reset" else None)
    data = env.step(td.set("action", actions(planned(1))[:, 0]))

    assert data["next", "count"].flatten().tolist() == [1, 1, 1]
    assert not data["next", "truncated"].any()
    if call == "set_seed":
        assert data["draw"].flatten().tolist() == [draws(seed, 1)[0] for seed in SEEDS]


def test_a_dead_worker_cannot_answer_calls_but_comes_back_with_the_next_step(three):
    env = three()
    td = env.reset()
    kill(env, 1)

    with pytest.raises(WorkerError, match=r"row 1.*SIGKILL"):
        list(env.visit())
    data = env.step(td.set("action", actions(planned(1))[:, 0]))

    assert data["next", "truncated"].flatten().tolist() == [False, True, False]
    assert list(env.visit()) == [1, 0, 1]


# ------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("batched", [SerialEnv, each_its_own])
@with_and_without_buffers
def test_a_partial_step_loses_only_rows_it_steps(three, batched, use_buffers):
    env = three(batched, use_buffers=use_buffers)
    td = env.reset()
    taken = actions(planned(1, s0r0="raise", s0r1="raise"))[:, 0]

    td = td.set("action", taken).set("_step", torch.tensor([True, False, True]))
    data = env.step(td)

    assert data["next", "count"].flatten().tolist() == [0, 0, 1]
    assert data["next", "truncated"].flatten().tolist() == [True, False, False]
    assert data["next", "reward"].flatten().tolist() == [0.0, 0.0, 1.0]


@with_and_without_buffers
def test_a_row_that_is_not_stepped_is_told_lost_when_it_is(three, use_buffers):
    env = three(partial(ParallelEnv, num_processes=2), use_buffers=use_buffers)  # rows 0-1, row 2
    td = env.reset().set("action", actions(planned(1, s0r0="kill"))[:, 0])

    first = env.step(td.set("_step", torch.tensor([True, False, False]))).clone()
    td = env.step_mdp(first).set("action", actions(planned(1))[:, 0])
    second = env.step(td.set("_step", torch.tensor([False, True, True])))

    assert first["next", "truncated"].flatten().tolist() == [True, False, False]
    assert second["next", "truncated"].flatten().tolist() == [True, True, False]
    assert second["next", "count"].flatten().tolist() == [0, 0, 1]


class Pair(EnvBase):
    """Two counters in one env, each with a reset of its own; raises at the action 1."""

    def __init__(self):
        super().__init__(batch_size=[2])
        self.observation_spec = Composite(count=Unbounded((2, 1)), shape=[2])
        self.action_spec = Categorical(2, shape=(2, 1))
        self.add_truncated_keys()
        self.count = torch.full((2, 1), 7.0)

    def _reset(self, td, **kwargs):
        mask = None if td is None else td.get("_reset", None)
        mask = torch.ones(2, 1, dtype=torch.bool) if mask is None else mask.view(2, 1)
        self.count = torch.where(mask, 0.0, self.count)
        return TensorDict({"count": self.count.clone()}, [2])

    def _step(self, td):
        if td["action"].any():
            raise ValueError("one is too much")
        self.count = self.count + 1
        return TensorDict({"count": self.count.clone(), "reward": torch.ones(2, 1)}, [2])

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("batched", [SerialEnv, partial(ParallelEnv, num_processes=2)])
@with_and_without_buffers
def test_a_lost_row_is_lost_with_all_its_parts(opened, batched, use_buffers):
    env = opened(batched(2, Pair, use_buffers=use_buffers, **restarting))
    env.set_seed(0)
    still = torch.zeros(2, 2, 1, dtype=torch.int64)
    td = env.step_mdp(env.step(env.reset().set("action", still)))
    bad = still.clone()
    bad[1, 0] = 1

    data, td = env.step_and_maybe_reset(td.set("action", bad))

    assert data["next", "count"].flatten().tolist() == [2, 2, 1, 1]
    assert data["next", "truncated"].flatten().tolist() == [False, False, True, True]
    assert td["count"].flatten().tolist() == [2, 2, 0, 0]


def test_a_row_reset_in_part_after_it_was_lost_is_still_told(opened):
    env = opened(ParallelEnv(2, Pair, num_processes=2, **restarting))
    still = torch.zeros(2, 2, 1, dtype=torch.int64)
    td = env.step_mdp(env.step(env.reset().set("action", still)))
    kill(env, 0)
    mask = torch.tensor([[[True], [False]], [[False], [False]]])

    td = env.reset(td.set("_reset", mask))
    after_reset = td["count"].flatten().tolist()
    data, td = env.step_and_maybe_reset(td.set("action", still))

    assert after_reset == [0, 1, 1, 1]
    assert data["next", "count"].flatten().tolist() == [0, 1, 2, 2]
    assert data["next", "truncated"].flatten().tolist() == [True, True, False, False]
    assert td["count"].flatten().tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize("is_asked", [True, False])
@with_and_without_buffers
def test_an_env_built_anew_begins_with_all_its_parts_whatever_is_asked_of_the_row(
    opened, use_buffers, is_asked
):
    env = opened(SerialEnv(2, Pair, use_buffers=use_buffers, **restarting))
    still = torch.zeros(2, 2, 1, dtype=torch.int64)
    bad = still.clone()
    bad[1, 0] = 1
    td = env.step_mdp(env.step(env.reset().set("action", bad)))
    mask = torch.tensor([[[False], [False]], [[True], [False]]])

    if is_asked:
        env.reset(td.set("_reset", mask))
    data = env.step(TensorDict({"action": still}, [2, 2]))

    assert data["next", "count"].flatten().tolist() == [2, 2, 1, 1]


# ---------------------------------------------------------------------------------------- rollouts


@pytest.mark.parametrize("batched", [SerialEnv, each_its_own])
def test_a_rollout_over_shared_rows_equals_stepping_one_by_one(three, batched):
    plan = planned(80, s3r1="raise", s8r0="raise", s66r2="raise", s79r0="raise")
    env = three(batched, use_buffers=True)

    one_by_one = run(env, plan)
    env.set_seed(SEED)
    at_once = env.rollout(80, Replay(actions(plan)), break_when_any_done=False)

    assert equal(at_once, one_by_one)
    assert torch.equal(at_once["action"], one_by_one["action"])


def test_a_rollout_ends_where_a_row_is_lost(three):
    env = three()

    data = env.rollout(20, Replay(actions(planned(20, s4r1="exit"))))

    assert data.shape == (3, 5)
    assert data["next", "done"][:, -1].flatten().tolist() == [False, True, False]


def test_a_rollout_until_all_are_done_freezes_a_lost_row(three):
    env = three()

    data = env.rollout(20, Replay(actions(planned(20, s4r1="raise"))), break_when_all_done=True)

    assert data.shape == (3, 7)
    assert data["next", "count"][1].flatten().tolist() == [1, 2, 3, 4, 4, 4, 4]
    assert data["next", "truncated"][1].flatten().tolist() == [False] * 4 + [True] * 3
    assert equal(data[::2], calm_run(7)[::2])


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False], ids=["rollout", "step by step"])
def test_a_thousand_steps_with_a_fault_in_every_fiftieth(three, at_once):
    plan = planned(1000)
    faults = ["raise"] * 17 + ["exit", "kill", "exit"]
    places = {50 * index + 7: index % 2 for index in range(20)}
    for (step, row), fault in zip(places.items(), faults, strict=True):
        plan[step][row] = fault
    env = three(max_restarts=20)

    if at_once:
        data = env.rollout(1000, Replay(actions(plan)), break_when_any_done=False)
    else:
        data = run(env, plan)

    calm = calm_run(1000)
    assert data["next", "truncated"].squeeze(-1).nonzero().tolist() == sorted(
        [row, step] for step, row in places.items()
    )
    for number, (step, row) in enumerate(places.items()):
        assert_lost(data, row, step, restart_seed(SEED, row, number // 2 + 1))
    assert equal(data[2], calm[2])
    assert equal(data[0, :7], calm[0, :7])
    assert len(set(env.worker_pids)) == 3


def test_a_lost_row_of_a_member_is_lost_in_the_mixed_env(opened):
    member = ParallelEnv(2, Chaos, num_processes=2, **restarting)
    env = opened(MixedEnv([SerialEnv(1, Chaos), member]))
    env.set_seed(SEED)
    plan = planned(9, s2r1="exit", s5r2="raise")

    data = run(env, plan)
    env.set_seed(SEED)
    rollout = env.rollout(9, Replay(actions(plan)), break_when_any_done=False)

    assert_lost(data, 1, 2, restart_seed(SEEDS[1], 0, 1))
    assert_lost(data, 2, 5, restart_seed(SEEDS[1], 1, 1))
    assert equal(data[0].exclude("state", ("next", "state")), calm_run(9)[0])
    assert equal(rollout, data)


class Fragile(StatelessCount):
    """Raises where any of its actions is 1."""

    def __init__(self):
        super().__init__(9, batch_size=[2])
        self.add_truncated_keys()

    def _step(self, td):
        if td["action"].any():
            raise ValueError("broke")
        return super()._step(td)


@with_and_without_buffers
def test_a_row_that_is_lost_in_a_step_of_some_parts_is_lost_with_all_of_them(use_buffers):
    env = SerialEnv(2, Fragile, use_buffers=use_buffers, **restarting)
    td = env.reset().set("count", torch.tensor([[[3], [4]], [[5], [6]]]))
    td["action"] = torch.tensor([[[1], [0]], [[0], [0]]])

    out = env.step(td.set("_step", torch.tensor([[True, False], [True, False]])))["next"]

    assert out["count"].flatten().tolist() == [3, 4, 6, 6]
    assert out["truncated"].flatten().tolist() == [True, True, False, False]
    assert out["done"].flatten().tolist() == [True, True, False, False]
    assert out["reward"].flatten().tolist() == [0, 0, 1, 0]


# -------------------------------------------------------------------------------- gymnasium's rows


class Tripping(gymnasium.Wrapper):
    """Raises in its steps of these numbers, counted over all episodes."""

    def __init__(self, env, *steps: int):
        super().__init__(env)
        self.steps, self.taken = steps, 0

    def step(self, action):
        self.taken += 1
        if self.taken in self.steps:
            raise ArithmeticError("tripped")
        return self.env.step(action)


def make_tripping(*steps: int) -> GymEnv | GymWrapper:
    return GymWrapper(Tripping(gymnasium.make("CartPole-v1"), *steps))


@pytest.mark.parametrize("batched", [SerialEnv, all_in_one, partial(ParallelEnv, num_processes=2)])
def test_gymnasium_rows_of_one_process_do_not_notice_each_others_loss(opened, batched):
    makers = [make_tripping, partial(make_tripping, 5), make_tripping, partial(make_tripping, 8)]
    generator = torch.Generator().manual_seed(0)
    taken = torch.nn.functional.one_hot(torch.randint(2, (4, 40), generator=generator), 2)
    runs = []
    for options in ({"create_env_fn": makers, **restarting}, {"create_env_fn": make_tripping}):
        env = opened(batched(4, use_buffers=True, **options))
        env.set_seed(SEED)
        runs.append(env.rollout(40, Replay(taken), break_when_any_done=False))

    lossy, calm = runs

    assert lossy["next", "truncated"].squeeze(-1).nonzero().tolist()[0] == [1, 4]
    for row, step in ((1, 4), (3, 7)):
        assert equal(lossy[row, :step], calm[row, :step])
        following = lossy[row, step]["next"]
        assert torch.equal(following["observation"], lossy[row, step]["observation"])
        assert following["truncated"].item() and not following["terminated"].item()
        assert lossy[row, step + 1]["observation"].abs().max() <= 0.05
    assert equal(lossy[::2], calm[::2])


# ------------------------------------------------------------------------- what cannot be restarted


@pytest.mark.parametrize("batched", [SerialEnv, each_its_own])
def test_the_budget_ends_in_the_original_error(three, batched):
    env = three(batched, max_restarts=2)

    with pytest.raises(WorkerError, match=r"ValueError in row 1 .*cannot go on from 6") as caught:
        run(env, planned(9, s1r1="raise", s3r0="raise", s8r1="raise"))

    assert caught.value.__notes__ == ["All 2 restarts (max_restarts) are used up."]
    env.close()
    assert run(env, planned(3, s1r1="raise"))["next", "truncated"][1, 1].item()


def test_an_env_that_can_never_be_built_again_is_told_with_the_reason(three, tmp_path):
    env = three(max_restarts=3)
    order_fault(orders_of(tmp_path, 1), "constructor", "raise", times=9)

    with pytest.raises(WorkerError, match=r"row 1.*was ended by signal 9") as caught:
        run(env, planned(3, s1r1="kill"))

    notes = "\n".join(caught.value.__notes__)
    assert "All 3 restarts (max_restarts) are used up." in notes
    assert "was told to fail in constructor" in notes


@pytest.mark.parametrize("batched", [SerialEnv, each_its_own])
def test_sub_envs_that_cannot_be_truncated_are_refused_at_the_start(batched, holdings):
    before = holdings()

    with pytest.raises(DoneError, match=r"'truncated'.*add_truncated_keys"):
        batched(3, Count, on_worker_failure="restart").start()

    assert holdings() == before


def test_groups_may_be_truncated_each_on_its_own(opened):
    env = opened(SerialEnv(2, lambda: TwoTeams().add_truncated_keys(), **restarting))

    assert env.rollout(2)["next", "a", "truncated"].shape == (2, 2, 1)
    with pytest.raises(DoneError, match=r"only \['a\.done', .*'b\.terminated'\]"):
        opened(SerialEnv(2, TwoTeams, **restarting)).reset()


def test_a_pool_that_does_not_restart_speaks_of_no_budget(three):
    env = three(SerialEnv, on_worker_failure="raise", max_restarts=5)

    with pytest.raises(WorkerError, match="cannot go on") as caught:
        run(env, planned(1, s0r1="raise"))

    assert not any("restart" in note for note in getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("batched", [SerialEnv, each_its_own])
@with_and_without_buffers
def test_what_the_caller_does_wrong_costs_no_env(three, batched, use_buffers):
    env = three(batched, use_buffers=use_buffers, max_restarts=1)
    td = env.reset()

    for _ in range(3):
        with pytest.raises((InputError, MissingKeyError, WorkerError)):
            env.step(td.clone())
    td = env.step(td.set("action", actions(planned(1))[:, 0]))

    assert td["next", "count"].flatten().tolist() == [1, 1, 1]
    assert list(env.seed_seen) == SEEDS


def test_new_keywords_do_not_reach_envs_that_are_built_anew_in_between(three):
    env = three(SerialEnv)

    env.update_kwargs({"n": 2})
    data = run(env, planned(4, s1r1="raise"))

    assert not data["next", "terminated"].any()


def test_a_signal_that_was_caught_leaves_the_row_alone(opened):
    class Sturdy(Chaos):
        def _step(self, td):
            os.kill(os.getpid(), signal.SIGUSR2)
            return super()._step(td)

        def __init__(self, **kwargs):
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            super().__init__(**kwargs)

    env = opened(ParallelEnv(3, Sturdy, num_processes=3, **restarting))
    env.set_seed(SEED)

    assert equal(run(env, planned(4)), calm_run(4))
