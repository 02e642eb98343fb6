"""Envs that step by a model: what they keep of it, gradients, Dreamer's latents, beliefs."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from envkit import (
    DreamerDecoder,
    DreamerEnv,
    GymEnv,
    ImaginedEnv,
    ModelBasedEnvBase,
    PendulumEnv,
    RewardSum,
    TransformedEnv,
    check_env_specs,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingKeyError,
    NoParentError,
)
from tests.envs.model_based.models import Hidden, latent, linear, moments

pytestmark = pytest.mark.filterwarnings("ignore:set_seed:UserWarning")  # where an env is checked


def dreamer(**options):
    model, decoder = latent()
    env = DreamerEnv(model, (3,), (2,), **{"obs_decoder": decoder, **options})
    env.set_specs_from_env(PendulumEnv())
    return env


@pytest.fixture(scope="module")
def gym():
    with GymEnv("Pendulum-v1") as env:
        yield env


# -- any model -------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [[], [3]], ids=str)
def test_a_model_does_what_the_specs_say(batch_size):
    check_env_specs(Hidden(linear(), batch_size=batch_size), seed=0)


def test_a_step_is_what_the_model_says_and_leaves_its_input():
    model = linear()
    root = TensorDict(
        {"hidden": torch.ones(5, 4), "action": torch.ones(5, 1), "seen": torch.ones(5)}, [5]
    )

    td = Hidden(model).step(root)

    hidden, reward = model.module(torch.ones(5, 4), torch.ones(5, 1))
    assert td["next", "hidden"].equal(hidden) and td["next", "reward"].equal(reward)
    assert td["hidden"].equal(torch.ones(5, 4))
    assert set(td["next"].keys()) == {"hidden", "reward", "done", "terminated"}
    assert not td["next", "done"].any()


def test_gradients_flow_through_a_rollout_to_actions_and_the_model():
    model = linear()
    actions = torch.zeros(3, 1, requires_grad=True)

    data = Hidden(model).rollout(3, actions=actions.unbind(0))
    data["next", "reward"].sum().backward()

    assert actions.grad.abs().min() > 0
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_given_parameters_stand_for_those_of_the_model():
    model = linear()
    before = [parameter.clone() for parameter in model.parameters()]
    ones = [torch.ones_like(parameter, requires_grad=True) for parameter in before]
    named = TensorDict.from_module(model).detach().apply(torch.ones_like)
    root = TensorDict({"hidden": torch.zeros(4), "action": torch.zeros(1)})

    rewards = [
        Hidden(model, params=params).step(root.clone())["next", "reward"]
        for params in (ones, named)
    ]

    assert [reward.item() for reward in rewards] == [5, 5]  # 4 hidden values of 1, and the bias
    rewards[0].sum().backward()
    assert all(one.grad.abs().sum() >= 0 for one in (ones[1], ones[3]))
    assert all(map(torch.equal, model.parameters(), before))


def test_parameters_of_another_model_are_refused():
    another = TensorDict.from_module(nn.Linear(2, 2))

    with pytest.raises(ArgumentError, match=r"world model also has \['module"):
        Hidden(linear(), params=another)


def test_given_buffers_stand_for_those_of_the_model():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("by", torch.zeros(4))

        def forward(self, hidden):
            return hidden + self.by

    model = TensorDictModule(Shift(), ["hidden"], ["hidden"])
    root = TensorDict({"hidden": torch.zeros(4), "action": torch.zeros(1)})

    following = Hidden(model, buffers=[torch.ones(4)]).step(root)["next"]

    assert following["hidden"].tolist() == [1, 1, 1, 1]
    assert following["reward"].tolist() == [0]


def test_rows_that_are_not_stepped_stay():
    env = Hidden(linear())
    root = env.rand_action(env.reset(TensorDict(batch_size=[3])))
    mask = torch.tensor([True, False, True])

    following = env.step(root.clone().set("_step", mask))["next"]

    whole = env.step(root.clone())["next"]
    assert following["hidden"][mask].allclose(whole["hidden"][mask])
    assert following["hidden"][1].equal(root["hidden"][1]) and following["reward"][1] == 0


def test_specs_are_taken_over_for_the_own_batch():
    env = Hidden(linear(), batch_size=[2])

    env.set_specs_from_env(PendulumEnv(batch_size=[5]))

    assert env.observation_spec["th"].shape == (2,) and env.action_spec.shape == (2, 1)
    assert env.single_full_state_spec == PendulumEnv(device="cpu").full_state_spec
    assert env.is_spec_locked


def test_seeding_warns_and_decides_what_is_drawn():
    env = Hidden(linear())
    with pytest.warns(UserWarning, match=r"set_seed\(\) of Hidden seeds random actions"):
        env.set_seed(0)
    first = env.rollout(3)
    with pytest.warns(UserWarning, match="set_seed"):
        env.set_seed(0)

    assert env.rollout(3)["action"].equal(first["action"])


def test_what_is_no_model_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"world_model is of type Linear, .* Wrap it"):
        Hidden(nn.Linear(5, 4))
    with pytest.raises(ArgumentError, match="params are 1 tensors, but the world model has 4"):
        Hidden(linear(), params=[torch.ones(1)])
    with pytest.raises(TypeError, match="abstract"):
        ModelBasedEnvBase(linear())


# -- Dreamer ---------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [[], [2]], ids=str)
def test_imagination_does_what_its_specs_say_decoded_or_not(batch_size):
    check_env_specs(dreamer(batch_size=batch_size), seed=0)
    check_env_specs(TransformedEnv(dreamer(batch_size=batch_size), DreamerDecoder()), seed=0)


def test_imagination_goes_on_from_the_latents_in_the_data():
    start = TensorDict({"state": torch.ones(5, 3), "belief": torch.ones(5, 2)}, [5])
    env = dreamer()

    data = env.rollout(3, actions=[torch.ones(5, 1)] * 3, tensordict=start)

    assert data["next", "state"][0, :, 0].tolist() == [2, 3, 4]
    assert data["next", "belief"][0, :, 0].tolist() == [0.5, 0.25, 0.125]
    assert data["next", "reward"][0, :, 0].tolist() == [6, 9, 12]
    assert start["state"].equal(torch.ones(5, 3))


def test_imagination_draws_what_the_data_does_not_say():
    root = dreamer().reset(TensorDict({"belief": torch.ones(4, 2)}, [4]))

    assert root["belief"].equal(torch.ones(4, 2))
    assert root["state"].unique().numel() == 12


def test_imagination_never_resets_by_itself():
    env = dreamer()
    root = env.reset(TensorDict(batch_size=[2])).set("done", torch.ones(2, 1, dtype=torch.bool))

    assert not env.any_done(root) and env.maybe_reset(root) is root


def test_latents_are_decoded_now_or_after_the_action():
    env = dreamer()
    root = env.reset(TensorDict({"state": torch.ones(3), "belief": torch.ones(2)}))

    now = env.decode_obs(root.clone())["reco_pixels"]
    then = env.decode_obs(root.set("action", torch.ones(1)), compute_latents=True)["reco_pixels"]

    assert now.tolist() == [1, 1, 1, 1, 1] and then.tolist() == [2, 2, 2, 0.5, 0.5]


def test_a_decoder_adds_what_is_imagined_to_every_step():
    env = TransformedEnv(dreamer(), DreamerDecoder())

    data = env.rollout(3)

    latents = torch.cat([data["next", "state"], data["next", "belief"]], -1)
    assert data["next", "reco_pixels"].equal(latents)
    assert data["reco_pixels"][1:].equal(latents[:-1])
    assert env.observation_spec["reco_pixels"].shape == (5,)


def test_a_decoder_without_what_it_needs_says_so():
    with pytest.raises(ArgumentError, match="No observation decoder provided"):
        dreamer(obs_decoder=None).decode_obs(TensorDict())
    with pytest.raises(NoParentError, match="Put it into one"):
        DreamerDecoder()(TensorDict({"state": torch.ones(3), "belief": torch.ones(2)}))
    outside = TransformedEnv(PendulumEnv(), RewardSum())
    with pytest.raises(ArgumentTypeError, match="in an env around PendulumEnv"):
        outside.append_transform(DreamerDecoder()).reset()


# -- beliefs ---------------------------------------------------------------------------


def test_a_belief_moves_as_the_model_says(gym):
    env = ImaginedEnv(moments(), gym)
    check_env_specs(env, seed=0)

    data = env.rollout(3, tensordict=TensorDict({"observation": torch.zeros(2, 3)}, [2]))

    assert data["next", "observation", "mean"][1, :, 0].tolist() == [1, 2, 3]
    assert data["next", "observation", "var"][1, 2].equal(3 * torch.eye(3))
    assert not data["observation", "var"][:, 0].any()
    assert not data["next", "reward"].any() and not data["next", "done"].any()


@pytest.mark.parametrize(
    ("asked", "batch_size"), [(None, (1,)), (4, (4,)), ([2, 3], (2, 3)), ([], ())], ids=str
)
def test_the_batch_size_of_beliefs_is_that_of_the_env_or_what_is_asked_for(gym, asked, batch_size):
    env = ImaginedEnv(moments(), gym, batch_size=asked)

    root = env.reset()

    assert env.batch_size == batch_size == root.batch_size
    assert root["observation", "var"].shape == (*batch_size, 3, 3) and env.action_spec.shape == (
        *batch_size,
        1,
    )
    assert (
        gym.observation_spec["observation"]
        .expand(*batch_size, 3)
        .is_in(root["observation", "mean"])
    )


def test_a_belief_in_the_data_is_kept_and_nothing_ends(gym):
    env = ImaginedEnv(moments(), gym)
    belief = TensorDict({"mean": torch.ones(1, 3), "var": torch.ones(1, 3, 3)}, [1])

    root = env.reset(TensorDict({"observation": belief}, [1]))

    assert root["observation", "var"].equal(torch.ones(1, 3, 3))
    assert not env.any_done(root) and env.maybe_reset(root) is root


def test_the_next_belief_may_be_written_elsewhere(gym):
    env = ImaginedEnv(moments("predicted"), gym, next_observation_key="predicted")
    astray = ImaginedEnv(moments("predicted"), gym)

    assert env.rollout(2)["next", "observation", "var"][0, 1].equal(2 * torch.eye(3))
    with pytest.raises(
        MissingKeyError, match=r"no 'mean' and 'var' under \('next', 'observation'\)"
    ):
        astray.rollout(1)
    with pytest.raises(MissingKeyError, match=r"PendulumEnv has none; .* CatTensors"):
        ImaginedEnv(moments(), PendulumEnv())
