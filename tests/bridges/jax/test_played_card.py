"""What the host reads of a card, and which card everything is on, shown on one that `played_card` plays.

The tests marked ``gpu`` in `test_order` and `test_gpu` show the same on a real one.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch

from envkit import (
    ClipTransform,
    Compose,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.options import chunks_on
from envkit_bridges.jax.policy.jax_policy import JaxPolicy
from tests.bridges.jax.played_card import played_card
from tests.zoo.walkers import Walker

ROWS = 4


SECOND = torch.device("cuda:1")  # not the current one


@pytest.fixture(scope="module")
def card():
    with pytest.MonkeyPatch.context() as patch, played_card(patch, SECOND) as card, torch.no_grad():
        yield card


@pytest.fixture(params=["walker", "watched", "clipped"], scope="module")
def env(card, request):
    card.flags = True
    env = JaxEnv(Walker(), batch_size=[ROWS], device="cuda:1", episode_length=3)
    env.set_seed(0)
    if request.param == "watched":
        vecnorm = VecNorm(in_keys=["place"])
        chain = Compose(StepCounter(), RewardSum(), RewardScaling(0.0, 2.0), vecnorm)
        env = TransformedEnv(env, chain)
    if request.param == "clipped":  # outside of the programs, as all that has a way in
        env = TransformedEnv(
            env, Compose(StepCounter(), ClipTransform("place", None, "action", low=-1, high=1))
        )
    _ = env.specs, getattr(env, "_route", None)  # both read bounds, which are in order
    card.flags = False
    return env


def pushed(td):
    return td.set("action", torch.full((ROWS, 2), 0.05, device=td.device))


def drawn_by_jax(params, shown, key):
    return jnp.zeros((ROWS, 2)) + jnp.float32(key[0] % 2)


@pytest.mark.parametrize("call", ["step", "step_and_maybe_reset"])
def test_the_host_reads_nothing_in_a_step(env, card, call):
    _, td = env.step_and_maybe_reset(pushed(env.reset()))  # compiled, specs read
    getattr(env, call)(env.rand_action(td.copy()))
    card.reads.clear()

    getattr(env, call)(pushed(td.copy()))
    getattr(env, call)(env.rand_action(td))

    assert card.reads == []


RUNS = {
    "random actions, callback": {"callback": lambda env, td: None},
    "policy": {"policy": pushed},
    "policy in JAX, callback": {
        "policy": JaxPolicy(drawn_by_jax),
        "callback": lambda env, td: None,
    },
}


@pytest.mark.parametrize("run", RUNS)
def test_the_host_reads_no_more_in_a_longer_rollout(env, card, run):
    counts = []
    for steps in (2, 2, 9):
        card.reads.clear()
        env.rollout(steps, **RUNS[run], break_when_any_done=False)
        counts.append(len(card.reads))

    _, short, long = counts
    assert short == long


@pytest.mark.parametrize("stop", ["any", "all"])
def test_a_stop_rule_is_asked_once_in_so_many_steps(env, card, stop):
    if env._facts.steps_have_effects:
        env = env.base_env
    rules = {"break_when_any_done": stop == "any", "break_when_all_done": stop == "all"}
    counts, others = [], []
    for every in (6, 6, 3, 2):
        card.reads.clear()
        env.rollout(6, pushed, **rules, check_every=every)
        counts.append(card.reads.count("to cpu"))
        others.append(len(card.reads) - counts[-1])

    assert counts == [1, 1, 2, 3]
    assert len(set(others[1:])) == 1


@pytest.mark.parametrize("reset_rows", ["done", "all"])
def test_an_env_that_moves_begins_rows_anew_as_its_device_does_it_best(card, reset_rows):
    card.flags = True
    env = JaxEnv(Walker(), batch_size=[ROWS], reset_rows=reset_rows)
    here = env._engine.programs.env.chunks
    env.to("cpu")
    assert env._engine.programs.env.chunks == here == chunks_on(torch.device("cpu"), reset_rows)

    env.to("cuda:1")
    card.flags = False
    _, td = env.step_and_maybe_reset(pushed(env.reset()))

    assert env._engine.programs.env.chunks == chunks_on(SECOND, reset_rows) != here
    assert td.device == SECOND
    assert env.to("cpu")._engine.programs.env.chunks == here


def test_all_of_env_and_data_is_on_the_same_card(env, card):
    td = env.step_and_maybe_reset(pushed(env.reset()))[1]
    data = env.rollout(3, pushed, auto_reset=False, tensordict=td, break_when_any_done=False)

    found = {env.device, data.device, *(leaf.device for leaf in data.values(True, True))}
    found |= {spec.device for spec in env.specs.values(True, True)}
    assert found == {SECOND}


def test_a_read_of_the_card_is_noticed(card):
    """What the tests above rest on."""
    card.flags = False
    card.reads.clear()
    flags = torch.ones(3, 2, device=SECOND) > 0

    assert not flags.any()
    assert not (~flags[1:, 0]).all()
    flags.cpu()
    with pytest.raises(RuntimeError, match="same device"):
        flags & torch.ones(3, 2, dtype=torch.bool)

    assert card.reads == ["item", "item", "to cpu"]
