"""What a translation holds for, which values it is called with, and what is said when there is none."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import subprocess
import sys
import textwrap
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch import nn
from torch.distributions import Distribution

from envkit.batched.serial import SerialEnv
from envkit.errors import TranslationError
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.policy.translated import in_jax
from envkit_bridges.policy.compiled import compile_policy
from envkit_bridges.policy.exporting import Signature
from tests.bridges.jax.policy.networks import Calls
from tests.bridges.jax.policy.policies import drawing
from tests.zoo.walkers import Pendulum

ACTION = (("action",),)


def plain(*shapes, dtype=torch.float32):
    """Say that a module takes leaves of these event shapes and returns the action."""
    reads = tuple(((f"in_{n}",), torch.Size(shape), dtype) for n, shape in enumerate(shapes))
    return Signature(reads, ACTION)


PLACE = Signature(((("place",), torch.Size([2]), torch.float32),), None)


def run(policy, signature, *inputs, key=0):
    """Run a policy, compiled, and give what it writes by path."""
    found = policy.translation(signature, inputs[0].shape[0], in_jax)
    paths = [path for path, _, _ in signature.reads]
    entries = dict(zip(paths, (x.numpy() for x in inputs), strict=True))
    values = jax.jit(found)(found.tensors(policy, torch.device("cpu")), entries, rng(key))
    return {path: np.asarray(value) for path, value in values.items()}


def rng(seed):
    return jax.random.PRNGKey(seed)


# ------------------------------------------------------------------------- what it holds for


def test_the_interaction_type_chooses_the_translation():
    policy = compile_policy(drawing())
    place = torch.randn(8, 2)

    drawn = run(policy, PLACE, place)
    with set_interaction_type(InteractionType.MODE):
        mode = run(policy, PLACE, place)
    again = run(policy, PLACE, place)

    assert (mode["action",] == mode["loc",]).all()
    assert not (drawn["action",] == drawn["loc",]).any()
    assert all((again[path] == drawn[path]).all() for path in drawn)
    assert policy.translations == 2


@pytest.mark.rounding
def test_dropout_draws_while_the_module_trains():
    module = nn.Sequential(nn.Linear(2, 400), nn.Dropout(0.5))
    policy = compile_policy(module.eval())
    ones = torch.ones(3, 2)

    whole = run(policy, plain((2,)), ones)["action",]
    policy.train()
    dropped = run(policy, plain((2,)), ones)["action",]
    other = run(policy, plain((2,)), ones, key=1)["action",]
    policy.eval()
    again = run(policy, plain((2,)), ones)["action",]

    kept = dropped != 0
    assert 0.4 < kept.mean() < 0.6 and not (kept == (other != 0)).all()
    assert not (kept[0] == kept[1]).all()
    np.testing.assert_allclose(dropped[kept], 2 * whole[kept], rtol=1e-6)
    assert (again == whole).all() and (whole != 0).all()
    assert policy.translations == 2


def test_other_shapes_and_dtypes_make_another_translation():
    policy = compile_policy(Calls(lambda x: x * 2))

    run(policy, plain((3,)), torch.ones(2, 3))
    run(policy, plain((4,)), torch.ones(2, 4))
    run(policy, plain((4,), dtype=torch.int32), torch.ones(2, 4, dtype=torch.int32))
    run(policy, plain((4,)), torch.ones(5, 4))

    assert policy.translations == 3


def test_parameters_that_were_replaced_are_found_by_name():
    policy = compile_policy(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)))
    run(policy, plain((2,)), torch.ones(3, 2))

    policy.module[1].weight = nn.Parameter(torch.zeros(2, 4))
    policy.module[1].bias = nn.Parameter(torch.tensor([0.25, -0.5]))
    out = run(policy, plain((2,)), torch.ones(3, 2))

    assert out["action",].tolist() == [[0.25, -0.5]] * 3
    assert policy.translations == 1


@pytest.mark.rounding
def test_a_layer_of_another_size_makes_a_new_translation():
    policy = compile_policy(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)))
    run(policy, plain((2,)), torch.ones(3, 2))

    policy.module[0], policy.module[1] = nn.Linear(2, 6), nn.Linear(6, 2)
    out = run(policy, plain((2,)), torch.ones(3, 2))

    np.testing.assert_allclose(out["action",], policy(torch.ones(3, 2)).detach(), rtol=1e-5)
    assert policy.translations == 2


class Scaled(nn.Module):
    """Scales by what it holds in many ways; returns the action."""

    def __init__(self):
        super().__init__()
        self.std = 1.0
        self.limits = {"low": [-9.0]}
        self.offset = torch.zeros(2)
        self.config = SimpleNamespace(gain=1.0)
        self.shift = np.zeros(2, np.float32)
        self.after = _adding(0.0)
        self.register_buffer("unit", torch.ones(2))

    def forward(self, x):
        x = (x * self.std * self.unit).clamp_min(self.limits["low"][0])
        return self.after(x * self.config.gain + self.offset + torch.as_tensor(self.shift))


def _adding(number):
    return lambda x: x + number


CHANGES = {
    "a number": lambda module: setattr(module, "std", 3.0),
    "within a container": lambda module: module.limits["low"].__setitem__(0, 1.5),
    "a tensor that is no buffer, in place": lambda module: module.offset.add_(2.0),
    "a tensor that is no buffer": lambda module: setattr(module, "offset", torch.ones(2)),
    "an object's attribute": lambda module: setattr(module.config, "gain", 0.5),
    "an array, in place": lambda module: module.shift.__iadd__(1.0),
    "what a function closes over": lambda module: setattr(module, "after", _adding(4.0)),
}


RARER = ("a tensor that is no buffer", "an object's attribute", "an array, in place")


@pytest.mark.parametrize(
    "change",
    [pytest.param(name, marks=pytest.mark.slow if name in RARER else ()) for name in CHANGES],
)
def test_an_attribute_that_changes_makes_a_new_translation(change):
    policy = compile_policy(Scaled())
    before = run(policy, plain((2,)), torch.ones(3, 2))["action",]
    run(policy, plain((2,)), torch.ones(3, 2))
    assert policy.translations == 1

    CHANGES[change](policy.module)
    after = run(policy, plain((2,)), torch.ones(3, 2))["action",]

    assert (after != before).all()
    np.testing.assert_allclose(after, policy.module(torch.ones(3, 2)), rtol=1e-6)
    assert policy.translations == 2


def test_another_submodule_in_the_same_place_makes_a_new_translation():
    policy = compile_policy(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Dropout(0.0)))
    run(policy, plain((2,)), torch.ones(3, 2))

    policy.module[1] = nn.ReLU()
    run(policy, plain((2,)), torch.ones(3, 2))
    policy.module[2].p = 1.0
    out = run(policy, plain((2,)), torch.ones(3, 2))["action",]

    assert (out == 0).all()
    assert policy.translations == 3


def test_acting_in_torch_makes_no_new_translation():
    policy = compile_policy(drawing())
    run(policy, PLACE, torch.randn(8, 2))

    policy.module(_td(torch.randn(8, 2)))["action"].sum().backward()
    for parameter in policy.parameters():
        parameter.data.add_(0.1)
    run(policy, PLACE, torch.randn(8, 2))

    assert policy.translations == 1


def test_a_translation_keeps_no_submodule_alive_that_was_replaced():
    policy = compile_policy(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    run(policy, plain((2,)), torch.ones(3, 2))
    replaced = weakref.ref(policy.module[1])

    policy.module[1] = nn.ReLU()
    run(policy, plain((2,)), torch.ones(3, 2))
    gc.collect()

    assert replaced() is None


@pytest.mark.rounding
def test_tied_weights_stay_tied():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    policy = compile_policy(module)
    run(policy, plain((3,)), torch.ones(2, 3))

    with torch.no_grad():
        module[0].weight.mul_(3.0)
    out = run(policy, plain((3,)), torch.ones(2, 3))

    np.testing.assert_allclose(out["action",], module(torch.ones(2, 3)).detach(), rtol=1e-5)


@pytest.mark.rounding
def test_an_optimiser_step_cannot_race_with_a_program_that_runs():
    size = 600
    module = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(6)))
    policy = compile_policy(module)
    inputs = torch.randn(size, size)
    translation = policy.translation(plain((size,)), size, in_jax)
    program = jax.jit(translation)
    optimiser = torch.optim.SGD(module.parameters(), lr=1.0)

    for _ in range(4):
        with torch.no_grad():
            wanted = module(inputs)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 9.0)
        tensors = translation.tensors(policy, torch.device("cpu"))
        running = program(tensors, {("in_0",): inputs.numpy()}, rng(0))  # returns before it is done
        optimiser.step()

        got = np.asarray(running["action",])
        scale = float(wanted.abs().max())
        np.testing.assert_allclose(got, wanted, atol=1e-4 * scale, rtol=1e-3)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn_like(parameter) / size**0.5)


# --------------------------------------------------------------------------------- distributions

LOC, SCALE = ("loc",), ("scale",)


def tanh_normal(loc, scale):
    normal = torch.distributions.Normal(loc, scale)
    squashed = [torch.distributions.TanhTransform()]
    return torch.distributions.TransformedDistribution(normal, squashed)


def independent(loc, scale):
    return torch.distributions.Independent(torch.distributions.Normal(loc, scale), 1)


@pytest.mark.rounding
@pytest.mark.parametrize("distribution", [torch.distributions.Normal, tanh_normal, independent])
def test_drawn_actions_have_the_distribution_that_torch_draws_from(distribution):
    policy = compile_policy(drawing(distribution))
    place = torch.tensor([[0.3, -1.0]]).expand(4000, 2).contiguous()

    out = run(policy, PLACE, place)

    loc, scale, action = (torch.tensor(out[path]) for path in (LOC, SCALE, ("action",)))
    noise = (action.atanh() if distribution is tanh_normal else action) - loc
    noise = noise / scale
    assert abs(float(noise.mean())) < 0.06
    assert float(noise.std()) == pytest.approx(1.0, abs=0.05)
    assert len(action.unique(dim=0)) == 4000
    wanted = distribution(loc, scale).log_prob(action)
    np.testing.assert_allclose(out["action_log_prob",], wanted, rtol=1e-3, atol=1e-3)


def test_another_key_draws_something_else_and_the_same_key_the_same():
    policy = compile_policy(drawing())
    place = torch.randn(5, 2)

    one, same, other = (run(policy, PLACE, place, key=key)["action",] for key in (0, 0, 1))

    assert (one == same).all()
    assert not (one == other).any()


@pytest.mark.rounding
def test_torchrls_tanh_normal_is_translated():
    torchrl = pytest.importorskip("torchrl.modules")
    policy = compile_policy(drawing(torchrl.TanhNormal, distribution_kwargs={"low": -2, "high": 2}))
    place = torch.randn(500, 2)

    drawn = run(policy, PLACE, place)
    with set_interaction_type(InteractionType.DETERMINISTIC):
        centre = run(policy, PLACE, place)
        wanted = policy.module.get_dist(policy.module(_td(place))).deterministic_sample

    np.testing.assert_allclose(centre["action",], wanted.detach(), rtol=1e-5, atol=1e-5)
    assert (abs(drawn["action",]) <= 2).all() and drawn["action",].std() > 0.3
    log_prob = torchrl.TanhNormal(
        torch.tensor(drawn[LOC]), torch.tensor(drawn[SCALE]), low=-2, high=2
    ).log_prob(torch.tensor(drawn["action",]))
    np.testing.assert_allclose(drawn["action_log_prob",], log_prob, rtol=1e-2, atol=1e-2)


def _td(place):
    from tensordict import TensorDict

    return TensorDict({"place": place}, place.shape[:1])


@pytest.mark.slow
def test_argument_checks_of_distributions_are_off_only_while_a_module_is_exported():
    code = """
        import torch
        from tests.bridges.jax.policy.policies import drawing
        from envkit_bridges.policy.compiled import compile_policy
        from envkit_bridges.jax.policy.translated import in_jax
        from envkit_bridges.policy.exporting import Signature
        from torch.distributions import Categorical, Distribution, Normal

        assert Distribution._validate_args, "something else has switched the checks off"
        place = Signature(((("place",), torch.Size([2]), torch.float32),), None)
        found = compile_policy(drawing()).translation(place, 4, in_jax)
        assert found.writes.keys() == {("loc",), ("scale",), ("action",), ("action_log_prob",)}
        try:
            Normal(0.0, -1.0)
        except ValueError:
            print("checked")
        Distribution.set_default_validate_args(False)
        compile_policy(drawing()).translation(place, 4, in_jax)
        print(Distribution._validate_args)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100
    )

    assert (done.stdout, done.returncode) == ("checked\nFalse\n", 0), done.stderr


