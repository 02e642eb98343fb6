"""Batched envs and a GPU: where data is delivered, and sub-envs that live there.

Each test needs a CUDA device seen by torch, and is skipped without one.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from envkit import GymEnv, ParallelEnv, SerialEnv
from envkit.env.base import EnvBase
from envkit.specs import Bounded, Composite, Unbounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

both = pytest.mark.parametrize(
    "batched", [SerialEnv, partial(ParallelEnv, num_processes=2)], ids=["serial", "parallel"]
)
buffers = pytest.mark.parametrize("use_buffers", [True, False])


class Drift(EnvBase):
    """Moves by its action, on the device it is given."""

    def __init__(self, device: str):
        super().__init__(device=device)
        self.observation_spec = Composite(place=Unbounded((2,), device=device), device=device)
        self.action_spec = Bounded(-1.0, 1.0, (2,), device=device)
        self.place = torch.zeros(2, device=device)

    def _reset(self, td, **kwargs):
        self.place = torch.zeros(2, device=self.device)
        return TensorDict({"place": self.place}, device=self.device)

    def _step(self, td):
        assert td["action"].device.type == self.device.type
        self.place = self.place + td["action"]
        reward = -self.place.norm().reshape(1)
        return TensorDict({"place": self.place, "reward": reward}, device=self.device)

    def _set_seed(self, seed):
        pass


class Lean(torch.nn.Module):
    """A deterministic policy with a parameter on the GPU."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5, -0.25], device="cuda"))

    def forward(self, td):
        assert td["place"].is_cuda
        return td.set("action", (self.weight + 0 * td["place"]).clamp(-1, 1))


def on_cpu(td: TensorDict) -> dict:
    return {key: value.cpu() for key, value in td.items(True, True)}


def assert_equal(left: TensorDict, right: TensorDict) -> None:
    left, right = on_cpu(left), on_cpu(right)
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right[key]) for key, value in left.items())


@buffers
@both
def test_a_policy_on_the_gpu_drives_envs_on_the_cpu(batched, use_buffers):
    env = batched(3, partial(Drift, "cpu"), device="cuda", use_buffers=use_buffers)

    with torch.no_grad():
        data = env.rollout(4, Lean(), break_when_any_done=False)
    env.close()

    assert data.device.type == "cuda"
    assert all(value.is_cuda for value in data.values(True, True))
    assert torch.equal(data["next", "place"][:, -1].cpu(), torch.tensor([[2.0, -1.0]] * 3))


@buffers
@both
def test_envs_on_the_gpu_give_the_same_with_and_without_a_device(batched, use_buffers):
    runs = []
    for more in ({}, {"device": "cuda"}):
        env = batched(3, partial(Drift, "cuda"), use_buffers=use_buffers, **more)
        with torch.no_grad():
            runs.append(env.rollout(4, Lean(), break_when_any_done=False))
        assert env.device.type == "cuda"
        env.close()

    assert_equal(*runs)


@both
def test_masks_and_partial_resets_work_with_data_on_the_gpu(batched):
    env = batched(3, partial(Drift, "cpu"), device="cuda")
    td = env.reset().set("action", torch.ones(3, 2, device="cuda"))
    mask = torch.tensor([True, False, True], device="cuda")

    td = env.step_mdp(env.step(td.set("_step", mask)))
    after = env.reset(td.clone().set("_reset", mask.unsqueeze(-1)))
    env.close()

    assert td["place"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert after["place"].tolist() == [[0, 0], [0, 0], [0, 0]]
    assert after["place"].is_cuda


@both
def test_random_actions_are_drawn_where_the_data_is(batched):
    env = batched(2, partial(GymEnv, "CartPole-v1"), device="cuda")
    env.set_seed(0)

    action = env.rand_action(env.reset())["action"]
    env.close()

    assert action.is_cuda
