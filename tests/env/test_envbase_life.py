"""Seeds, and an env as a module."""

from __future__ import annotations

import copy
import io
import pickle
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from envkit import (
    AutoResetEnv,
    AutoResetTransform,
    BraxEnv,
    EnvBase,
    GymEnv,
    InitTracker,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
)
from envkit.env.seeding import next_seed
from envkit.errors import ArgumentError
from envkit.specs import Categorical, Composite, Unbounded
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.shaped_envs import Groups, Quiet, Several

mk = partial(Count, 5)
CHAIN = [0, 795726461, 2841183792, 2309840538]


# --------------------------------------------------------------------------------------------- seeds


def test_the_worked_chain_of_seeds():
    env = Count(5)

    assert env.set_seed(0) == 795726461
    assert env.seed_seen == 0
    assert [next_seed(seed) for seed in CHAIN[:-1]] == CHAIN[1:]
    assert next_seed(1) == 4087425277


def test_a_static_seed_is_returned_as_it_is():
    assert Count(5).set_seed(7, static_seed=True) == 7


def test_a_batch_takes_the_chain_apart():
    env = SerialEnv(3, mk)

    following = env.set_seed(0)
    seen = list(env.seed_seen)
    env.close()

    assert seen == CHAIN[:3]
    assert following == CHAIN[3]


@given(st.integers(0, 2**63 - 1))
def test_the_next_seed_is_that_of_the_protocol(seed):
    expected = int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % (2**32 - 1)

    assert Count(5).set_seed(seed) == next_seed(seed) == expected


@pytest.mark.parametrize("seed", [-1, 2**64, 2**200, 1.5, "seven"])
@pytest.mark.parametrize(
    "make",
    [
        mk,
        partial(GymEnv, "CartPole-v1"),
        partial(GymEnv, "CartPole-v1", num_envs=2),
        partial(SerialEnv, 2, mk),
        partial(BraxEnv, "fast", device="cpu"),
        lambda: TransformedEnv(Count(5), StepCounter()),
        lambda: MixedEnv([SerialEnv(1, mk), SerialEnv(1, mk)]),
    ],
)
def test_a_number_that_generators_cannot_take_is_no_seed(make, seed):
    with pytest.raises(
        ArgumentError, match=r"seed is .*must be (an integer of 0 or|at most 2\*\*64)"
    ):
        make().set_seed(seed)


def test_seeds_from_numpy_are_seeds():
    env = Count(5)

    assert env.set_seed(np.int64(0)) == 795726461
    assert env.rand_action()["action"].shape == (1,)


@pytest.mark.parametrize(
    "make",
    [
        mk,
        partial(StatelessCount, 5, batch_size=[3]),
        partial(GymEnv, "CartPole-v1"),
        partial(SerialEnv, 2, mk),
        partial(BraxEnv, "fast", device="cpu"),
        lambda: TransformedEnv(Count(5), StepCounter()),
        Groups,
    ],
)
def test_seeding_leaves_the_global_generators_alone(make):
    env = make()
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

    env.set_seed(3)
    first = env.rollout(3), env.rand_action()

    assert torch.get_rng_state().equal(states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]
    env.set_seed(3)
    assert (env.rollout(3) == first[0]).all()
    assert (env.rand_action() == first[1]).all()
    env.close(raise_if_closed=False)


def test_random_actions_follow_the_seed():
    env, other = Several(), Several()
    env.set_seed(1)
    other.set_seed(1)

    assert (env.rollout(5) == other.rollout(5)).all()
    other.set_seed(2)
    env.set_seed(1)
    assert not (env.rollout(5)["deep", "force"] == other.rollout(5)["deep", "force"]).all()


# ------------------------------------------------------------------------------------------ a module


class Parametric(Quiet):
    """Pushes its position by a parameter; a buffer counts the resets."""

    def __init__(self, **kwargs):
        super().__init__(20, **kwargs)
        self.push = nn.Parameter(torch.ones(1))
        self.register_buffer("resets", torch.zeros(1))
        self.observation_spec = Composite(position=Unbounded((1,)))
        self.action_spec = Unbounded((1,))

    def _reset(self, td, **kwargs):
        self.resets += 1
        return super()._reset(td)

    def _out(self):
        return TensorDict({"position": self.c * self.push})

    def _rewards(self, td):
        return {"reward": -self.push}


