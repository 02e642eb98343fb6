"""Collectors lose nothing and leave nothing, whatever happens: faults on real processes.

Conventions
    orders  folders, one for each worker; `order_fault(folder, "step4", ...)` has the env there fail in the step
            from count 4.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from envkit import (
    GymEnv,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    ParallelEnv,
    SerialEnv,
    SyncDataCollector,
)
from envkit.errors import WorkerError, WorkerTimeoutError
from tests.batched.test_faults import (
    ENDED_BY_CTRL_C,
    HOW_IT_ENDED,
    PATIENCE_S,
    gone,
    interrupt_at_random,
    once_more_if_late,
    told_by,
    workers_when_ready,
)
from tests.collectors.test_workers import Says, built, still  # noqa: F401
from tests.zoo.envs import Count, obey, order_fault
from tests.zoo.jax_drift import jax_rows

IDS = ("collector", "traj_ids")
TRUNCATED = ("next", "truncated")
slow, sweep = pytest.mark.slow, pytest.mark.sweep


class Told(Count):
    """Counts to 9, and fails in a step that an order names."""

    def __init__(self, orders: Path):
        super().__init__(9)
        self.orders = orders
        self.add_truncated_keys()

    def _step(self, td):
        obey(self.orders, f"step{self.c}")
        return super()._step(td)


def two_told(orders: Path) -> SerialEnv:
    return SerialEnv(2, Told, create_env_kwargs={"orders": orders})


@pytest.fixture
def orders(tmp_path) -> list[Path]:
    folders = [tmp_path / str(worker) for worker in range(2)]
    for folder in folders:
        folder.mkdir()
    return folders


def makers(orders: Sequence[Path], make: Callable = Told) -> list[Callable]:
    return [partial(make, folder) for folder in orders]


def counts(batch, key="count") -> list:
    return batch[key].squeeze(-1).tolist()


# ----------------------------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    ("cls", "fault"),
    [
        (MultiSyncDataCollector, "raise"),
        (MultiSyncDataCollector, "hang"),
        (MultiaSyncDataCollector, "kill"),
        pytest.param(MultiSyncDataCollector, "kill", marks=slow),
        pytest.param(MultiSyncDataCollector, "exit", marks=slow),
        pytest.param(MultiaSyncDataCollector, "raise", marks=slow),
        pytest.param(MultiaSyncDataCollector, "hang", marks=slow),
    ],
)
@once_more_if_late
def test_a_fault_in_a_worker_is_told_in_full(built, orders, cls, fault):  # noqa: F811
    timeout = 1.0 if fault == "hang" else 60.0
    collector = built(cls, makers(orders), still, frames_per_batch=4, timeout=timeout)
    order_fault(orders[1], "step3", fault)

    def until_told():
        for _ in range(20):
            collector.next()

    error = told_by(until_told, timeout if fault == "hang" else 0.0)

    if fault == "raise":
        assert "worker 1 of 2 raised ValueError in row 1 during 'collecting'" in str(error)
        assert isinstance(error.__cause__, ValueError)
    else:
        assert f"worker 1 of 2, which held row 1, {HOW_IT_ENDED[fault]}" in str(error)
        assert "'collecting'" in str(error)
        assert "worker 1 of 2" in str(told_by(until_told))
    assert isinstance(error, WorkerTimeoutError) is (fault == "hang")


@once_more_if_late
def test_a_fault_is_told_before_others_are_done(built, orders, holdings):  # noqa: F811
    before = holdings()
    collector = built(MultiSyncDataCollector, makers(orders), still, frames_per_batch=8)
    order_fault(orders[0], "step2", "hang")
    order_fault(orders[1], "step3", "kill")

    text = str(told_by(collector.next))
    collector.shutdown()

    assert "worker 1 of 2" in text and "SIGKILL" in text
    assert holdings() == before


def test_what_others_have_made_is_not_lost_and_an_env_that_raised_begins_anew(built, orders):  # noqa: F811
    collector = built(MultiSyncDataCollector, makers(orders), still, frames_per_batch=8)
    collector.next()
    order_fault(orders[1], "step5", "raise")
    with pytest.raises(WorkerError, match="was told to fail in step5"):
        collector.next()

    second, third = collector.next(), collector.next()

    assert counts(second) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert counts(third) == [[8, 0, 1, 2], [4, 5, 6, 7]]
    assert second[IDS].tolist() == [[0] * 4, [3] * 4]
    assert collector.frames == 24


def test_an_asynchronous_collector_goes_on_to_its_end_after_an_error(built, orders):  # noqa: F811
    collector = built(
        MultiaSyncDataCollector, makers(orders), still, frames_per_batch=4, total_frames=16
    )
    order_fault(orders[0], "step5", "raise")
    batches = []

    messages = []

    while not collector.is_finished:
        try:
            batches.append(collector.next())
        except WorkerError as error:
            messages.append(str(error))

    assert len(batches) == 4 and collector.next() is None
    assert len(messages) <= 1 and all("step5" in text for text in messages)


@pytest.mark.parametrize("cls", [SyncDataCollector, MultiSyncDataCollector])
def test_frames_of_an_episode_that_failed_are_delivered_as_cut_short(built, orders, cls):  # noqa: F811
    made = makers(orders[:1])
    collector = built(cls, made[0] if cls is SyncDataCollector else made, still, trajs_per_batch=1)
    whole = [collector.next() for _ in range(3)]  # 27 steps of 32
    order_fault(orders[0], "step6", "raise")
    with pytest.raises((ValueError, WorkerError), match="step6"):
        collector.next()

    cut, following = collector.next(), collector.next()

    assert [counts(one)[0] for one in whole] == [list(range(9))] * 3
    assert counts(cut) == [[0, 1, 2, 3, 4]]
    assert cut[TRUNCATED].flatten().tolist() == [False] * 4 + [True]
    assert counts(following) == [list(range(9))]
    assert following[IDS].unique() > cut[IDS].unique() > whole[-1][IDS].unique()


# --------------------------------------------------------------------------------------- restarts


def restarting(built, makers, policy=still, **options):  # noqa: F811
    return built(
        MultiSyncDataCollector,
        makers,
        policy,
        **{"frames_per_batch": 8, "on_worker_failure": "restart", **options},
    )


@pytest.mark.parametrize(
    "fault", ["raise", "kill", pytest.param("exit", marks=slow), pytest.param("hang", marks=slow)]
)
def test_a_lost_worker_is_replaced_and_its_episode_ends_truncated(built, orders, fault):  # noqa: F811
    policy = Says(2)
    collector = restarting(built, makers(orders), policy, timeout=2.0 if fault == "hang" else 60.0)
    first = collector.next()
    order_fault(orders[1], "step5", fault)

    second = collector.next()
    policy.say(3)
    collector.update_policy_weights_()
    third = collector.next()
    order_fault(orders[1], "step8", fault)
    fourth = collector.next()

    assert counts(first) == [[0, 1, 2, 3]] * 2
    assert counts(second) == [[4, 5, 6, 7], [4, 0, 1, 2]]
    assert counts(second["next"])[1] == [4, 1, 2, 3]
    assert second[IDS].tolist() == [[0] * 4, [1, 3, 3, 3]]
    assert second[TRUNCATED].squeeze(-1).tolist() == [[False] * 4, [True, False, False, False]]
    assert second["next", "done"].squeeze(-1)[1].tolist() == [True, False, False, False]
    assert not second["next", "terminated"][1].any()
    assert second["next", "reward"].squeeze(-1)[1].tolist() == [0, 1, 1, 1]
    assert second["action"][1, 1:].unique().tolist() == [2]  # the weights of the start
    assert counts(third)[1] == [3, 4, 5, 6] and third["action"].unique().tolist() == [3]
    assert counts(fourth)[1] == [7, 0, 1, 2]
    assert fourth[IDS][1].tolist() == [3, 5, 5, 5]
    assert fourth["action"][1, 1:].unique().tolist() == [3]


def test_a_lost_worker_with_a_number_of_its_own_makes_as_many_again(built, orders):  # noqa: F811
    collector = restarting(built, makers(orders), frames_per_batch=[6, 3])
    first = collector.next()
    order_fault(orders[1], "step4", "kill")

    second, third = collector.next(), collector.next()

    assert counts(first) == [*range(6), *range(3)]
    assert counts(second) == [*range(6, 9), *range(3), 3, 0, 1]
    assert second[TRUNCATED].flatten().tolist() == [*[False] * 6, True, False, False]
    assert counts(third) == [*range(3, 9), 2, 3, 4]


def test_restarts_are_counted_and_end(built, orders):  # noqa: F811
    collector = restarting(built, makers(orders), max_restarts=1)
    for folder in orders:
        order_fault(folder, "step2", "raise")

    with pytest.raises(WorkerError, match=r"raised ValueError") as caught:
        collector.next()

    assert any("All 1 restarts" in note for note in caught.value.__notes__)


def test_whoever_finds_a_dead_worker_replaces_it(built, orders):  # noqa: F811
    collector = restarting(built, makers(orders))
    collector.next()

    def killed(worker: int) -> None:
        victim = psutil.Process(collector.worker_pids[worker])
        victim.kill()
        victim.wait(5.0)

    killed(1)
    second = collector.next()
    killed(0)
    collector.set_seed(3)
    third = collector.next()
    killed(1)
    collector.reset([False, True])
    fourth = collector.next()

    assert counts(second) == [[4, 5, 6, 7], [4, 0, 1, 2]]
    assert counts(third) == [[0, 1, 2, 3]] * 2
    assert counts(fourth) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    numbers = torch.cat([second, third, fourth], -1)
    starts = numbers[IDS][numbers["count"].squeeze(-1) == 0]
    assert starts.unique().numel() == len(starts)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Told, {"trajs_per_batch": 2, "frames_per_batch": None}),
        pytest.param(two_told, {"trajs_per_batch": 3, "frames_per_batch": None}, marks=slow),
        pytest.param(two_told, {"frames_per_batch": 16}, marks=slow),
        pytest.param(Told, {"prefetch": 1}, marks=slow),
        pytest.param(
            two_told, {"frames_per_batch": 16, "prefetch": 1, "use_buffers": False}, marks=slow
        ),
        pytest.param(Told, {"split_trajs": True}, marks=slow),
    ],
)
def test_episodes_are_whole_or_truncated_whoever_was_lost(built, orders, make, options):  # noqa: F811
    collector = restarting(built, makers(orders, make), **options)
    batches = [collector.next()]
    for folder, step in zip(orders, ("step5", "step7"), strict=True):
        order_fault(folder, step, "kill", times=2)

    batches += [collector.next() for _ in range(20)]

    steps: dict[int, list[tuple[int, bool, bool]]] = {}
    for batch in batches:
        mask = batch.get(("collector", "mask"), None)
        rows = batch.reshape(-1) if mask is None else batch[mask]
        entries = (rows[IDS], rows["count"], rows[TRUNCATED], rows["next", "done"])
        for number, *step in zip(*(entry.flatten().tolist() for entry in entries), strict=True):
            steps.setdefault(number, []).append(tuple(step))
    cut = 0
    for episode in steps.values():
        found, truncated, done = zip(*episode, strict=True)
        assert list(found) == list(range(len(found))) or list(found[:-1]) == list(range(found[-1]))
        assert not any(done[:-1]) and (not done[-1] or truncated[-1] or found[-1] == 8)
        cut += truncated[-1]
    assert 1 <= cut <= 8
    assert len(steps) > 8


def test_a_step_of_no_trajectory_is_no_episode(built, orders):  # noqa: F811
    from envkit.collectors.trajectories import EpisodeMeter

    collector = built(
        MultiSyncDataCollector,
        makers(orders),
        still,
        frames_per_batch=8,
        preemptive_threshold=0.0,
        cat_results="stack",
    )
    meter = EpisodeMeter(2)

    for _ in range(20):
        raw = collector._next_raw()
        del collector._received[0]
        meter.add(raw.data, raw.following)

    assert set(meter.lengths) <= {9}


# ---------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("cls", "options", "times"),
    [
        (MultiSyncDataCollector, {"frames_per_batch": 16}, 100),
        (MultiaSyncDataCollector, {"frames_per_batch": 8}, 100),
        pytest.param(MultiSyncDataCollector, {"frames_per_batch": 16}, 1000, marks=slow),
        pytest.param(MultiaSyncDataCollector, {"frames_per_batch": 8}, 1000, marks=slow),
        pytest.param(
            MultiSyncDataCollector,
            {"frames_per_batch": 16, "prefetch": 1},
            500,
            marks=[slow, sweep],
        ),
        pytest.param(MultiSyncDataCollector, {"trajs_per_batch": 3}, 500, marks=[slow, sweep]),
    ],
)
def test_ctrl_c_at_any_moment_loses_no_frame_and_repeats_none(built, cls, options, times):  # noqa: F811
    collector = built(cls, [partial(Count, 9)] * 2, still, timeout=10.0, **options)
    pids = collector.worker_pids
    batches = [collector.next() for _ in range(2)]

    interrupted = interrupt_at_random(lambda: batches.append(collector.next()), times)

    batches += [collector.next() for _ in range(4)]
    assert interrupted > 0.8 * times
    assert collector.worker_pids == pids
    assert collector.iter == len(batches)
    assert_gapless(batches)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_this_process_repeats_no_frame():
    collector = SyncDataCollector(partial(Count, 9), still, frames_per_batch=8)
    batches = [collector.next() for _ in range(2)]

    assert interrupt_at_random(lambda: batches.append(collector.next()), 50) > 40

    batches.append(collector.next())
    assert collector.iter == len(batches)
    seen = torch.cat(batches)
    pairs = list(zip(seen[IDS].tolist(), seen["count"].flatten().tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)


def assert_gapless(batches) -> None:
    """Check that every episode but the last of a row was delivered step by step, each once."""
    seen: dict[int, list[int]] = {}
    for batch in batches:
        mask = batch.get(("collector", "mask"), None)
        rows = batch.reshape(-1) if mask is None else batch[mask]
        for number, count in zip(rows[IDS].tolist(), rows["count"].flatten().tolist(), strict=True):
            seen.setdefault(number, []).append(count)
    for number, found in seen.items():
        assert found == list(range(len(found))), number
    for worker in range(2):
        own = sorted(number for number in seen if number % 2 == worker)
        assert own == list(range(worker, worker + 2 * len(own), 2))
        assert all(len(seen[number]) == 9 for number in own[:-1])


# ------------------------------------------------------------------------------ hooks and the end


@pytest.mark.parametrize("name", ["pre_collect_hook", "post_collect_hook", "postproc"])
def test_what_a_hook_raises_loses_no_batch(name):
    answers = iter([None, KeyboardInterrupt(), ZeroDivisionError()])

    def hook(batch=None):
        if (error := next(answers, None)) is not None:
            raise error
        return batch

    collector = SyncDataCollector(partial(Count, 9), still, frames_per_batch=3, **{name: hook})
    batches = [collector.next()]
    for error in (KeyboardInterrupt, ZeroDivisionError):
        with pytest.raises(error):
            collector.next()

    batches.append(collector.next())

    assert counts(torch.cat(batches)) == list(range(6))
    assert (collector.frames, collector.iter) == (6, 2)


SCRIPT = """
import os, sys, time
from functools import partial
import torch
from envkit import MultiSyncDataCollector, MultiaSyncDataCollector
from tests.zoo.envs import Count, Slow

