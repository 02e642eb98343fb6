"""Entries of a policy that travel with the data of a pool: ``policy_proof``."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit import ParallelEnv, SerialEnv, check_env_specs
from tests.zoo.envs import Count

make_count = partial(Count, 5)
both = pytest.mark.parametrize(
    "batched", [SerialEnv, partial(ParallelEnv, num_processes=2)], ids=["serial", "parallel"]
)


class Memory(torch.nn.Module):
    """A policy that adds 1 to a hidden state of two features, and writes a nested entry too."""

    def forward(self, td):
        hidden = td.get("hidden", None)
        hidden = torch.zeros(*td.batch_size, 2) if hidden is None else hidden
        count = torch.ones(*td.batch_size, 3, dtype=torch.int64)
        td.set("action", torch.ones(*td.batch_size, 1, dtype=torch.int64))
        return td.set("hidden", hidden + 1).set(("deep", "count"), count)


class Watcher(Count):
    """Remembers the hidden state it was given."""

    hidden = None

    def _step(self, td):
        self.hidden = td.get("hidden", torch.zeros(0)).tolist()
        return super()._step(td)


@pytest.mark.parametrize("use_buffers", [True, False])
@both
def test_entries_of_a_policy_travel_through_step_and_reset(opened, batched, use_buffers):
    policy = Memory()
    makers = [partial(Watcher, 2), partial(Watcher, 9)]
    env = opened(batched(2, makers, policy_proof=policy, use_buffers=use_buffers))

    first = env.reset()
    data = env.rollout(3, policy, break_when_any_done=False)

    assert env.policy_proof is policy
    assert first["hidden"].tolist() == [[0.0, 0.0]] * 2
    assert first["deep", "count"].dtype == torch.int64
    assert data["hidden"][..., 0].tolist() == [[1, 2, 1], [1, 2, 3]]
    assert data["next", "hidden"][..., 0].tolist() == [[1, 2, 1], [1, 2, 3]]
    assert data["next", "deep", "count"].shape == (2, 3, 3)
    assert list(env.hidden) == [[1.0, 1.0], [3.0, 3.0]]
    check_env_specs(env)


@both
def test_entries_of_a_policy_begin_anew_only_where_an_episode_does(opened, batched):
    policy = Memory()
    env = opened(batched(2, make_count, policy_proof=policy))
    td = env.step_mdp(env.step(policy(env.reset())))

    mask = torch.tensor([[True], [False]])
    alone = env.reset(TensorDict({"_reset": mask}, [2]))
    beside = env.reset(td.set("_reset", ~mask))

    assert alone["hidden"].tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert beside["hidden"].tolist() == [[1.0, 1.0], [0.0, 0.0]]


@both
def test_entries_of_a_policy_may_be_left_out_of_a_step(opened, batched):
    env = opened(batched(2, make_count, policy_proof=Memory()))
    env.reset()

    out = env.step(env.rand_action())

    assert out["next", "hidden"].tolist() == [[0.0, 0.0]] * 2


def test_entries_of_a_policy_carry_no_gradients_out_of_workers(opened):
    weight = torch.ones(2, requires_grad=True)

    def policy(td):
        td.set("action", torch.ones(2, 1, dtype=torch.int64))
        return td.set("hidden", weight.expand(2, 2) * 1)

    env = opened(ParallelEnv(2, make_count, policy_proof=policy, num_processes=1))

    assert not env.step(policy(env.reset()))["next", "hidden"].requires_grad


@both
def test_a_policy_without_entries_of_its_own_adds_nothing(opened, batched):
    plain = TensorDictModule(
        lambda count: torch.zeros_like(count), in_keys=["count"], out_keys=["action"]
    )
    env = opened(batched(2, make_count, policy_proof=plain))

    assert set(env.reset().keys()) == {"count", "done", "terminated"}
