"""Stop rules that are asked after several steps: the data is that of a rollout which asks after each."""

from __future__ import annotations

import pytest
import torch

from envkit import (
    Compose,
    GymEnv,
    RenameTransform,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from envkit.errors import ArgumentError, ArgumentTypeError, OptionError
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.policy.jax_policy import JaxPolicy
from tests.bridges.jax.test_order import HostReads, sees_cuda
from tests.zoo.walkers import Walker

ROWS = 4


@pytest.fixture(scope="module")
def walker():
    return JaxEnv(Walker(), batch_size=[ROWS], episode_length=9)


@pytest.fixture(scope="module")
def single():
    return JaxEnv(Walker(), batch_size=[], episode_length=5)


@pytest.fixture(scope="module")
def watched(walker):
    """The env behind transforms, the last of which runs outside of its programs."""
    renamed = RenameTransform(["place"], ["seen"], ["action"], ["push"])
    return TransformedEnv(walker, Compose(StepCounter(), RewardSum(), renamed))


class Pushing:
    """Pushes rows apart, so that they end one after the other; counts its calls."""

    def __init__(self, env):
        (self.key,) = env.action_keys
        self.batch, self.calls = env.batch_size, 0

    def __call__(self, td):
        self.calls += 1
        rows = torch.linspace(0.02, 0.3, max(self.batch.numel(), 1)).reshape(*self.batch, 1)
        return td.set(self.key, rows.expand(*self.batch, 2).to(td.device).clone())


def rolled(env, steps, stop, **how):
    env.set_seed(0)
    policy = Pushing(env)
    rules = {"break_when_any_done": stop == "any", "break_when_all_done": stop == "all"}
    return env.rollout(steps, policy, **rules, **how), policy.calls


def is_same(first, second):
    return set(first.keys(True, True)) == set(second.keys(True, True)) and (first == second).all()


@pytest.mark.filterwarnings("error:.* is stepped after its episode has ended")
@pytest.mark.parametrize("every", [2, 3, 50])
@pytest.mark.parametrize("stop", ["any", "all"])
@pytest.mark.parametrize("kind", ["walker", "single", "watched"])
def test_the_data_is_that_of_a_rollout_that_asks_after_each_step(kind, stop, every, request):
    env = request.getfixturevalue(kind)
    expected, asked = rolled(env, 40, stop)
    data, called = rolled(env, 40, stop, check_every=every)

    steps = expected.batch_size[-1]
    assert 1 < steps < 40 and data.batch_size == expected.batch_size
    assert is_same(data, expected)
    assert asked == steps and called == min(40, -(-steps // every) * every)


@pytest.mark.gpu
@pytest.mark.skipif(not sees_cuda(), reason="needs a CUDA device seen by torch and JAX")
@pytest.mark.parametrize("stop", ["any", "all"])
def test_so_it_is_on_a_card(stop):
    env = JaxEnv(Walker(), batch_size=[ROWS], episode_length=9, device="cuda")

    assert is_same(rolled(env, 40, stop)[0], rolled(env, 40, stop, check_every=4)[0])


@pytest.mark.parametrize("stop", ["any", "all"])
def test_rows_end_at_different_steps(walker, stop):
    """What the test above rests on."""
    data, _ = rolled(walker, 40, stop)
    ends = data["next", "done"][..., 0].int().argmax(-1)

    assert data["next", "done"][:, -1].any()
    assert stop == "any" or len(ends.unique()) > 1


@pytest.mark.parametrize("stop", ["any", "all"])
def test_nothing_else_is_read(walker, stop):
    """How often the rule itself is asked is counted on a card that is played, see `test_played_card`."""
    counts = []
    for steps in (2, 2, 6):
        with HostReads() as reads:
            rolled(walker, steps, stop, check_every=50)
        counts.append(len(reads.reads))

    assert counts[1] == counts[2]


def test_no_more_steps_than_were_asked_for(walker):
    data, calls = rolled(walker, 2, "any", check_every=50)

    assert data.shape == (ROWS, 2) and calls == 2


def test_a_rule_that_stops_nothing_is_not_asked(walker):
    data, calls = rolled(walker, 11, "never", check_every=4)

    assert data.shape == (ROWS, 11) and calls == 11


@pytest.mark.slow  # compiles eight programs
@pytest.mark.parametrize("every", [3, 100])
@pytest.mark.parametrize("stop", ["any", "all"])
@pytest.mark.parametrize(
    "policy", [None, JaxPolicy(lambda params, shown, key: 0.1 + shown["place"])]
)
def test_programs_that_ask_seldom_keep_nothing_of_what_is_too_much(walker, policy, stop, every):
    rules = {"break_when_any_done": stop == "any", "break_when_all_done": stop == "all"}
    results = []
    for how in ({}, {"check_every": every}):
        walker.set_seed(2)
        results.append(walker.rollout(40, policy, **rules, **how))

    assert results[0].shape[1] < 40 and is_same(*results)


@pytest.mark.parametrize(
    "make",
    [
        lambda walker: GymEnv("CartPole-v1"),
        lambda walker: TransformedEnv(walker, VecNorm(in_keys=["place"])),
        lambda walker: TransformedEnv(walker, lambda td: td),
    ],
    ids=["GymEnv", "VecNorm", "CallableTransform"],
)
def test_what_changes_with_each_step_cannot_drop_any(make, walker, request):
    env = make(walker)
    name = request.node.callspec.id

    with pytest.raises(OptionError, match=rf"check_every=4 .* {name} changes with each step"):
        env.rollout(5, check_every=4)


def test_a_subclass_that_steps_in_its_own_way_cannot_drop_steps():
    class Counting(JaxEnv):
        def _step(self, td):
            return super()._step(td)

    with pytest.raises(OptionError, match="Counting changes with each step"):
        Counting(Walker(), batch_size=[ROWS]).rollout(5, check_every=4)


def test_a_callback_is_called_for_no_step_that_is_dropped(walker):
    with pytest.raises(OptionError, match="callback, which would be called for steps"):
        walker.rollout(5, callback=lambda env, td: None, check_every=4)


def test_no_more_actions_are_taken_than_are_done(walker):
    actions = [torch.full((ROWS, 2), 0.9, device=walker.device)] * 30
    results = []
    for how in ({}, {"check_every": 7}):
        walker.set_seed(0)
        results.append(walker.rollout(30, actions=actions, **how))

    assert results[0].shape[1] < 30 and is_same(*results)
    with pytest.raises(OptionError, match="actions of type list_iterator, of which more"):
        walker.rollout(30, actions=iter(actions), check_every=7)


@pytest.mark.parametrize("every", [0, -1])
def test_at_least_one_step_is_made_between_two_checks(walker, every):
    with pytest.raises(ArgumentError, match="check_every"):
        walker.rollout(5, check_every=every)


@pytest.mark.parametrize("every", [2.5, True, "4"])
def test_steps_between_checks_are_a_number(walker, every):
    with pytest.raises(ArgumentTypeError, match="check_every"):
        walker.rollout(5, check_every=every)
