"""A collector goes on from its state dict to the same bits, also in another process, also after SIGKILL."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from envkit import (
    GymEnv,
    MixedEnv,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    RewardSum,
    SerialEnv,
    SyncDataCollector,
    TransformedEnv,
    compile_policy,
)
from envkit.errors import (
    ArgumentCountError,
    ArgumentError,
    ArgumentTypeError,
    MissingKeyError,
    ResumeError,
)
from tests.collectors.slow_model import assert_same
from tests.zoo.envs import Count
from tests.zoo.jax_drift import jax_rows


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class Draws(torch.nn.Module):
    """A policy that draws, and whose weights decide how."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def forward(self, observation):
        return torch.distributions.Categorical(logits=self.net(observation)).sample()


class Leans(torch.nn.Module):
    """A policy in one dimension that draws."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def forward(self, observation):
        return (self.net(observation) + 0.1 * torch.randn(observation.shape)).clamp(-1, 1)


def through_a_file(state):
    """Give what ``torch.load`` reads of a state dict, with no code run."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


KINDS = {
    "one gym env": (SyncDataCollector, cartpole, Draws, {"frames_per_batch": 7}),
    "SerialEnv": (
        SyncDataCollector,
        lambda: TransformedEnv(SerialEnv(3, cartpole), RewardSum()),
        Draws,
        {"frames_per_batch": 30, "max_frames_per_traj": 11, "init_random_frames": 40},
    ),
    "whole episodes": (
        SyncDataCollector,
        lambda: SerialEnv(3, cartpole),
        Draws,
        {"trajs_per_batch": 2},
    ),
    "stateless, random": (
        SyncDataCollector,
        lambda: jax_rows(3, limit=4),
        lambda: None,
        {"frames_per_batch": 15, "prefetch": 1},
    ),
    "stateless, translated": (
        SyncDataCollector,
        lambda: jax_rows(3, limit=4),
        lambda: compile_policy(Leans()),
        {"frames_per_batch": 15},
    ),
    "stateless, stepwise": (
        SyncDataCollector,
        lambda: jax_rows(3, limit=4),
        Leans,
        {"frames_per_batch": 15},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_after_a_resume_are_those_without_one(kind):
    cls, make, policy, options = KINDS[kind]
    torch.manual_seed(0)
    first = cls(make, policy(), record_for_resume=True, **options)
    first.set_seed(1)
    for _ in range(3):
        first.next()
    state = through_a_file(first.state_dict())
    wanted = [first.next() for _ in range(4)]
    torch.manual_seed(99)

    second = cls(make, policy(), record_for_resume=True, **options)
    second.load_state_dict(state)

    for batch in wanted:
        assert_same(second.next(), batch)
    assert (first.frames, first.iter) == (second.frames, second.iter)
    first.shutdown(), second.shutdown()


@settings(max_examples=8)
@given(before=st.integers(0, 4), steps=st.integers(1, 9))
def test_it_does_not_matter_where_a_run_is_cut(before, steps):
    def build():
        torch.manual_seed(0)
        collector = SyncDataCollector(
            lambda: SerialEnv(2, cartpole),
            Draws(),
            frames_per_batch=2 * steps,
            record_for_resume=True,
        )
        collector.set_seed(before)
        return collector

    whole, cut = build(), build()
    torch.manual_seed(1)
    batches = [whole.next() for _ in range(before + 3)]
    torch.manual_seed(1)
    for _ in range(before):
        cut.next()
    state = cut.state_dict()
    resumed = build()
    resumed.load_state_dict(state)

    for wanted in batches[before:]:
        assert_same(resumed.next(), wanted)


class Saved(Count):
    """Says what it keeps."""

    def get_extra_state(self):
        return {"c": self.c}

    def set_extra_state(self, state):
        self.c = state["c"]


def test_only_what_is_left_is_collected_after_a_resume():
    first = SyncDataCollector(Saved, frames_per_batch=4, total_frames=20)
    first.next(), first.next()

    second = SyncDataCollector(Saved, frames_per_batch=4, total_frames=20)
    second.load_state_dict(first.state_dict())

    batches = list(second)
    assert batches[0]["count"].flatten().tolist() == [3, 4, 0, 1]
    assert len(batches) == 3 and second.frames == 20 and second.iter == 5


def test_a_state_dict_leaves_the_collector_as_it_was():
    def build():
        collector = SyncDataCollector(
            lambda: jax_rows(2, limit=3), frames_per_batch=4, prefetch=1, total_frames=24
        )
        collector.set_seed(0)
        return collector

    saved, other = build(), build()
    for _ in range(6):
        wanted = other.next()
        saved.state_dict()
        assert_same(saved.next(), wanted)


def test_workers_go_on_where_they_were():
    def build():
        torch.manual_seed(0)
        collector = MultiSyncDataCollector(
            lambda: SerialEnv(2, cartpole),
            Draws(),
            num_workers=2,
            frames_per_batch=24,
            record_for_resume=True,
            track_policy_version=True,
        )
        collector.set_seed(3)
        return collector

    first, second = build(), build()
    torch.nn.init.constant_(first._trained.net.bias, 0.7)
    first.next()
    first.update_policy_weights_()
    first.next()
    torch.nn.init.constant_(first._trained.net.bias, -0.7)
    first.update_policy_weights_()  # which no worker has yet

    second.load_state_dict(through_a_file(first.state_dict()))

    for _ in range(3):
        wanted = first.next()
        assert_same(second.next(), wanted)
    assert wanted["policy_version"].unique().tolist() == [2]
    first.shutdown(), second.shutdown()


def test_workers_with_numbers_of_their_own_fill_a_buffer_alike_after_a_resume():
    def build():
        held = TensorDictReplayBuffer(storage=LazyTensorStorage(60), batch_size=4)
        return held, MultiSyncDataCollector(
            Saved, still, num_workers=2, frames_per_batch=[8, 4], replay_buffer=held
        )

    (held, first), (again, second) = build(), build()
    first.next(), first.next()
    again.load_state_dict(held.state_dict())

    second.load_state_dict(through_a_file(first.state_dict()))
    for _ in range(3):
        first.next(), second.next()

    assert len(held) == len(again) == 60
    assert_same(again[:], held[:])
    first.shutdown(), second.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("is_killed_before", [True, False])
def test_what_a_lost_worker_leaves_is_the_same_after_a_resume(is_killed_before):
    def build():
        return MultiSyncDataCollector(
            Truncates, still, num_workers=2, frames_per_batch=8, on_worker_failure="restart"
        )

    first, second = build(), build()
    started = first.next()
    if is_killed_before:
        kill(first, 1)
    state = through_a_file(first.state_dict())
    second.load_state_dict(state)
    if not is_killed_before:
        kill(first, 1), kill(second, 1)

    wanted = first.next()
    found = second.next()

    assert_same(found, wanted)
    assert wanted["next", "truncated"].squeeze(-1)[:, 0].tolist() == [False, True]
    before, after = (batch["collector", "traj_ids"] for batch in (started, wanted))
    assert after[1, 0] == before[1, -1] and after[1, 1] > before.max()
    first.shutdown(), second.shutdown()


def still(td):
    return td.set("action", torch.zeros((*td.batch_size, 1), dtype=torch.int64))


class Truncates(Saved):
    def __init__(self):
        super().__init__()
        self.add_truncated_keys()


def kill(collector, worker: int) -> None:
    process = psutil.Process(collector.worker_pids[worker])
    process.kill()
    process.wait(30)


@pytest.mark.slow
def test_asynchronous_workers_keep_what_they_have_made():
    def build():
        return MultiaSyncDataCollector(
            cartpole, num_workers=2, frames_per_batch=4, total_frames=40, record_for_resume=True
        )

    first, second = build(), build()
    seen = [first.next() for _ in range(3)]

    second.load_state_dict(through_a_file(first.state_dict()))
    seen += list(second)

    data = torch.cat(seen)
    assert len(data) == 40
    for worker in range(2):
        of_worker = data[data["collector", "traj_ids"] % 2 == worker]
        ids = of_worker["collector", "traj_ids"]
        goes_on = ids[1:] == ids[:-1]
        assert goes_on.sum() > len(of_worker) / 2
        assert torch.equal(
            of_worker["observation"][1:][goes_on], of_worker["next", "observation"][:-1][goes_on]
        )
    first.shutdown(), second.shutdown()


OWN = {
    "one env": Count,
    "rows behind a transform": lambda: TransformedEnv(SerialEnv(2, Count), RewardSum()),
    "beside one that says it": lambda: MixedEnv([SerialEnv(1, Count), SerialEnv(1, Saved)]),
}
UNRECORDED = {
    **{kind: KINDS[kind][1:] for kind in ("one gym env", "SerialEnv", "whole episodes")},
    "vector env": (
        lambda: GymEnv("CartPole-v1", num_envs=2, categorical_action_encoding=True),
        Draws,
        {"frames_per_batch": 8},
    ),
    **{kind: (make, lambda: None, {"frames_per_batch": 4}) for kind, make in OWN.items()},
}


def joined(batches):
    """Return the transitions of each row, in order, with whether the next one continues its trajectory."""
    data = torch.cat([batch.reshape(-1, batch.shape[-1]) for batch in batches], -1)
    ids = data["collector", "traj_ids"]
    return data, ids[:, 1:] == ids[:, :-1]


@pytest.mark.parametrize("kind", UNRECORDED)
def test_episodes_that_were_not_recorded_begin_again_with_one_warning(kind):
    make, policy, options = UNRECORDED[kind]
    first, second = (SyncDataCollector(make, policy(), **options) for _ in range(2))
    seen = [first.next() for _ in range(3)]

    with pytest.warns(UserWarning, match="episodes under way in") as warned:
        second.load_state_dict(through_a_file(first.state_dict()))
    later = [second.next() for _ in range(2)]

    assert len(warned) == 1
    if "trajs_per_batch" in options:  # each is whole, which the padding shows
        assert all(batch["next", "done"].any(1).all() for batch in later)
        return
    data, continues = joined([*seen, *later])
    key = "observation" if "observation" in data else "count"
    assert torch.equal(data[key][:, 1:][continues], data["next", key][:, :-1][continues])
    assert continues.sum() > 0.5 * continues.numel()
    cut = sum(batch.shape[-1] for batch in seen)
    # the first step of the second one ends what goes on, or begins
    assert (data["next", "done"][:, cut].squeeze(-1) | ~continues[:, cut - 1]).all()
    first.shutdown(), second.shutdown()


@pytest.mark.parametrize("kind", OWN)
def test_a_recorded_env_that_does_not_say_what_it_keeps_is_refused(kind):
    collector = SyncDataCollector(OWN[kind], frames_per_batch=4, record_for_resume=True)
    collector.next()

    with pytest.raises(ResumeError, match=r"Count is your own env.*get_extra_state"):
        collector.state_dict()


def test_weights_of_another_architecture_are_refused_and_nothing_is_loaded():
    first = SyncDataCollector(cartpole, Draws(), frames_per_batch=4, record_for_resume=True)
    first.next()
    state = first.state_dict()
    policy = Draws()
    policy.net = torch.nn.Linear(4, 2, bias=False)
    before = policy.net.weight.detach().clone()
    other = SyncDataCollector(cartpole, policy, frames_per_batch=4, record_for_resume=True)

    with pytest.raises(ArgumentError, match=r"another architecture: \['net.bias'\] are not"):
        other.load_state_dict(state)

    assert torch.equal(policy.net.weight, before) and other.frames == 0


def test_a_state_dict_of_something_else_is_refused():
    collector = SyncDataCollector(Saved, frames_per_batch=4)

    with pytest.raises(ArgumentTypeError, match="must be a dict"):
        collector.load_state_dict([])
    with pytest.raises(MissingKeyError, match=r"no \['env_state_dict'"):
        collector.load_state_dict({"frames": 3, "iter": 1, "received": [], "policy_state_dict": {}})
    whole = SyncDataCollector(Saved, trajs_per_batch=2)
    with pytest.raises(MissingKeyError, match="trajs_per_batch"):
        whole.load_state_dict(collector.state_dict())


@pytest.mark.slow
def test_a_state_dict_of_other_workers_is_refused():
    two = MultiSyncDataCollector(Saved, num_workers=2, frames_per_batch=4)
    one = MultiSyncDataCollector(Saved, num_workers=1, frames_per_batch=4)

    with pytest.raises(MissingKeyError, match="worker1"):
        two.load_state_dict(one.state_dict())
    with pytest.raises(ArgumentCountError, match="more than 1 workers"):
        one.load_state_dict(two.state_dict())
    two.shutdown(), one.shutdown()


# ------------------------------------------------------------------------ killed in mid-training

TRAINING = Path(__file__).parent / "resumed_training.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [
        *("serial", "parallel", "multi_sync"),
        *(pytest.param(kind, marks=pytest.mark.sweep) for kind in ("brax", "mixed")),
    ],
)
def test_a_training_that_is_killed_goes_on_to_the_same_bits(kind, tmp_path):
    def run(name: str, *more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(TRAINING), kind, str(tmp_path / name), *more],
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )

    whole = run("whole")
    killed = run("cut", "--kill-at", "5")
    resumed = run("cut")

    assert whole.returncode == 0, whole.stderr[-2000:]
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert "resumed after 4 iterations" in resumed.stdout
    assert whole.stdout.splitlines()[-1] == resumed.stdout.splitlines()[-1]
    assert whole.stdout.splitlines()[-1].startswith("digest ")
