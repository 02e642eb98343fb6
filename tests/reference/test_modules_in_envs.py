"""TorchRL's actors and exploration play the same rollouts in its envs and in ours, number for number."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl import modules
from torchrl.modules import ProbabilisticActor, QValueActor

from tests.reference.compare import check_works_alike

SEEN = {"in_keys": ["observation"]}


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


# ---------------------------------------------------------------------------------------- actors


def gaussian(kind, **bounds):
    def make(env):
        head = nn.Sequential(network(3, 2), NormalParamExtractor())
        return ProbabilisticActor(
            TensorDictModule(head, **SEEN, out_keys=["loc", "scale"]),
            in_keys=["loc", "scale"],
            spec=env.action_spec,
            distribution_class=kind,
            distribution_kwargs=bounds,
            return_log_prob=True,
        )

    return make


def noisy(kind, **options):
    def make(env):
        actor = TensorDictModule(network(3, 1), **SEEN, out_keys=["action"])
        noise = kind(spec=env.action_spec, annealing_num_steps=10, **options)
        return TensorDictSequential(actor, noise)

    return make


def greedy(env):
    return QValueActor(network(4, 2), **SEEN, spec=env.action_spec)


def curious(env):
    explore = modules.EGreedyModule(spec=env.action_spec, eps_init=0.5, annealing_num_steps=50)
    return TensorDictSequential(greedy(env), explore)


def chooser(env):
    return ProbabilisticActor(
        TensorDictModule(network(4, 2), **SEEN, out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=modules.OneHotCategorical,
        return_log_prob=True,
    )


def recurrent(kind):
    def make(env):
        memory = kind(4, 6, in_key="observation", out_key="h")
        env.append_transform(memory.make_tensordict_primer())
        values = QValueActor(nn.Linear(6, 2), in_keys=["h"], spec=env.action_spec)
        return TensorDictSequential(memory, values)

    return make


ACTORS = {  # the env of Gymnasium, and what acts in it
    "TanhNormal": ("Pendulum-v1", gaussian(modules.TanhNormal, low=-2.0, high=2.0)),
    "IndependentNormal": ("Pendulum-v1", gaussian(modules.IndependentNormal)),
    "TruncatedNormal": ("Pendulum-v1", gaussian(modules.TruncatedNormal, low=-2.0, high=2.0)),
    "additive noise": ("Pendulum-v1", noisy(modules.AdditiveGaussianModule, sigma_init=0.5)),
    "Ornstein-Uhlenbeck": ("Pendulum-v1", noisy(modules.OrnsteinUhlenbeckProcessModule)),
    "QValueActor": ("CartPole-v1", greedy),
    "EGreedyModule": ("CartPole-v1", curious),
    "OneHotCategorical": ("CartPole-v1", chooser),
    "LSTMModule": ("CartPole-v1", recurrent(modules.LSTMModule)),
    "GRUModule": ("CartPole-v1", recurrent(modules.GRUModule)),
}


def alone(lib, name):
    return lib.TransformedEnv(lib.GymEnv(name), lib.InitTracker())


def in_rows(lib, name):
    return lib.TransformedEnv(lib.SerialEnv(2, lambda: lib.GymEnv(name)), lib.InitTracker())


def counted(lib, name):
    chain = lib.Compose(lib.InitTracker(), lib.StepCounter(5), lib.RewardSum())
    return lib.TransformedEnv(lib.SerialEnv(2, lambda: lib.GymEnv(name)), chain)


PLACES = {"alone": alone, "in rows": in_rows, "counted": counted}


@pytest.mark.parametrize("stop", [True, False], ids=["to an end", "on and on"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("actor", ACTORS)
def test_an_actor_of_torchrl_plays_the_same_rollout(actor, place, stop):
    name, make_actor = ACTORS[actor]

    def played(lib):
        torch.manual_seed(3)
        env = PLACES[place](lib, name)
        act = make_actor(env)
        env.set_seed(0)
        torch.manual_seed(5)
        try:
            return env.rollout(12, act, break_when_any_done=stop)
        finally:
            env.close()

    check_works_alike(played)