def still(td):
    return td.set("action", torch.zeros((*td.batch_size, 1), dtype=torch.int64))

collector = {cls}([{make}] * 2, still, frames_per_batch=8, num_threads=1, {options})
print("workers", *collector.worker_pids, flush=True)
collector.next()
{ending}
"""


def start_script(tmp_path: Path, ending: str, **parts: str) -> subprocess.Popen:
    path = tmp_path / "script.py"
    parts = {"cls": "MultiSyncDataCollector", "make": "Count", "options": "", **parts}
    path.write_text(SCRIPT.format(ending=ending, **parts))
    environ = {name: text for name, text in os.environ.items() if name != "LAZY_LEGACY_OP"}
    return subprocess.Popen(
        [sys.executable, path],
        env={**environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


HANG = "print('ready', flush=True)\ncollector.next()\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        {"options": "prefetch=1"},
        pytest.param({"cls": "MultiaSyncDataCollector"}, marks=slow),
        pytest.param({"options": "progress=True"}, marks=slow),
    ],
)
def test_an_exit_without_shutdown_is_silent_and_leaves_nothing(tmp_path, holdings, parts):
    before = holdings()

    with start_script(tmp_path, "print('ready', flush=True)", **parts) as script:
        workers = workers_when_ready(script)
        errors = script.communicate(timeout=60.0)[1]

    assert script.returncode == 0
    assert errors == "" or "progress" in parts.get("options", "")
    assert "Traceback" not in errors
    assert len(workers) == 2 and gone(workers)
    assert holdings() == before


@slow
def test_no_worker_survives_a_parent_that_is_killed(tmp_path):
    with start_script(tmp_path, HANG, make="partial(Slow, 5.0)", options="prefetch=0") as script:
        workers = workers_when_slow(script)
        family = [child.pid for child in psutil.Process(script.pid).children(recursive=True)]

        script.kill()

        assert set(workers) <= set(family)
        assert gone(family)


@slow
def test_ctrl_c_ends_a_script_and_its_workers(tmp_path):
    with start_script(tmp_path, HANG, make="partial(Slow, 5.0)") as script:
        workers = workers_when_slow(script)

        os.killpg(script.pid, signal.SIGINT)
        errors = script.communicate(timeout=PATIENCE_S)[1]

        assert script.returncode in ENDED_BY_CTRL_C
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert gone(workers)


def workers_when_slow(script: subprocess.Popen) -> list[int]:
    """Give the workers as soon as they are there: they are in the middle of a batch then, or about to be."""
    assert script.stdout is not None
    line = script.stdout.readline()
    assert line.startswith("workers"), script.communicate()[1]
    return [int(pid) for pid in line.split()[1:]]


# --------------------------------------------------------------------------------------- in the long run


def test_a_collector_that_is_let_go_ends_its_workers(holdings):
    before = holdings()
    threads = torch.get_num_threads()
    collector = MultiSyncDataCollector(
        [Count] * 2, still, frames_per_batch=4, prefetch=1, num_threads=threads + 1
    )
    collector.next()

    del collector

    assert holdings() == before
    assert torch.get_num_threads() == threads


@slow
@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_two_hundred_cycles_of_start_and_stop_leave_nothing(holdings):
    before = holdings()

    for _ in range(200):
        with MultiSyncDataCollector([Count], still, frames_per_batch=2) as collector:
            collector.next()

    assert holdings() == before


@slow
@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("cls", "make", "policy", "options"),
    [
        (SyncDataCollector, Count, still, {"frames_per_batch": 4}),
        (SyncDataCollector, Count, still, {"frames_per_batch": 4, "reset_at_each_iter": True}),
        (SyncDataCollector, Count, still, {"trajs_per_batch": 2}),
        (MultiSyncDataCollector, [Count], still, {"frames_per_batch": 4}),
        (MultiaSyncDataCollector, [Count], still, {"frames_per_batch": 4}),
        (SyncDataCollector, partial(jax_rows, 2, limit=5), None, {"frames_per_batch": 8}),
        (
            SyncDataCollector,
            partial(ParallelEnv, 2, partial(GymEnv, "CartPole-v1")),
            None,
            {"frames_per_batch": 8},
        ),
    ],
    ids=["one", "anew", "episodes", "sync", "async", "program", "pool"],
)
def test_memory_is_flat_over_ten_thousand_batches(built, cls, make, policy, options):  # noqa: F811
    collector = built(cls, make, policy, **options)

    def held() -> float:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(process.memory_info().rss for process in processes) / 2**20

    for _ in range(500):
        collector.next()
    before = held()

    for _ in range(10_000):
        collector.next()

    assert held() - before < 8.0
