"""A step as a value: who begins it holds it, and the env keeps nothing in between."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch

from envkit import GymEnv, MixedEnv, ParallelEnv, SerialEnv, StepCounter, TransformedEnv
from envkit.errors import InputError, StaleDataError
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.jax_trail import jax_trail
from tests.zoo.trail import CHOICES

LENGTH = 3


def make_mixed():
    return MixedEnv([SerialEnv(2, Count), SerialEnv(1, Count)])


KINDS = {
    "local": partial(Count, LENGTH),
    "stateless": partial(StatelessCount, LENGTH, batch_size=[2]),
    "gym": partial(GymEnv, "CartPole-v1"),
    "serial": partial(SerialEnv, 2, partial(Count, LENGTH)),
    "rows": partial(SerialEnv, 2, partial(Count, LENGTH), use_buffers=True),
    "parallel": partial(ParallelEnv, 2, partial(Count, LENGTH), num_processes=1),
    "jax": jax_trail,
    "transformed": lambda: TransformedEnv(Count(LENGTH), StepCounter()),
    "fused": lambda: TransformedEnv(jax_trail(), StepCounter()),
    "mixed": make_mixed,
}


@pytest.fixture(params=KINDS)
def env(request):
    env = KINDS[request.param]()
    yield env
    env.close(raise_if_closed=False)


def warm(env):
    """Give an acted root of an env that has stepped before."""
    env.set_seed(0)
    return env.rand_action(env.step_and_maybe_reset(env.rand_action(env.reset()))[1])


def held_by(env):
    return {name: id(value) for name, value in vars(env).items()}


@pytest.mark.parametrize("advance", [False, True])
def test_an_env_holds_nothing_of_a_step_that_was_begun(env, advance):
    td = warm(env)
    before, td_ref = held_by(env), weakref.ref(td)

    step = env._send(td, advance=advance)

    assert held_by(env) == before
    del td, step
    gc.collect()
    assert td_ref() is None


def test_a_step_that_is_made_and_not_begun_moves_nothing(env):
    td = warm(env)
    before, td_before = held_by(env), td.clone()

    env._honoured_step(td, advance=True, is_ahead=True)

    assert held_by(env) == before
    assert (td == td_before).all()
    twin = env.step(td.clone())["next"]
    assert set(twin.keys(True, True)) >= {*env.observation_keys, *env.reward_keys, *env.done_keys}
    if "count" in twin.keys():
        assert (twin["count"] == td_before["count"] + 1).all()


@pytest.mark.parametrize("advance", [False, True])
def test_a_step_held_for_a_while_is_the_step_made_at_once(env, advance):
    td = warm(env)
    twin = td.clone()

    held = env._send(td, advance=advance).recv()
    env.set_seed(0)
    env.step_and_maybe_reset(env.rand_action(env.reset()))
    wanted = env.step_and_maybe_reset(twin) if advance else env.step(twin)

    pairs = zip(held, wanted, strict=True) if advance else [(held, wanted)]
    for given, expected in pairs:
        assert set(given.keys(True, True)) == set(expected.keys(True, True))
        for key, value in expected.items(True, True):
            assert torch.equal(given[key], value), key


def test_a_step_is_received_once(env):
    step = env._send(warm(env))
    step.recv()

    with pytest.raises(StaleDataError, match=r"received before.*begin another one"):
        step.recv()


def test_steps_of_several_envs_are_received_in_any_order():
    envs = [make() for name, make in KINDS.items() if name not in ("gym", "stateless")]
    try:
        roots = [warm(env) for env in envs]
        wanted = [root["count"] + 1 for root in roots if "count" in root.keys()]

        steps = [env._send(root) for env, root in zip(envs, roots, strict=True)]
        told = [step.recv()["next"] for step in reversed(steps)]

        counts = [following["count"] for following in reversed(told) if "count" in following.keys()]
        assert [count.tolist() for count in counts] == [count.tolist() for count in wanted]
    finally:
        for env in envs:
            env.close(raise_if_closed=False)


def test_two_steps_of_one_stateless_env_are_received_in_any_order():
    env = jax_trail()
    first = warm(env)
    second = env.rand_action(env.step_mdp(env.step(first.clone())))
    wanted = [env.step(td.clone())["next"] for td in (first, second)]

    steps = [env._send(first), env._send(second)]
    told = [step.recv()["next"] for step in reversed(steps)]

    for given, expected in zip(reversed(told), wanted, strict=True):
        assert (given == expected).all()


@pytest.mark.parametrize("meanwhile", ["step", "reset"])
def test_a_step_of_rows_that_others_have_written_since_is_refused(meanwhile):
    env = SerialEnv(2, partial(Count, LENGTH), use_buffers=True)
    td = warm(env)
    left = env._send(td)
    env._send(td.clone()).recv() if meanwhile == "step" else env.reset()

    with pytest.raises(StaleDataError, match="Receive each step before you begin"):
        left.recv()


# --------------------------------------------------------------------- several members, one refuses


class Interrupted(SerialEnv):
    """Is interrupted while it looks at what it is given, if it was told to."""

    armed = False

    def _make_step(self, td, **options):
        step = super()._make_step(td, **options)
        if self.armed:
            raise KeyboardInterrupt
        return step


def test_an_interrupt_before_all_members_have_checked_moves_none_of_them():
    make = partial(Count, 9)
    inner = Interrupted(1, make)
    env = MixedEnv([SerialEnv(1, make), inner, SerialEnv(1, make)])
    td = env.rand_action(env.reset())
    newest = [member.newest for member in env.members]
    inner.armed = True
    before = [held_by(env), *(held_by(member.env) for member in env.members)]

    with pytest.raises(KeyboardInterrupt):
        env.step(td)

    assert [held_by(env), *(held_by(member.env) for member in env.members)] == before
    assert all(member.newest is old for member, old in zip(env.members, newest, strict=True))
    inner.armed = False
    assert env.step(td)["next", "count"].flatten().tolist() == [1, 1, 1]


def test_a_step_that_one_member_refuses_moves_no_other():
    env = MixedEnv([SerialEnv(2, partial(Count, 9)), SerialEnv(1, partial(Count, 9))])
    td = env.rand_action(env.reset())
    wrong = td.clone()
    wrong["action"][0] = CHOICES + 7
    before = [held_by(env), *(held_by(member.env) for member in env.members)]

    with pytest.raises(InputError):
        env._send(wrong)

    assert [held_by(env), *(held_by(member.env) for member in env.members)] == before
    assert env.step(td)["next", "count"].flatten().tolist() == [1, 1, 1]
