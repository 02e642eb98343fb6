"""Populations: each policy acts on its rows as it would alone, in programs, step by step and in pools."""

from __future__ import annotations

import copy
from functools import cache, partial

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical

from envkit import AsyncEnvPool, Collector, GymEnv, ParallelEnv, SerialEnv, compile_policy, evaluate
from envkit.errors import (
    ArgumentError,
    BatchSizeError,
    MissingKeyError,
    PolicyError,
    TranslationError,
)
from envkit.specs import Unbounded
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit.transforms.episodes import InitTracker
from envkit.transforms.primer import TensorDictPrimer
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.compare import assert_close
from tests.bridges.jax.policy.networks import NETWORKS
from tests.bridges.jax.policy.policies import Remembering, drawing, steering
from tests.zoo.walkers import Walker

pytestmark = pytest.mark.rounding

POLICIES, ROWS, STEPS = 3, 4, 5


class Draws(nn.Module):
    """Draws one of two options, and writes how likely it was; takes a TensorDict."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, td):
        options = Categorical(logits=self.net(td["observation"]))
        td["action"] = options.sample()
        td["log_prob"] = options.log_prob(td["action"])
        return td


class Chooses(nn.Module):
    """Takes the more likely of two options; takes the observation."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, observation):
        return self.net(observation).argmax(-1)


def different(module, number=POLICIES):
    """Build modules of one architecture with parameters of their own."""
    torch.manual_seed(1)
    modules = [copy.deepcopy(module) for _ in range(number)]
    for parameter in (one for each in modules for one in each.parameters()):
        parameter.data = torch.randn_like(parameter) * parameter.std(correction=0)
    return modules


def cart_pole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


ENVS = {
    "program": lambda: JaxEnv(Walker(), batch_size=[POLICIES, ROWS], device="cpu"),
    "program, one axis": lambda: JaxEnv(Walker(), batch_size=[POLICIES * ROWS], device="cpu"),
    "pool": lambda: SerialEnv(POLICIES * ROWS, cart_pole),
    "pool of workers": lambda: ParallelEnv(POLICIES * ROWS, cart_pole, num_processes=1),
}
WALKING = {"reads one entry": steering, "draws": drawing}
BALANCING = {"takes observations": Chooses, "takes a TensorDict and draws": Draws}


def rolled_out(env, policy, **options):
    """Roll out from one seed, the policies along the first axis."""
    env.set_seed(0)
    torch.manual_seed(0)
    with torch.no_grad():
        data = env.rollout(STEPS, policy, break_when_any_done=False, **options)
    return data.reshape(POLICIES, ROWS, STEPS)


CASES = [
    pytest.param(make, module, id=f"{name}, {what}")
    for name, make in ENVS.items()
    for what, module in (BALANCING if "pool" in name else WALKING).items()
]


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize(("make", "module"), CASES)
def test_each_policy_acts_on_its_rows_as_it_does_alone(make, module, stepwise):
    modules = different(module())
    options = {"callback": lambda env, td: None} if stepwise else {}
    with make() as env:
        population = rolled_out(env, compile_policy(modules), **options)

        single = compile_policy(module())  # one program for all
        for number, each in enumerate(modules):
            single.module.load_state_dict(each.state_dict())
            alone = rolled_out(env, single, **options)
            assert_close(population[number], alone[number])


@cache
def walkers():
    return JaxEnv(Walker(), batch_size=[POLICIES, ROWS], device="cpu")


def test_the_module_that_is_compiled_acts_in_the_same_way_uncompiled():
    population = compile_policy(different(Draws()))
    with SerialEnv(POLICIES * ROWS, cart_pole) as env:
        assert_close(rolled_out(env, population.module), rolled_out(env, population))


def test_a_step_of_an_optimiser_is_seen_without_translating_again():
    population = compile_policy(different(steering()))
    rolled_out(walkers(), population)

    with torch.no_grad():
        for parameter in population.parameters():
            parameter.add_(0.1)
    data = rolled_out(walkers(), population)

    assert population.translations == 1
    second = rolled_out(walkers(), compile_policy(population.module.unstacked(1)))
    assert_close(data[1], second[1])


def test_an_unstacked_policy_is_what_was_stacked_and_has_memory_of_its_own():
    modules = different(Chooses())
    population = compile_policy(modules)

    alone = population.module.unstacked(-1)
    with torch.no_grad():
        alone.net[0].weight.zero_()

    again = population.module.unstacked(POLICIES - 1)
    for name, value in modules[-1].state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    with pytest.raises(IndexError):
        population.module.unstacked(POLICIES)


