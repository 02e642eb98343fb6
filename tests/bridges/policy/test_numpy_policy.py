"""Compiled policies step by step: in NumPy they do what their modules do, and the modules act where NumPy may not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from functools import partial

import cloudpickle
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from torch import nn
from torch.distributions import Categorical, OneHotCategorical

from envkit import AsyncEnvPool, GymEnv, JaxPolicy, SerialEnv, compile_policy
from envkit.errors import InputError
from envkit_bridges.policy import numpy_policy
from tests.bridges.jax.policy.networks import NETWORKS, Calls
from tests.bridges.jax.policy.policies import choosing, drawing
from tests.bridges.jax.policy.test_networks import Together
from tests.zoo.envs import Count

pytestmark = pytest.mark.rounding


@pytest.fixture(scope="module")
def env():
    """Names what a plain module reads and writes; the data of these tests is made here."""
    return Count()


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def data(batch=(4,), **entries):
    """Make a root of event shapes."""
    torch.manual_seed(1)
    values = {name: torch.randn(*batch, *shape) for name, shape in entries.items()}
    return TensorDict(values, batch)


def both(env, module, td, seed=0):
    """Act with the module and, from the same random numbers, with what is compiled; and say with what."""
    act = compile_policy(module).bound_to(env)
    torch.manual_seed(seed)
    wanted = module(td.copy())
    torch.manual_seed(seed)
    return wanted, act(td.copy()), act


def assert_same(got, wanted, tolerance=1e-6):
    assert set(got.keys(True, True)) == set(wanted.keys(True, True))
    assert got.batch_size == wanted.batch_size
    for key, value in wanted.items(True, True):
        assert got[key].dtype == value.dtype
        torch.testing.assert_close(got[key], value, rtol=tolerance, atol=tolerance)


def perceptron(inputs=3, outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def reading(module, *keys, out=("action",)):
    return TensorDictModule(module, in_keys=list(keys or ["place"]), out_keys=list(out))


# ------------------------------------------------------------------------------------ what it gives

COVERED = [
    "mlp",
    "batch norm",
    "rms norm",
    "dueling",
    "experts",
    "embedding",
    "rnn cell",
    "attention",
    "shapes",
    "scatters",
    "arithmetic",
    "reductions",
    "made of numbers",
    "comparisons",
]


@pytest.mark.more
def test_networks_give_in_numpy_what_torch_gives(env):
    networks = [NETWORKS[name].make().eval() for name in COVERED]
    given = [NETWORKS[name].example(5) for name in COVERED]
    together = Together(networks, [len(inputs) for inputs in given])
    inputs = [value for each in given for value in each]
    keys = [f"in_{n}" for n in range(len(inputs))]
    td = TensorDict(dict(zip(keys, inputs, strict=True)), [5])

    wanted, got, act = both(env, reading(together, *keys, out=COVERED), td)

    assert act.evaluated_with == "NumPy", act.why
    for name in COVERED:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-5, atol=1e-5)


class Best(nn.Module):
    def forward(self, observation):
        return nn.functional.one_hot(observation.argmax(-1), 3)


def greedy():
    modules, specs = pytest.importorskip("torchrl.modules"), pytest.importorskip("torchrl.data")
    explore = modules.EGreedyModule(specs.OneHot(3, dtype=torch.int64), eps_init=0.5)
    return TensorDictSequential(reading(Best(), "observation"), explore)


def tanh_normal():
    return drawing(pytest.importorskip("torchrl.modules").TanhNormal)


DRAWING = {
    "Normal": (drawing, {"place": (2,)}),
    "TanhNormal": (tanh_normal, {"place": (2,)}),
    "Categorical": (partial(choosing, Categorical), {"observation": (3,)}),
    "OneHotCategorical": (partial(choosing, OneHotCategorical), {"observation": (3,)}),
    "EGreedy": (greedy, {"observation": (3,)}),
}


@pytest.mark.parametrize("name", DRAWING)
def test_what_is_drawn_in_numpy_are_the_numbers_that_the_module_draws(env, name):
    make, entries = DRAWING[name]

    wanted, got, act = both(env, make(), data((64,), **entries))
    again = act(data((64,), **entries))

    assert act.evaluated_with == "NumPy", act.why
    assert_same(got, wanted, 1e-4)  # a density near the bound of a tanh magnifies the last bit
    torch.testing.assert_close(got["action"], wanted["action"], rtol=1e-6, atol=1e-6)
    assert not torch.equal(again["action"], got["action"])  # the generator has moved on


def test_the_exploration_type_is_obeyed_at_every_call(env):
    module = drawing()
    act, td = compile_policy(module).bound_to(env), data(place=(2,))

    drawn = act(td.copy())
    with set_interaction_type(InteractionType.MODE):
        best = act(td.copy())

    assert act.evaluated_with == "NumPy"
    assert not torch.equal(drawn["action"], drawn["loc"])
    assert torch.equal(best["action"], best["loc"])


@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3)])
def test_data_of_any_batch_size_gets_what_the_module_gives(env, batch):
    wanted, got, act = both(env, reading(perceptron()), data(batch, place=(3,)))

    assert act.evaluated_with == "NumPy", act.why
    assert_same(got, wanted)


class Chooses(nn.Module):
    """Acts with a number for each row, which in a single env is one with no axes."""

    def __init__(self):
        super().__init__()
        self.net = perceptron(4)

    def forward(self, observation):
        return self.net(observation).argmax(-1)


@pytest.mark.parametrize("written_in", ["torch", "JAX"])
def test_a_single_env_whose_action_is_one_number_is_acted_in(written_in):
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    env.set_seed(0)
    policy = compile_policy(Chooses())
    if written_in == "JAX":
        policy = JaxPolicy(lambda params, observation, key: (observation[:, 0] * 0 + 1).astype(int))

    data = env.rollout(4, policy)

    assert data["action"].shape == (4,) and env.action_spec.is_in(data["action"][0])


def test_a_parameter_that_is_written_out_is_not_lent(env):
    class Says(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, place):
            return place, self.scale.expand(place.shape[0], 2)

    module = Says()
    act = compile_policy(reading(module, out=("action", "scale"))).bound_to(env)

    first = act(data(place=(2,)))
    module.scale.mul_(3)

    assert (first["scale"] == 1).all()
    assert (act(data(place=(2,)))["scale"] == 3).all()


# ------------------------------------------------------------------------- what it is told of changes


def change_in_place(module):
    for parameter in module.parameters():
        parameter.add_(0.5)


def change_data(module):
    for parameter in module.parameters():
        parameter.data = parameter.data + 0.5


def replace_parameter(module):
    module[0].weight = nn.Parameter(torch.ones(8, 3))


def replace_layer(module):
    module[1] = nn.ReLU()


def train(module):
    module.append(nn.Dropout(1.0))


@pytest.mark.parametrize(
    "change", [change_in_place, change_data, replace_parameter, replace_layer, train]
)
def test_what_changes_in_a_module_is_seen_at_the_next_call(env, change):
    module = perceptron()
    act = compile_policy(reading(module)).bound_to(env)
    before = act(data(place=(3,)))

    change(module)

    after = act(data(place=(3,)))
    assert act.evaluated_with == "NumPy", act.why
    assert not torch.allclose(after["action"], before["action"])
    assert_same(after, reading(module)(data(place=(3,))))


# ---------------------------------------------------------------------------- where the module acts


def test_a_gradient_is_recorded_by_the_module(env):
    act = compile_policy(reading(perceptron())).bound_to(env)

    with torch.enable_grad():
        got = act(data(place=(3,)))

    assert got["action"].requires_grad
    assert act.evaluated_with == "torch" and "gradient" in act.why


def hooked():
    module = perceptron()
    module[1].register_forward_hook(lambda module, inputs, out: None)
    return module


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have us export instead
        return torch.jit.script(perceptron())


UNFIT = {
    "scripted": (scripted, "is scripted"),
    "convolution": (
        lambda: Calls(lambda x, net: net(x[:, None])[:, 0], nn.Conv1d(1, 1, 2)),
        "convol",
    ),
    "hooks": (hooked, "has hooks"),
    "values": (lambda: Calls(lambda x: x if x.sum() > 0 else -x), "values of tensors"),
    "bfloat16": (
        lambda: Calls(lambda x, net: net(x.bfloat16()), nn.Linear(3, 2).bfloat16()),
        "bfloat16",
    ),
    "memory": (nn.BatchNorm1d(3).train, "changes its buffer"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_numpy_does_not_cover_is_done_by_the_module_and_said(env, name):
    make, why = UNFIT[name]
    module = make()

    wanted, got, act = both(env, reading(module), data(place=(3,)))

    assert act.evaluated_with == "torch"
    assert why in act.why
    assert torch.allclose(got["action"], wanted["action"], atol=1e-2)


def test_a_lazy_module_acts_until_it_has_parameters(env):
    act = compile_policy(reading(nn.LazyLinear(2))).bound_to(env)

    first = act(data(place=(3,)))
    why, again = act.why, act(data(place=(3,)))

    assert "not initialised" in why
    assert act.evaluated_with == "NumPy", act.why
    assert_same(again, first)


def test_under_autocast_the_module_acts(env):
    act = compile_policy(reading(perceptron())).bound_to(env)
    act(data(place=(3,)))

    with torch.autocast("cpu", torch.bfloat16):
        got = act(data(place=(3,)))

    assert got["action"].dtype == torch.bfloat16
    assert act.why == "autocast is on"


def test_where_rows_mean_something_else_than_one_row_does_the_module_acts(env):
    module = reading(
        Calls(lambda x: x.softmax(0))
    )  # of the rows in a batch, of the entries without one

    wanted, got, act = both(env, module, data((), place=(3,)))

    assert act.evaluated_with == "torch" and "another 'action'" in act.why
    assert_same(got, wanted)


def test_the_module_acts_where_the_work_is_large(env, monkeypatch):
    monkeypatch.setattr(numpy_policy, "LARGE_PRODUCT", 72)
    # 24 elements in its largest parameter
    act = compile_policy(reading(perceptron())).bound_to(env)

    act(data((2,), place=(3,)))
    few = act.evaluated_with
    act(data((3,), place=(3,)))

    assert (few, act.evaluated_with) == ("NumPy", "torch")
    assert act.why == "3 rows times 24 elements of the largest parameter"


# ------------------------------------------------------------------------------- runs of many envs


def poles():
    env = SerialEnv(3, partial(GymEnv, "CartPole-v1", categorical_action_encoding=True))
    env.set_seed(0)
    return env


class Index(nn.Module):
    def forward(self, logits):
        return logits.argmax(-1)


def pole_policy():
    return nn.Sequential(*perceptron(4, 2), Index())


def chance():
    return ProbabilisticTensorDictSequential(
        TensorDictModule(perceptron(4, 2), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=Categorical,
            return_log_prob=True,
            default_interaction_type=InteractionType.RANDOM,
        ),
    )


def ran(policy, steps=70, **options):
    torch.manual_seed(0)
    env = poles()
    data = env.rollout(steps, policy, break_when_any_done=False, **options)
    env.close()
    return data


@pytest.mark.parametrize("make", [pole_policy, chance])
def test_a_run_on_rows_is_that_of_the_module(make):
    module = make()

    wanted, got = ran(module), ran(compile_policy(module))

    assert_same(got, wanted)
    assert got.names == wanted.names


@pytest.mark.parametrize("gradients", [False, True])
def test_a_run_on_rows_makes_no_tensordict_for_a_step(monkeypatch, gradients):
    called = []
    monkeypatch.setattr(numpy_policy.Stepwise, "__call__", lambda self, td: called.append(td))

    with torch.set_grad_enabled(gradients):  # with gradients torch acts, in NumPy's place
        ran(compile_policy(pole_policy()))

    assert not called


def test_a_run_under_gradients_is_that_of_the_module():
    module = TensorDictModule(perceptron(3, 1), ["observation"], ["action"])
    runs = []
    with torch.enable_grad():
        for policy in (module, compile_policy(module)):
            env = SerialEnv(2, partial(GymEnv, "Pendulum-v1"))
            env.set_seed(0)
            runs.append(env.rollout(5, policy))
            env.close()

    assert_same(*runs)
    assert all(data["action"].requires_grad for data in runs)


def test_entries_of_the_callers_are_carried_through_a_run_on_rows():
    module = pole_policy()
    task = TensorDict({"task": torch.arange(3)}, [3])

    wanted = ran(module, 5, tensordict=task)
    got = ran(compile_policy(module), 5, tensordict=task)

    assert_same(got, wanted)
    assert (got["task"] == torch.arange(3)[:, None]).all()


def test_a_policy_that_writes_under_next_runs_step_by_step():
    module = TensorDictModule(
        Calls(lambda x, net: (net(x), x * 0), pole_policy()),
        in_keys=["observation"],
        out_keys=["action", ("next", "memory")],
    )

    assert_same(ran(compile_policy(module), 5), ran(module, 5))


def test_an_action_that_the_env_does_not_take_is_refused_with_its_row():
    module = Calls(lambda x: (x[:, 0] * 0).long() + 5)

    with pytest.raises(InputError, match="of row 0 is 5, but must be an integer from 0 to 1"):
        ran(compile_policy(module), 3)


def test_a_copy_of_a_policy_that_was_used_translates_for_itself():
    policy, env = compile_policy(perceptron(3, 1)), GymEnv("Pendulum-v1")
    policy.bound_to(env)(env.reset())

    copied = cloudpickle.loads(cloudpickle.dumps(policy))
    copied.bound_to(env)(env.reset())

    assert (policy.translations, copied.translations) == (1, 2)


@pytest.mark.slow
def test_a_policy_that_travelled_acts_in_a_process_that_never_loads_jax():
    script = f"""
        import sys
        import cloudpickle, torch
        from envkit import GymEnv, SerialEnv

        policy = cloudpickle.loads({cloudpickle.dumps(compile_policy(perceptron(3, 1)))!r})
        env = SerialEnv(2, lambda: GymEnv("Pendulum-v1"))
        act = policy.bound_to(env)
        with torch.no_grad():
            td = act(env.reset())
            data = env.rollout(3, policy, break_when_any_done=False)
        assert torch.allclose(td["action"], policy.module(td["observation"]), atol=1e-6)
        print(act.evaluated_with, policy.translations, data.shape[1], "jax" in sys.modules)
    """

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100
    )

    assert done.stdout.split() == ["NumPy", "1", "3", "False"], done.stderr


# ------------------------------------------------------------------------- runs with plain functions


def test_a_run_with_a_plain_function_is_that_of_its_module():
    module = pole_policy()

    wanted = ran(TensorDictModule(module, in_keys=["observation"], out_keys=["action"]))

    assert_same(ran(module), wanted)
    assert_same(ran(lambda observation: module(observation).numpy()), wanted)


def test_what_a_plain_function_keeps_of_a_run_stays_as_it_was():
    kept = []

    def act(observation):
        kept.append(observation)
        return observation[:, 0].gt(0).long()

    data = ran(act)

    torch.testing.assert_close(torch.stack(kept, 1), data["observation"], rtol=0, atol=0)


# ------------------------------------------------------------- what may change between two calls

NUMBERS = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)


class Changing(nn.Module):
    """Reads a weight, a tensor, an array and an attribute of its class."""

    gain = 1.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.array = NUMBERS.copy()
        self.shift = torch.from_numpy(self.array.copy())

    def forward(self, observation):
        shown = self.linear(observation) * self.gain
        return shown + self.shift + torch.from_numpy(self.array)


def transposed(module):
    module.linear.weight.data = module.linear.weight.data.T


def written_through_numpy(module):
    np.multiply(module.shift.numpy(), 10, out=module.shift.numpy())


def written_in_place(module):
    module.array += 5


def of_the_class(module):
    type(module).gain = 3.0


@pytest.mark.parametrize(
    "change", [transposed, written_through_numpy, written_in_place, of_the_class]
)
def test_what_changes_between_two_calls_is_seen(change, env, monkeypatch):
    monkeypatch.setattr(Changing, "gain", 1.0)
    module = Changing()
    policy = TensorDictModule(module, in_keys=["observation"], out_keys=["action"])
    act = compile_policy(policy).bound_to(env)
    root = TensorDict({"observation": torch.randn(3, 4)}, batch_size=[3])

    before = act(root.clone())["action"]
    change(module)
    after = act(root.clone())["action"]
    expected = module(root["observation"])

    assert act.evaluated_with == "NumPy"
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, expected)


class Upright(nn.Module):
    """Pushes to where the pole leans."""

    def forward(self, observation):
        right = (observation[..., 2] > 0).long()
        return torch.stack([1 - right, right], -1)


def test_text_in_the_data_is_no_difference():
    with AsyncEnvPool([partial(GymEnv, "CartPole-v1")] * 2, backend="threading") as env:
        module = TensorDictModule(Upright(), ["observation"], ["action"])

        act = compile_policy(module).bound_to(env)
        root = env.reset()

        assert torch.equal(act(root.copy())["action"], module(root.copy())["action"])
        assert act.evaluated_with == "NumPy"