def test_argument_checks_are_restored_when_export_fails():
    before = Distribution._validate_args

    with pytest.raises(TranslationError):
        compile_policy(Calls(lambda x: x if x.sum() > 0 else -x)).translation(
            plain((2,)), 3, in_jax
        )

    assert Distribution._validate_args == before


# ------------------------------------------------------------------------------------------ errors


def refused(module, *shapes, dtype=torch.float32, match):
    with pytest.raises(TranslationError, match=match) as caught:
        compile_policy(module).translation(plain(*(shapes or [(2,)]), dtype=dtype), 3, in_jax)
    return str(caught.value)


class Uncovered(nn.Module):
    def forward(self, x):
        return x + torch.linalg.ldl_factor(x)[0]


def test_an_operator_that_is_not_covered_is_named_with_its_line_and_the_way_out():
    message = refused(
        nn.Sequential(nn.Identity(), Uncovered()), (2, 2), match="has no translation to JAX"
    )

    assert "aten.linalg_ldl_factor_ex" in message
    assert "in submodule '1'" in message
    assert "test_compiled.py:" in message and "`return x + torch.linalg.ldl_factor(x)" in message
    assert "env.rollout(steps, module)" in message
    assert "the guide to compiled policies" in message


def test_a_use_of_an_operator_that_is_not_covered_names_its_line_when_it_is_run():
    module = nn.MaxPool2d(2, ceil_mode=True)
    policy = compile_policy(module)

    with pytest.raises(TranslationError, match=r"ceil_mode=True is not covered.*env\.rollout"):
        run(policy, plain((1, 5, 5)), torch.ones(2, 1, 5, 5))