def test_state_that_torch_has_stacked_is_used_where_it_lies():
    modules = different(steering())
    params, buffers = torch.func.stack_module_state(modules)
    population = compile_policy(modules[0], (params, buffers))
    assert_close(rolled_out(walkers(), population), rolled_out(walkers(), compile_policy(modules)))

    with torch.no_grad():
        for value in params.values():
            value.zero_()

    assert not rolled_out(walkers(), population)["action"].any()


def test_gradients_of_the_sum_of_losses_are_those_of_each_policy():
    modules, observations = different(Chooses()), torch.randn(POLICIES * ROWS, 4)
    nets = [module.net for module in modules]
    population = compile_policy(nets)

    population(observations).square().sum().backward()
    for net, group in zip(nets, observations.split(ROWS), strict=True):
        net(group).square().sum().backward()

    for name, parameter in population.module.each.named_parameters():
        alone = [dict(net.named_parameters())[name].grad for net in nets]
        torch.testing.assert_close(parameter.grad, torch.stack(alone))


def test_tied_parameters_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, observation):
            return self.two(self.one(observation))

    modules, observations = different(Tied()), torch.randn(POLICIES * ROWS, 4)
    population = compile_policy(modules)

    groups = zip(modules, observations.split(ROWS), strict=True)
    torch.testing.assert_close(
        population(observations), torch.cat([module(group) for module, group in groups])
    )
    alone = population.module.unstacked(0)
    assert alone.two.weight is alone.one.weight


def test_a_policy_remembers_for_each_of_its_rows():
    keys = {"in_keys": ["place", "hidden", "is_init"], "out_keys": ["action", ("next", "hidden")]}
    modules = [TensorDictModule(core, **keys) for core in different(Remembering())]
    primer = TensorDictPrimer(hidden=Unbounded((3,)), expand_specs=True)
    env = TransformedEnv(TransformedEnv(walkers(), InitTracker()), primer)

    population = rolled_out(env, compile_policy(modules))

    alone = rolled_out(env, compile_policy(modules[2]))
    assert_close(population[2], alone[2])


@pytest.mark.parametrize("name", ["batch norm", "nature", "attention", "embedding"])
def test_networks_of_many_kinds_are_stacked(name):
    network = NETWORKS[name]
    torch.manual_seed(0)
    modules = [network.make().eval() for _ in range(POLICIES)]
    inputs = network.example(POLICIES * ROWS)

    with torch.no_grad():
        joined = compile_policy(modules).module(*inputs)
        groups = zip(*(values.split(ROWS) for values in inputs), strict=True)
        alone = [module(*group) for module, group in zip(modules, groups, strict=True)]

    torch.testing.assert_close(joined, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_a_layer_that_torch_cannot_stack_is_named():
    cells = TensorDictModule(nn.LSTMCell(2, 2), ["place"], ["action", "cell"])

    with pytest.raises(TranslationError, match="LSTMCell"):
        rolled_out(walkers(), compile_policy(different(cells)))


def test_a_population_saves_and_loads_as_any_module_does():
    population, other = (compile_policy(different(Chooses())) for _ in range(2))
    with torch.no_grad():
        for parameter in population.parameters():
            parameter.add_(1.0)

    other.load_state_dict(population.state_dict())

    observations = torch.randn(POLICIES * ROWS, 4)
    assert torch.equal(other(observations), population(observations))


def test_a_collector_and_an_evaluation_have_the_policies_along_the_first_axis():
    modules = different(steering())
    population, single = compile_policy(modules), compile_policy(steering())
    env = walkers()

    def collected(policy):
        collector = Collector(env, policy, frames_per_batch=POLICIES * ROWS * STEPS, seed=0)
        batch = collector.next()
        collector.shutdown()
        return batch.exclude("collector")

    batch = collected(population)
    result = evaluate(env, population, POLICIES * ROWS * 2, seed=1, max_steps=STEPS)

    assert batch.batch_size == (POLICIES, ROWS, STEPS)
    for number, module in enumerate(modules):
        single.module.load_state_dict(module.state_dict())
        assert_close(batch[number], collected(single)[number])
        alone = evaluate(env, single, POLICIES * ROWS * 2, seed=1, max_steps=STEPS)
        returns = (each.returns.reshape(POLICIES, ROWS * 2)[number] for each in (result, alone))
        torch.testing.assert_close(*returns)


def test_a_population_travels_to_other_processes():
    population = compile_policy(different(Draws()))
    other = cloudpickle.loads(cloudpickle.dumps(population))

    with SerialEnv(POLICIES * ROWS, cart_pole) as env:
        assert_close(rolled_out(env, other), rolled_out(env, population))


class Shaped(nn.Module):
    """A layer with an attribute that decides what it does."""

    def __init__(self, value):
        super().__init__()
        self.net, self.value = nn.Linear(4, 2), value

    def forward(self, observation):
        return self.net(observation)


ATTRIBUTES = {
    "functions": (torch.tanh, nn.functional.relu),
    "lambdas": (lambda value: value, lambda value: 2 * value),
    "tuples": ((1, 2), (1, 3)),
    "dicts": ({"a": [1]}, {"a": [2]}),
    "arrays": (np.zeros(2), np.ones(2)),
    "numbers of NumPy": (np.float32(1), np.float32(2)),
    "arguments of partial": (partial(torch.clamp, min=0), partial(torch.clamp, min=1)),
    "None": (None, 1.0),
}


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_modules_whose_attributes_differ_are_refused(kind):
    one, other = ATTRIBUTES[kind]
    assert compile_policy([Shaped(one), Shaped(copy.copy(one))]).module.num_policies == 2
    with pytest.raises(ArgumentError, match=r"'value'.*register a\s+number"):
        compile_policy([Shaped(one), Shaped(other)])


class Averaging(nn.Module):
    """Counts what it was called with in a buffer."""

    def __init__(self, assigns):
        super().__init__()
        self.net, self.assigns = nn.Linear(4, 2), assigns
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, observation):
        if self.assigns:
            self.seen = self.seen + 1
        else:
            self.seen += 1
        return self.net(observation)


