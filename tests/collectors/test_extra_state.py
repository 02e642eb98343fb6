"""What a policy keeps beside its weights goes where they go."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit import GymEnv, MultiaSyncDataCollector, MultiSyncDataCollector, SyncDataCollector


class Steady(torch.nn.Module):
    """Does what it keeps beside its weights, as extra state."""

    def __init__(self, force: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.force = force

    def forward(self, observation):
        return observation[..., :1] * self.weight + self.force

    def get_extra_state(self):
        return {"force": self.force}

    def set_extra_state(self, state):
        self.force = state["force"]


def steady(force):
    return TensorDictModule(Steady(force), ["observation"], ["action"])


@pytest.mark.parametrize("form", ["module", "state dict", "resumed"])
def test_extra_state_of_a_policy_is_taken_with_its_weights(form):
    def collector_of(policy):
        return SyncDataCollector(
            lambda: GymEnv("Pendulum-v1"),
            policy,
            frames_per_batch=2,
            total_frames=-1,
            record_for_resume=True,
        )

    source, target = collector_of(steady(1.5)), collector_of(steady(0.0))
    for collector in (source, target):
        next(iter(collector))
    if form == "resumed":
        target.load_state_dict(source.state_dict())
    else:
        module = steady(1.5)
        target.update_policy_weights_(module if form == "module" else module.state_dict())

    data = next(iter(target))
    for collector in (source, target):
        collector.shutdown()

    assert data["action"].flatten().tolist() == [1.5, 1.5]


def in_workers(policy, kind=MultiSyncDataCollector, count=2, **options):
    return kind(
        [lambda: GymEnv("Pendulum-v1")] * count,
        policy,
        frames_per_batch=2 * count,
        total_frames=-1,
        **options,
    )


def actions_of(collector):
    return next(iter(collector))["action"].flatten().tolist()


@pytest.mark.parametrize("kind", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_workers_get_extra_state_with_the_weights(kind):
    policy = steady(0.0)
    collector = in_workers(policy, kind, count=1)

    assert actions_of(collector) == [0.0, 0.0]
    policy.module.force = 1.5
    collector.update_policy_weights_()
    seen = [actions_of(collector) for _ in range(2)][-1]  # one may have been under way
    collector.update_policy_weights_(
        {name: value for name, value in policy.state_dict().items() if "extra" not in name}
    )
    kept = [actions_of(collector) for _ in range(2)][-1]
    collector.shutdown()

    assert seen == kept == [1.5, 1.5]


def test_extra_state_is_that_of_the_moment_of_the_update():
    class Listed(Steady):
        def get_extra_state(self):
            return self.kept

        def set_extra_state(self, state):
            self.force = state["force"]

    policy = TensorDictModule(Listed(0.0), ["observation"], ["action"])
    policy.module.kept = {"force": 1.0}
    collector = in_workers(policy, count=1)
    collector.update_policy_weights_()
    policy.module.kept["force"] = -1.0

    seen = actions_of(collector)
    collector.shutdown()

    assert seen == [1.0, 1.0]


@pytest.mark.parametrize("is_updated", [True, False], ids=["updated", "as built"])
def test_workers_go_on_from_a_file_with_extra_state(is_updated):
    source = in_workers(steady(0.5), record_for_resume=True)
    target = in_workers(steady(0.0), record_for_resume=True)
    next(iter(source))
    if is_updated:
        source.update_policy_weights_(steady(1.5))  # which no worker has yet

    target.load_state_dict(source.state_dict())
    seen = actions_of(target)
    for collector in (source, target):
        collector.shutdown()

    assert seen == [1.5 if is_updated else 0.5] * 4