def test_parameters_and_buffers_are_those_of_a_module():
    env = Parametric()
    env.add_module("head", nn.Linear(1, 2))

    assert {name for name, _ in env.named_parameters()} == {"push", "head.weight", "head.bias"}
    assert dict(env.named_buffers()).keys() == {"resets"}
    assert dict(env.named_children()).keys() == {"head"}
    assert sum(parameter.numel() for parameter in env.parameters()) == 5


def test_gradients_reach_the_parameters_of_an_env():
    env = Parametric()

    env.rollout(3)["next", "reward"].sum().backward()

    assert env.push.grad.item() == -3
    env.zero_grad()
    assert env.push.grad is None
    env.requires_grad_(False)
    assert not env.push.requires_grad


def test_train_eval_and_apply_reach_the_parts():
    env = TransformedEnv(Parametric(), StepCounter())
    seen = []

    assert env.training
    env.eval()
    assert not env.base_env.training and not env.transform.training
    env.train()
    assert env.base_env.training
    assert env.apply(seen.append) is env
    assert env.base_env in seen and env in seen


def test_state_dicts_carry_parameters_and_buffers():
    env, other = Parametric(), Parametric()
    env.push.data.fill_(3.0)
    env.reset()

    missing = other.load_state_dict(env.state_dict())

    assert not missing.missing_keys and not missing.unexpected_keys
    assert other.push.item() == 3 and other.resets.item() == 1
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})


def test_hooks_of_a_module_run():
    env, calls = Parametric(), []
    env.register_state_dict_post_hook(lambda *args: calls.append("saved"))
    env.register_load_state_dict_post_hook(lambda *args: calls.append("loaded"))

    env.load_state_dict(env.state_dict())

    assert calls == ["saved", "loaded"]


@pytest.mark.parametrize("cast", [lambda env: env.to(torch.float64), lambda env: env.double()])
def test_a_dtype_casts_parameters_and_no_specs(cast):
    env = Parametric()

    assert cast(env) is env
    assert env.push.dtype == env.resets.dtype == torch.float64
    assert env.observation_spec["position"].dtype == torch.float32
    assert env.device is None


def test_an_env_moves_with_its_specs_and_outputs():
    env = Parametric()

    assert env.to("cpu") is env
    assert env.device == torch.device("cpu")
    assert {leaf.device for leaf in env.specs.values(True, True)} == {torch.device("cpu")}
    assert env.is_spec_locked
    assert env.reset().device == torch.device("cpu")
    assert env.cpu() is env


def test_moving_takes_parameters_and_specs_along():
    env = Parametric().to("meta")

    assert env.push.device.type == env.resets.device.type == "meta"
    assert {leaf.device.type for leaf in env.specs.values(True, True)} == {"meta"}


def test_a_moved_env_keeps_its_seed():
    env = Count(5)
    env.set_seed(3)
    first = env.rand_action()

    env.to("cpu")

    assert (env.rand_action() == first).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_env_moves_to_a_gpu():
    env = Parametric()
    env.set_seed(0)

    assert env.cuda() is env
    assert env.action_spec.device.type == "cuda"
    assert env.rollout(3).device.type == "cuda"
    assert env.cpu().rollout(3).device.type == "cpu"


class Moved(Parametric):
    """Says where it was asked to go."""

    def to(self, dest):
        return dest


def test_cuda_takes_what_a_module_takes():
    env = Moved()

    assert [env.cuda(), env.cuda(1), env.cuda(torch.device("cuda:2"))] == [
        torch.device("cuda", index) for index in range(3)
    ]


@pytest.mark.parametrize("make", [mk, Groups, Several, Parametric, partial(StatelessCount, 5)])
def test_envs_are_copied_and_pickled(make):
    env = make()
    env.set_seed(2)
    env.reset()

    for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert twin.specs == env.specs
        assert twin.is_spec_locked
        assert (twin.rand_action() == copy.deepcopy(env).rand_action()).all()
        assert twin.rollout(3).shape == (3,)