class Breaks(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such limb")


class Bounds(torch.distributions.Normal):
    def __init__(self, loc, scale):
        if any((scale <= 0).flatten().tolist()):
            raise ValueError("no scale")
        super().__init__(loc, scale)


class Factors(nn.Module):
    def forward(self, x):
        return torch.linalg.ldl_factor(x[:, :, None] * x[:, None])[0]


REFUSED = {
    "values": (
        Calls(lambda x: x if x.sum() > 0 else -x),
        r"depend on the values of tensors.*test_compiled\.py:\d+: `.*x\.sum\(\) > 0.*torch\.where",
    ),
    "numpy": (
        Calls(lambda x: torch.from_numpy(np.tanh(x.numpy()))),
        r"values of tensors.*test_compiled\.py:\d+: `.*np\.tanh",
    ),
    "values, in a distribution": (
        Calls(lambda x: Bounds(x, x).sample()),
        r"values of tensors.*in the distribution Bounds at .*: `if any",
    ),
    "an error of its own": (
        nn.Sequential(nn.Identity(), Breaks()),
        r"raised RuntimeError: no such limb, in submodule '1' \(Breaks\).*`raise RuntimeError.*'in_0' of shape \(rows, 2\)",
    ),
    "another width": (
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        r"torch refuses.*in submodule '0' \(Linear\): RuntimeError: .*\[3, 2\] X \[3, 4\].*'in_0' of shape \(rows, 2\)",
    ),
    "an operator that raises": (
        Factors(),
        r"linalg_ldl_factor_ex.*test_compiled\.py:\d+: `return torch\.linalg\.ldl",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_cannot_follow_is_named_with_its_line(case):
    module, match = REFUSED[case]

    refused(module, match=match)


def test_what_a_module_raised_is_the_cause_of_the_refusal():
    with pytest.raises(TranslationError) as caught:
        compile_policy(Breaks()).translation(plain((2,)), 3, in_jax)

    assert type(caught.value.__cause__) is RuntimeError
    assert str(caught.value.__cause__) == "no such limb"


@pytest.mark.slow
def test_torch_prints_and_logs_nothing_when_export_fails_and_its_loggers_are_on_again():
    code = """
        import logging
        from torch import nn
        from tests.bridges.jax.policy.networks import Calls
        from tests.bridges.jax.policy.test_compiled import compile_policy, in_jax, plain
        from envkit.errors import TranslationError

        for module in (nn.Linear(3, 2), Calls(lambda x: x if x.sum() > 0 else -x)):
            try:
                compile_policy(module).translation(plain((2,)), 4, in_jax)
            except TranslationError:
                print("refused")
        print(logging.getLogger("torch._subclasses.fake_tensor").disabled)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},  # XLA says what this CPU lacks
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert (done.stdout, done.stderr) == ("refused\nrefused\nFalse\n", "")


def test_a_module_that_changes_its_buffers_is_refused_until_it_evaluates():
    norm = nn.BatchNorm1d(2)

    refused(norm, match=r"changes its buffer 'running_mean'.*module\.eval\(\)")

    compile_policy(norm.eval()).translation(plain((2,)), 3, in_jax)


class Learning(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        self.weight.data.add_(1)
        return x * self.weight


def test_a_module_that_changes_its_parameters_is_refused():
    refused(Learning(), match=r"changes its parameter 'weight'.*Let an optimiser do that")


def test_what_a_module_reads_as_data_of_a_tensor_is_followed():
    module = Calls(lambda x, net: x * net.weight.data[0], nn.Linear(2, 2))

    out = run(compile_policy(module), plain((2,)), torch.ones(3, 2))

    np.testing.assert_allclose(out["action",], module(torch.ones(3, 2)).detach(), rtol=1e-6)


@pytest.mark.rounding
def test_a_matrix_that_torch_would_refuse_gives_nan_in_its_row():
    module = Calls(lambda x: torch.linalg.solve(x, torch.ones(2)))
    x = torch.stack([torch.eye(2), torch.ones(2, 2), 2 * torch.eye(2)])

    out = run(compile_policy(module), plain((2, 2)), x)["action",]

    np.testing.assert_array_equal(out, [[1, 1], [np.nan, np.nan], [0.5, 0.5]])


def test_a_module_that_writes_into_its_input_is_refused():
    refused(Calls(lambda x: x.mul_(2.0)), match="its input 'in_0' in place")


def test_a_module_of_complex_doubles_is_refused():
    refused(nn.Linear(2, 2, dtype=torch.complex128), dtype=torch.complex128, match="complex128")


def test_an_output_without_rows_is_refused():
    refused(Calls(lambda x: x.sum()), match=r"writes 'action' as \(\).*for each row")


def test_too_many_outputs_are_refused():
    refused(Calls(lambda x: (x, x)), match=r"returned 2 values.*\['action'\]")


def test_a_module_that_returns_no_tensordict_is_refused():
    class Wrong(nn.Module):
        def forward(self, tensordict):
            return tensordict["place"]

    with pytest.raises(TranslationError, match=r"must return one\. .*policy\(observation\)"):
        compile_policy(Wrong()).translation(PLACE, 3, in_jax)


def test_entries_that_a_module_only_reshapes_to_and_fro_are_not_written():
    class Reshaping(nn.Module):
        def forward(self, tensordict):
            flat = tensordict.unsqueeze(-1)
            flat["turned"] = flat["place"].flip(-1)
            return tensordict.update(
                flat.squeeze(-1).clone(recurse=False).select("place", "turned")
            )

    out = run(compile_policy(Reshaping()), PLACE, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    assert {path: value.tolist() for path, value in out.items()} == {
        ("turned",): [[2.0, 1.0], [4.0, 3.0]]
    }


def test_a_transposed_input_is_written():
    class Turning(nn.Module):
        def forward(self, tensordict):
            return tensordict.set("place", tensordict["place"].mT)

    square = Signature(((("place",), torch.Size([2, 2]), torch.float32),), None)
    out = run(compile_policy(Turning()), square, torch.arange(12.0).reshape(3, 2, 2))

    assert out["place",][0].tolist() == [[0.0, 2.0], [1.0, 3.0]]


def test_other_names_of_a_tensordict_module_are_kept():
    module = TensorDictModule(nn.Linear(2, 2), in_keys=["place"], out_keys=[("deep", "action")])

    out = run(compile_policy(module), PLACE, torch.ones(3, 2))

    assert set(out) == {("deep", "action")}


# ------------------------------------------------------- forwards that change something in Python


class Schedule:
    """Says how often it was asked."""

    def __init__(self):
        self.asked = 0

    def ask(self):
        self.asked += 1
        return float(self.asked)


TOTALS = {"calls": 0}


class Impure(nn.Module):
    """Adds a number that Python makes, and no graph repeats."""

    shared = 0

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.calls, self.seen, self.last = 0, [], None
        self.generator, self.schedule = np.random.default_rng(0), Schedule()
        self.recent, self.turns = deque(maxlen=3), itertools.cycle([0.5, 1.5])
        self.steps, self.sums = iter(range(99)), torch.zeros(1)

    def forward(self, observation):
        return torch.tanh(observation[..., :1] + self._number(observation))

    def _number(self, observation):
        match self.kind:
            case "calls":
                self.calls += 1
                return self.calls
            case "seen":
                self.seen.append(1)
                return len(self.seen)
            case "last":
                self.last = observation
                return 0.0
            case "generator":
                return float(self.generator.uniform())
            case "schedule":
                return self.schedule.ask()
            case "recent":
                self.recent.append(1)
                return len(self.recent)
            case "turns":
                return next(self.turns)
            case "steps":
                return next(self.steps)
            case "sums":
                return self.sums.add_(1).clone()
            case "added":
                before = getattr(self, "added", 0)
                self.added = observation.mean()
                return before
            case "shared":
                type(self).shared += 1
                return self.shared
            case "TOTALS":
                TOTALS["calls"] += 1
                return TOTALS["calls"]
            case "`random`":
                return random.random()
            case _:
                return float(np.random.uniform())


IMPURE = (
    *("calls", "seen", "last", "generator", "schedule", "`random`", "`numpy.random`"),
    *("recent", "turns", "steps", "sums", "added", "shared", "TOTALS"),
)


@pytest.mark.parametrize("kind", IMPURE)
def test_a_forward_that_changes_something_in_python_is_refused_by_programs(kind):
    env = JaxEnv(Pendulum(), batch_size=[3])
    module = Impure(kind)

    with torch.no_grad(), pytest.raises(TranslationError, match=f"changes .*{kind}.*would repeat"):
        env.rollout(3, compile_policy(module))

    assert (module.calls, module.seen, module.last, module.schedule.asked) == (0, [], None, 0)
    assert module.generator.uniform() == np.random.default_rng(0).uniform()
    assert (len(module.recent), next(module.turns), next(module.steps)) == (0, 0.5, 0)
    assert (module.sums.item(), module.shared, TOTALS["calls"]) == (0.0, 0, 0)
    assert not hasattr(module, "added")


@pytest.mark.parametrize("kind", IMPURE)
def test_a_forward_that_changes_something_in_python_acts_as_the_module_step_by_step(kind, opened):
    def actions(wrap):
        random.seed(0)
        np.random.seed(0)
        Impure.shared, TOTALS["calls"] = 0, 0
        env = opened(SerialEnv(2, lambda: JaxEnv(Pendulum())))
        env.set_seed(0)
        with torch.no_grad():
            return env.rollout(4, wrap(Impure(kind)), break_when_any_done=False)["action"]

    try:
        assert torch.equal(actions(compile_policy), actions(lambda module: module))
    finally:
        Impure.shared, TOTALS["calls"] = 0, 0


def test_a_forward_that_only_reads_globals_iterators_and_logs_is_compiled():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.log, self.left = logging.getLogger("a policy"), iter([1.0])

        def forward(self, observation):
            self.log.debug("acting")
            return torch.tanh(observation[..., :1] + TOTALS["calls"])

    env = JaxEnv(Pendulum(), batch_size=[3])

    with torch.no_grad():
        data = env.rollout(3, compile_policy(Reads()))

    torch.testing.assert_close(data["action"], torch.tanh(data["observation"][..., :1]))


def test_several_threads_compile_one_after_the_other():
    policies = [compile_policy(nn.Linear(2, 2)) for _ in range(4)]

    with ThreadPoolExecutor() as threads:
        outputs = list(
            threads.map(lambda policy: run(policy, plain((2,)), torch.ones(3, 2)), policies)
        )

    for policy, out in zip(policies, outputs, strict=True):
        acted = policy.module(torch.ones(3, 2)).detach().numpy()
        np.testing.assert_allclose(out["action",], acted, rtol=1e-5)