def test_a_buffer_that_policies_assign_is_refused_since_it_would_be_lost():
    counted = compile_policy([Averaging(False), Averaging(False)])
    counted(torch.zeros(4, 4))
    assert counted.module.each.seen.tolist() == [1, 1]
    with pytest.raises(PolicyError, match=r"'seen'.*in\s+place"):
        compile_policy([Averaging(True), Averaging(True)]).module(torch.zeros(4, 4))


def test_an_entry_that_policies_read_and_nobody_wrote_is_named():
    modules = [TensorDictModule(nn.Linear(4, 2), ["seen"], ["action"]) for _ in range(2)]
    with pytest.raises(MissingKeyError, match=r"\['seen'\]"):
        compile_policy(modules).module(TensorDict({"observation": torch.zeros(4, 4)}, [4]))


def test_rows_that_do_not_fit_are_refused_in_every_way_of_acting():
    population = compile_policy(different(steering()))
    fix = r"multiple of 3.*batch_size=\[3, n\]"
    with pytest.raises(BatchSizeError, match=fix):
        JaxEnv(Walker(), batch_size=[4], device="cpu").rollout(2, population)
    with pytest.raises(BatchSizeError, match=fix):
        population(TensorDict({"place": torch.zeros(4, 2)}, [4]))
    with pytest.raises(BatchSizeError, match=fix):
        compile_policy(different(Chooses()))(torch.zeros(4, 4))
    # 9 rows would be padded to 16
    other = JaxEnv(Walker(), batch_size=[9], device="cpu").reset()
    with pytest.raises(BatchSizeError, match=r"Build the env with batch_size=\[9\]"):
        walkers().unroll(other, 2, population)


@pytest.mark.parametrize("module", [Draws, Chooses])
def test_the_rows_of_an_asynchronous_pool_that_are_ready_are_refused(module):
    pool = AsyncEnvPool([cart_pole] * 4)
    population = compile_policy(different(module(), 2))
    try:
        td = population.bound_to(pool)(pool.reset())
        pool.async_step_and_maybe_reset_send(td)
        _, ready = pool.async_step_and_maybe_reset_recv(min_get=2, max_get=2)
        for act, fix in ((population, "Bind it"), (population.bound_to(pool), "Step all of them")):
            with pytest.raises(PolicyError, match=rf"of an asynchronous pool.*{fix}"):
                act(ready)
    finally:
        pool.close()