def test_a_saved_state_dict_is_plain_data():
    buffer = io.BytesIO()
    torch.save(Parametric().state_dict(), buffer)
    buffer.seek(0)

    assert torch.load(buffer, weights_only=True).keys() == {"push", "resets"}


def test_an_env_may_sit_in_another_module():
    holder = nn.ModuleDict({"env": Parametric(), "policy": nn.Linear(1, 1)})

    assert isinstance(holder["env"], EnvBase)
    assert "env.push" in holder.state_dict()


# ------------------------------------------------------------- keywords that every class accepts


CLASSES = {
    "gym": partial(GymEnv, "CartPole-v1"),
    "brax": partial(BraxEnv, "fast", batch_size=[2], device="cpu"),
    "serial": partial(SerialEnv, 2, mk),
    "parallel": partial(ParallelEnv, 2, mk, num_processes=1),
    "mixed": lambda **options: MixedEnv([SerialEnv(2, mk), SerialEnv(1, mk)], **options),
    "transformed": lambda **options: TransformedEnv(Count(5), StepCounter(), **options),
}


class Memory(nn.Module):
    """A policy that asks for a hidden state."""

    def make_tensordict_primer(self):
        return TensorDictPrimer({"hidden": Unbounded((3,))}, expand_specs=True)


@pytest.fixture(scope="module", params=CLASSES)
def built(request):
    """One env of each class, given all the keywords at once."""
    env = CLASSES[request.param](spec_locked=False, auto_reset=True, policy=Memory())
    yield env
    env.close(raise_if_closed=False)


def test_every_kind_of_env_takes_the_common_keywords(built):
    kinds = [type(transform) for transform in built.transform.flat()]

    root = built.reset()

    assert isinstance(built, AutoResetEnv)
    assert kinds == [AutoResetTransform, InitTracker, TensorDictPrimer]
    assert not built.base_env.is_spec_locked
    assert root["hidden"].shape == (*built.batch_size, 3)
    assert root["is_init"].all()


@pytest.mark.parametrize("kind", CLASSES)
def test_the_keyword_seed_does_as_set_seed(kind):
    seeded, other = CLASSES[kind](seed=3), CLASSES[kind]()
    other.set_seed(3)

    found, expected = (env.rollout(5, break_when_any_done=False) for env in (seeded, other))

    assert bool((found == expected).all())
    for env in (seeded, other):
        env.close(raise_if_closed=False)


def test_a_constructor_that_names_seed_gets_it_and_a_wrong_one_is_refused():
    class Own(Quiet):
        def __init__(self, seed):
            super().__init__(3)
            self.own_seed = seed

    assert Own(seed=4).own_seed == 4
    assert Own(None).own_seed is None
    with pytest.raises(ArgumentError, match="seed is -1"):
        Count(5, seed=-1)


def test_every_class_takes_the_common_keywords():
    class Bare(Quiet):
        def __init__(self):
            super().__init__(3)
            self.observation_spec = Composite(x=Unbounded((1,)))
            self.action_spec = Categorical(2)

        def _out(self):
            return TensorDict({"x": torch.zeros(1)})

    assert Bare().is_spec_locked
    assert not Bare(spec_locked=False).is_spec_locked
    assert isinstance(Bare(policy=nn.Linear(1, 1)), Bare)
    assert isinstance(Bare(auto_reset=True), TransformedEnv)
    with pytest.raises(TypeError, match="unexpected keyword"):
        Bare(speed=3)


def test_a_batch_is_locked_before_its_sub_envs_are_built():
    locked, free, freed = SerialEnv(2, mk), SerialEnv(2, mk, spec_locked=False), SerialEnv(2, mk)

    assert locked.is_spec_locked
    assert not free.is_spec_locked
    assert locked.is_closed and free.is_closed  # nothing was built to say so
    assert not freed.set_spec_lock_(False).is_spec_locked
    for env, stays in ((locked, True), (free, False), (freed, False)):
        env.reset()
        assert env.observation_spec.is_locked is env.is_spec_locked is stays
        env.close()
