"""What judges or tries out a policy teaches the env nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit import (
    Collector,
    GymEnv,
    JaxEnv,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    Transform,
    TransformedEnv,
    VecNorm,
    VecNormV2,
    check_env_specs,
    evaluate,
)
from envkit.env.learning import not_learning
from tests.zoo.walkers import Pendulum

pendulum = partial(GymEnv, "Pendulum-v1", max_episode_steps=10)
inner = partial(JaxEnv, Pendulum(), batch_size=[2], episode_length=10)


class Centred(Transform):
    """A user's transform with memory: subtracts the mean of all that it has seen."""

    learns = True

    def __init__(self, in_keys):
        super().__init__(in_keys)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))

    def _apply_transform(self, value):
        if not self.frozen:
            self.total += value.sum()
            self.count += value.numel()
        return value - self.total / self.count.clamp_min(1)

    def transform_observation_spec(self, observation_spec):
        return observation_spec

    def _reset(self, td, td_reset):
        return self._call(td_reset)


def behind(make, kind):
    return TransformedEnv(make(), kind(in_keys=["observation"]))


PLACES = {
    "single": lambda kind: behind(pendulum, kind),
    "around a pool": lambda kind: behind(partial(SerialEnv, 2, pendulum), kind),
    "inside a pool": lambda kind: SerialEnv(2, partial(behind, pendulum, kind)),
    "inside workers": lambda kind: ParallelEnv(2, partial(behind, pendulum, kind), num_processes=1),
    "in programs": lambda kind: behind(inner, kind),
    "a member": lambda kind: MixedEnv([SerialEnv(2, partial(behind, pendulum, kind))]),
}


@pytest.fixture(params=[VecNorm, VecNormV2, Centred], ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.mark.filterwarnings("ignore:evaluate.. cannot put")
@pytest.mark.parametrize("place", PLACES)
def test_one_policy_is_judged_alike_twice_and_statistics_stay_where_they_were(place, kind, opened):
    env = opened(PLACES[place](kind))
    env.set_seed(0)
    env.rollout(15, break_when_any_done=False)
    sizes = [spec.shape[-1] for spec in (env.observation_spec["observation"], env.action_spec)]
    policy = TensorDictModule(torch.nn.Linear(*sizes), ["observation"], ["action"])
    before = shown_after(env)

    both = evaluate(env, {"one": policy, "again": policy}, 4, seed=1, max_steps=10)

    assert torch.equal(both["one"].returns, both["again"].returns)
    assert torch.equal(shown_after(env), before)


def shown_after(env):
    """Give what an env shows after a seed, while nothing learns."""
    with not_learning(env):
        env.set_seed(7)
        return env.reset()["observation"].clone()


@pytest.mark.filterwarnings("ignore:evaluate.. cannot put")
def test_statistics_learn_if_that_is_asked_for_and_again_afterwards(opened):
    env = opened(behind(pendulum, VecNormV2))
    env.rollout(5)
    policy = TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"])

    evaluate(env, policy, 1, seed=1)
    assert not env.transform.frozen
    with not_learning(env):
        with not_learning(env):
            assert env.transform.frozen
        assert env.transform.frozen
    assert not env.transform.frozen
    count = env.transform.kept["observation"].count.clone()
    env.rollout(5)
    assert (env.transform.kept["observation"].count > count).all()


def test_a_check_of_specs_teaches_nothing(opened):
    env = opened(behind(pendulum, VecNormV2))
    env.rollout(5)
    count = env.transform.kept["observation"].count.clone()

    check_env_specs(env)

    assert torch.equal(env.transform.kept["observation"].count, count)


def test_trying_a_policy_out_changes_no_data(kind):
    net = torch.nn.Linear(3, 1).requires_grad_(False)
    module = TensorDictModule(net, ["observation"], ["action"])

    def collected(policy):
        make = partial(behind, pendulum, kind)
        with Collector(make, policy, frames_per_batch=20, total_frames=20) as collector:
            collector.set_seed(3)
            return collector.next()["observation"]

    tried = collected(module)

    assert torch.equal(collected(module), tried)
    assert torch.equal(collected(lambda td: td.set("action", net(td["observation"]))), tried)
