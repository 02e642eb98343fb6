"""Modules and distributions that others wrote, in whole runs: what they compute, and how they draw.

Conventions
    ROWS * STEPS   numbers drawn in one run; margins are 5 standard errors or more.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from envkit.errors import TranslationError
from envkit.specs import Bounded
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit.transforms.episodes import InitTracker
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.policy.translated import in_jax
from envkit_bridges.policy.compiled import compile_policy
from tests.bridges.compare import assert_close
from tests.bridges.jax.policy.networks import Calls
from tests.bridges.jax.policy.test_compiled import plain, run
from tests.zoo.walkers import Chooser, Walker

pytestmark = pytest.mark.rounding

modules = pytest.importorskip("torchrl.modules")
ROWS, STEPS = 256, 12
DRAWN = ROWS * STEPS


@pytest.fixture(scope="module")
def crowd():
    """Many walkers, so that a run draws many numbers."""
    return JaxEnv(Walker(), batch_size=[ROWS], device="cpu", episode_length=6)


def unrolled(env, policy, seed=0, steps=STEPS):
    env.set_seed(seed)
    return env.unroll(env.reset(), steps, compile_policy(policy))[0]


def seeded(env):
    env.set_seed(0)
    return env


def drawing_from(distribution, parameters, head, **options):
    """Make a policy that draws from a distribution whose parameters are computed from the place."""
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(head, in_keys=["place"], out_keys=parameters),
        ProbabilisticTensorDictModule(
            in_keys=parameters,
            out_keys=["action"],
            distribution_class=distribution,
            default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
            **options,
        ),
    )


def assert_standard_normal(noise):
    """Mean 0 and covariance 1, of ``noise`` of shape (draws, width)."""
    draws, width = noise.shape
    assert draws == DRAWN
    assert noise.mean(0).abs().max() < 5 / draws**0.5
    torch.testing.assert_close(noise.T.cov(), torch.eye(width), atol=10 / draws**0.5, rtol=0)


# ------------------------------------------------------------------------------------- distributions


class Covariance(nn.Module):
    """Two means, and a covariance, its triangular factor, or its inverse."""

    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = nn.Linear(2, 5), kind

    def forward(self, place):
        loc, scale, below = self.net(place).split([2, 2, 1], -1)
        factor = torch.diag_embed(scale.exp()) + torch.nn.functional.pad(
            below[..., None], (0, 1, 1, 0)
        )
        return loc, factor if self.kind == "scale_tril" else factor @ factor.mT


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["scale_tril", "covariance_matrix", "precision_matrix"],
)
def test_a_multivariate_normal_draws_with_its_covariance(crowd, kind):
    normal = torch.distributions.MultivariateNormal

    data = unrolled(crowd, drawing_from(normal, ["loc", kind], Covariance(kind)))

    wanted = normal(data["loc"], **{kind: data[kind]})
    offset = (data["action"] - data["loc"])[..., None]
    noise = torch.linalg.solve_triangular(wanted.scale_tril, offset, upper=False)
    assert_standard_normal(noise.reshape(-1, 2))
    log_prob = wanted.log_prob(data["action"])
    torch.testing.assert_close(data["action_log_prob"], log_prob, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_truncated_normal_draws_within_its_bounds_and_as_it_says(crowd):
    head = nn.Sequential(nn.Linear(2, 4), NormalParamExtractor())
    bounds = {"low": -0.7, "high": 0.9}
    policy = drawing_from(
        modules.TruncatedNormal, ["loc", "scale"], head, distribution_kwargs=bounds
    )

    data = unrolled(crowd, policy).contiguous()

    action = data["action"]
    assert (action >= -0.7).all() and (action <= 0.9).all()
    wanted = modules.TruncatedNormal(data["loc"], data["scale"], **bounds)
    share = wanted.base_dist.cdf(action).flatten()  # uniform, whatever the parameters
    shares = torch.histc(share, 4, 0, 1) / share.numel()
    assert (shares - 0.25).abs().max() < 5 * (0.1875 / share.numel()) ** 0.5
    log_prob = wanted.log_prob(action)
    torch.testing.assert_close(data["action_log_prob"], log_prob, rtol=1e-2, atol=1e-2)


def test_a_truncated_normal_says_that_what_is_out_of_bounds_is_impossible():
    def log_prob(x):
        return modules.TruncatedNormal(0 * x, 1 + 0 * x, low=-1.0, high=1.0).log_prob(x)[:, None]

    x = torch.tensor([[0.5, 0.5], [1.5, 0.5], [0.2, -1.1]])

    for rows in (x, x[:1]):
        got = run(compile_policy(Calls(log_prob)), plain((2,)), rows)["action",]
        np.testing.assert_allclose(got, log_prob(rows), rtol=1e-4)


@pytest.mark.parametrize(
    "bounds",
    [pytest.param({}, marks=pytest.mark.slow), {"low": -2.0, "high": 0.5}],
    ids=["default", "bounds"],
)
def test_a_tanh_delta_is_followed_with_its_default(walker, bounds):
    head = nn.Linear(2, 2)
    with (
        torch.no_grad()
    ):  # near 1 it is rounding that says whether an action is within 1e-6 of the parameter
        for parameter in head.parameters():
            parameter.mul_(0.1)
    policy = drawing_from(modules.TanhDelta, ["param"], head, distribution_kwargs=bounds)

    compiled = unrolled(walker, policy)
    with torch.no_grad():
        stepped = seeded(walker).rollout(STEPS, policy, break_when_any_done=False)

    assert_close(compiled, stepped.exclude("state", ("next", "state")), atol=1e-4)


def test_what_keeps_a_tanh_delta_from_being_traced_is_there_again_afterwards():
    policy = drawing_from(modules.TanhDelta, ["param"], nn.Linear(2, 2))
    continuous = __import__("sys").modules["torchrl.modules.distributions.continuous"]
    before = continuous._err_compile_safetanh

    run(compile_policy(policy.module[0].module), plain((2,)), torch.ones(3, 2))

    assert continuous._err_compile_safetanh is before


# --------------------------------------------------------------------------------------- exploration


@pytest.fixture(params=[False, True], ids=["one-hot", "categorical"], scope="module")
def choosers(request):
    return JaxEnv(Chooser(), batch_size=[ROWS], categorical_action_encoding=request.param)


class Greedy(nn.Module):
    """Always choose option 1, in the encoding of the env."""

    def __init__(self, categorical):
        super().__init__()
        self.categorical = categorical

    def forward(self, observation):
        index = torch.ones_like(observation[..., 0], dtype=torch.int64)
        return index if self.categorical else torch.nn.functional.one_hot(index, 3)


def test_e_greedy_explores_as_often_as_it_says_and_each_option_alike(choosers):
    greedy = TensorDictModule(
        Greedy(choosers.categorical_action_encoding), in_keys=["observation"], out_keys=["action"]
    )
    explore = modules.EGreedyModule(choosers.action_spec_unbatched, eps_init=0.6, eps_end=0.0)

    data = unrolled(choosers, TensorDictSequential(greedy, explore))

    action = data["action"]
    chosen = action if choosers.categorical_action_encoding else action.argmax(-1)
    shares = torch.bincount(chosen.flatten(), minlength=3) / DRAWN
    margin = 5 * 0.5 / DRAWN**0.5
    torch.testing.assert_close(shares, torch.tensor([0.2, 0.6, 0.2]), atol=margin, rtol=0)


def test_e_greedy_that_has_annealed_compiles_nothing_and_is_greedy(choosers):
    greedy = TensorDictModule(
        Greedy(choosers.categorical_action_encoding), in_keys=["observation"], out_keys=["action"]
    )
    explore = modules.EGreedyModule(
        choosers.action_spec_unbatched, eps_end=0.0, annealing_num_steps=2
    )
    policy = compile_policy(TensorDictSequential(greedy, explore))
    unrolled(choosers, policy)

    explore.step(2)
    action = unrolled(choosers, policy)["action"]

    chosen = action if choosers.categorical_action_encoding else action.argmax(-1)
    assert (chosen == 1).all()
    assert policy.translations == 1


@pytest.mark.slow
def test_e_greedy_explores_a_box_evenly(crowd):
    towards = TensorDictModule(Calls(lambda x: 0 * x), in_keys=["place"], out_keys=["action"])
    spec = Bounded(torch.tensor([-1.0, 0.5]), torch.tensor([1.0, 0.75]))

    data = unrolled(crowd, TensorDictSequential(towards, modules.EGreedyModule(spec)))

    share = (data["action"].reshape(-1, 2) - spec.low) / (spec.high - spec.low)
    assert (share >= 0).all() and (share <= 1).all()
    assert (share.mean(0) - 0.5).abs().max() < 5 * (1 / 12 / DRAWN) ** 0.5
    assert (share.var(0) - 1 / 12).abs().max() < 0.01


@pytest.mark.slow
def test_additive_noise_is_gaussian_and_kept_within_the_spec(crowd):
    torch.manual_seed(0)
    loc = TensorDictModule(nn.Linear(2, 2), in_keys=["place"], out_keys=["loc"])
    copy = TensorDictModule(Calls(lambda x: x.clone()), in_keys=["loc"], out_keys=["action"])
    noisy = modules.AdditiveGaussianModule(
        crowd.action_spec_unbatched, sigma_init=0.5, sigma_end=0.5
    )

    data = unrolled(crowd, TensorDictSequential(loc, copy, noisy))

    action, loc = data["action"].reshape(-1, 2), data["loc"].reshape(-1, 2)
    low, high = ((bound - loc) / 0.5 for bound in (-1.0, 1.0))
    normal = torch.distributions.Normal(0.0, 1.0)
    for at_end, expected in (
        (action == -1, normal.cdf(low)),
        (action == 1, 1 - normal.cdf(high)),
        (action < loc, torch.where(loc > -1, 0.5, 0.0)),
    ):
        assert abs(at_end.float().mean() - expected.mean()) < 5 * 0.5 / (2 * DRAWN) ** 0.5
    assert (action.abs() <= 1).all()


# ----------------------------------------------------------------------------------------- recurrence


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.more
def test_a_recurrent_module_gives_what_it_gives_step_by_step(walker, kind):
    torch.manual_seed(0)
    states = ["h"] if kind == "gru" else ["h", "c"]
    core = {"gru": modules.GRUModule, "lstm": modules.LSTMModule}[kind](
        input_size=2,
        hidden_size=3,
        in_keys=["place", *states],
        out_keys=["features", *(("next", state) for state in states)],
    )
    head = TensorDictModule(nn.Linear(3, 2), in_keys=["features"], out_keys=["action"])
    policy = TensorDictSequential(core, head)
    env = TransformedEnv(walker, InitTracker())
    fresh = seeded(env).reset()
    _, later = env.unroll(fresh.clone(), 3)
    td = torch.cat([later[:2], fresh[2:]])  # rows whose episodes end at other times
    for state in states:
        td[state] = torch.ones(4, 1, 3)

    compiled, _ = env.unroll(td.clone(), STEPS, compile_policy(policy))
    with torch.no_grad():
        stepped = env.rollout(
            STEPS, policy, tensordict=td, auto_reset=False, break_when_any_done=False
        )

    begun = compiled["is_init"][:, 1:]
    assert (begun.any(0) & ~begun.all(0)).any()
    assert_close(compiled, stepped.exclude("state", ("next", "state")), atol=1e-4)


def test_a_line_that_is_not_known_is_refused():
    class Guarded(nn.Module):
        def forward(self, x):
            if (x > 9).any():
                x = torch.where(x > 9, 9.0, x)
            return x

    with pytest.raises(TranslationError, match=r"values of tensors.*`if \(x > 9\)\.any\(\):"):
        compile_policy(Guarded()).translation(plain((2,)), 3, in_jax)
