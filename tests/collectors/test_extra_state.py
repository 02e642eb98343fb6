"""What a policy keeps beside its weights goes where they go."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit import GymEnv, SyncDataCollector


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

    def steady(force):
        return TensorDictModule(Steady(force), ["observation"], ["action"])

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
