"""World models of TorchRL that are rolled out in their latent state."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import WorldModel

from envkit import (
    Composite,
    PendulumEnv,
    StepCounter,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    WorldModelEnv,
    check_env_specs,
)
from envkit.errors import ArgumentTypeError, MissingKeyError, UnknownStateError

pytestmark = pytest.mark.filterwarnings("ignore:set_seed:UserWarning")  # where an env is checked


class Joined(nn.Module):
    """A linear map of its inputs side by side."""

    def __init__(self, width, out):
        super().__init__()
        self.map = nn.Linear(width, out)

    def forward(self, *parts):
        return self.map(torch.cat(parts, -1))


class Far(nn.Module):
    def forward(self, latent):
        return latent.norm(dim=-1, keepdim=True) > 1.5


def world(**heads):
    torch.manual_seed(0)
    encoder = TensorDictModule(Joined(2, 4), ["th", "thdot"], ["latent"])
    dynamics = TensorDictModule(Joined(5, 4), ["latent", "action"], [("next", "latent")])
    reward = TensorDictModule(nn.Linear(4, 1), [("next", "latent")], [("next", "reward")])
    return WorldModel(encoder, dynamics, reward, **heads)


@pytest.fixture(scope="module")
def real():
    """A pendulum whose angle and speed have an axis each."""
    return TransformedEnv(PendulumEnv(), UnsqueezeTransform(-1, in_keys=["th", "thdot"]))


def observed(*size):
    return TensorDict({"th": torch.randn(*size, 1), "thdot": torch.randn(*size, 1)}, size)


def policy():
    return TensorDictModule(nn.Linear(4, 1), ["latent"], ["action"])


@pytest.mark.parametrize("size", [(), (3,), (2, 3)], ids=str)
def test_a_rollout_is_what_the_parts_of_the_model_compute(real, size):
    model = world()
    start, act = model.encode(observed(*size)), policy()

    data = WorldModelEnv(model, real).rollout(4, act, tensordict=start.clone())

    assert data.batch_size == (*size, 4)
    latent = start["latent"]
    for step in data.unbind(-1):
        assert torch.allclose(step["latent"], latent)
        following = model.step_module(act(TensorDict({"latent": latent}, size)))["next"]
        latent = following["latent"]
        assert torch.allclose(step["next", "latent"], latent)
        assert torch.allclose(step["next", "reward"], following["reward"])
        assert not step["next", "done"].any()


def test_specs_are_those_of_the_real_env_and_the_latent_state(real):
    env = WorldModelEnv(world(), real, batch_size=[3])

    assert list(env.observation_keys) == ["latent"]
    assert env.action_spec.shape == (3, 1) and env.reward_spec.shape == (3, 1)
    check_env_specs(env, seed=0, tensordict=world().encode(observed(3)).select("latent"))


def test_a_head_for_flags_ends_episodes(real):
    done = TensorDictModule(Far(), [("next", "latent")], [("next", "done")])
    model = world(done_head=done)
    start = TensorDict({"latent": 2 * torch.randn(64, 4)}, [64])

    data = WorldModelEnv(model, real).rollout(
        3, policy(), tensordict=start, break_when_any_done=False
    )

    following = data["next"]
    assert torch.equal(following["done"][:, 0], Far()(following["latent"][:, 0]))
    assert 0 < following["done"][:, 0].sum() < 64


def test_what_a_decoder_writes_is_shown_beside_the_latent_state(real):
    decoder = TensorDictModule(nn.Linear(4, 2), [("next", "latent")], [("next", "seen")])
    model = world()
    model_with_picture = type("Seeing", (), {})()
    model_with_picture.encode = model.encode
    model_with_picture.step_module = nn.Sequential(model.step_module, decoder)
    model_with_picture.step_module.in_keys = model.step_module.in_keys
    env = WorldModelEnv(model_with_picture, real, observation_spec=Composite(seen=Unbounded((2,))))

    data = env.rollout(3, policy(), tensordict=model.encode(observed(5)))

    following = data["next"]
    assert torch.allclose(following["seen"], decoder.module(following["latent"]))


def test_gradients_of_imagined_rewards_reach_the_policy(real):
    act = policy()
    env = TransformedEnv(WorldModelEnv(world(), real), StepCounter(3))

    env.rollout(3, act, tensordict=world().encode(observed(4)))["next", "reward"].sum().backward()

    assert act.module.weight.grad.abs().sum() > 0


def test_mistakes_are_told(real):
    env = WorldModelEnv(world(), real)

    with pytest.raises(UnknownStateError, match=r"begins at the latent state 'latent'.*encode"):
        env.reset()
    with pytest.raises(MissingKeyError, match=r"the encoder writes no 'z'.*latent_key="):
        WorldModelEnv(world(), real, latent_key="z")
    with pytest.raises(
        ArgumentTypeError, match=r"Linear, but must have encode\(\) and step_module"
    ):
        WorldModelEnv(nn.Linear(1, 1), real)
