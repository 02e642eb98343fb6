"""Batched and mixed envs go on to the same bits from their state dict and the data carried into the next step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit import (
    AsyncEnvPool,
    Compose,
    GymEnv,
    MixedEnv,
    NoopResetEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TrajCounter,
    TransformedEnv,
    VecNorm,
)
from envkit.errors import BusyEnvError, MissingKeyError, NotResetError, ResumeError
from tests.zoo.drift import gym_rows, make_gym
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.jax_drift import jax_rows
from tests.zoo.resumed import as_read_again, played, same, twice

cartpole = partial(GymEnv, "CartPole-v1", max_episode_steps=9)


def transformed() -> TransformedEnv:
    chain = Compose(StepCounter(7), RewardSum(), VecNorm(["observation"]), TrajCounter())
    return TransformedEnv(cartpole(), chain)


KINDS = {
    "rows": partial(SerialEnv, 3, cartpole),
    "TensorDicts": partial(SerialEnv, 3, cartpole, use_buffers=False),
    "own rows": partial(SerialEnv, 2, cartpole, share_individual_td=True),
    "rows behind transforms": partial(SerialEnv, 2, transformed),
    "rows of a transform that does not stack": partial(
        SerialEnv, 2, lambda: TransformedEnv(cartpole(), NoopResetEnv(3))
    ),
    "transforms around": lambda: TransformedEnv(
        SerialEnv(2, cartpole), Compose(NoopResetEnv(3), VecNorm(["observation"]))
    ),
    "rows that are batches": partial(SerialEnv, 2, partial(cartpole, num_envs=2)),
    "rows of stateless envs": partial(
        SerialEnv, 2, partial(StatelessCount, 5, batch_size=[2]), use_buffers=True
    ),
    "threads": partial(AsyncEnvPool, [cartpole, cartpole]),
    "unlike rows": lambda: MixedEnv([SerialEnv(1, cartpole), SerialEnv(2, cartpole)]),
}


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_goes_on_to_the_same_bits(kind, seed, opened):
    assert same(twice(KINDS[kind], opened, before=20, after=15, seed=seed))


@pytest.mark.parametrize(
    ("inner", "seed"),
    [
        (lambda: TransformedEnv(transformed(), NoopResetEnv(3)), None),
        pytest.param(transformed, 3, marks=pytest.mark.slow),
        pytest.param(cartpole, 3, marks=pytest.mark.slow),
    ],
    ids=["unseeded", "behind transforms", "bare"],
)
def test_worker_processes_go_on_to_the_same_bits(inner, seed, opened):
    make = partial(ParallelEnv, 3, inner, num_processes=2)

    assert same(twice(make, opened, before=20, after=15, seed=seed))


def test_a_mixed_env_goes_on_to_the_same_bits(opened):
    make = lambda: MixedEnv([jax_rows(limit=5), SerialEnv(2, partial(make_gym, 6))])  # noqa: E731

    assert same(twice(make, opened, before=13, after=12))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "stateless" not in kind])
def test_episodes_that_were_not_recorded_begin_again_with_one_warning(kind, opened):
    env, other = opened(KINDS[kind]()), opened(KINDS[kind]())
    _, root = played(env, env.reset(), 3)

    with pytest.warns(UserWarning, match=r"under way in GymEnv\('CartPole-v1'\)") as warned:
        other.load_state_dict(as_read_again(env.state_dict()))
    data, following = other.step_and_maybe_reset(other.rand_action(root.clone()))
    later, _ = other.step_and_maybe_reset(other.rand_action(following))

    assert [one.filename for one in warned] == [__file__]
    assert data["next", "truncated"].all() and not data["next", "terminated"].any()
    if kind != "transforms around":  # which normalise what is repeated
        assert data["next", "observation"].equal(root["observation"])
    assert not following["done"].any() and not later["next", "truncated"].any()


@pytest.mark.filterwarnings("ignore:the state dict does not hold")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "stateless" not in kind])
def test_an_episode_that_was_reported_truncated_is_not_stepped_before_a_reset(kind, opened):
    env, other = opened(KINDS[kind]()), opened(KINDS[kind]())
    _, root = played(env, env.reset(), 3)
    other.load_state_dict(env.state_dict())

    following = other.step_mdp(other.step(other.rand_action(root.clone())))

    with pytest.raises(NotResetError, match=r"reported (it|them) truncated.*maybe_reset\(\)"):
        other.step(other.rand_action(following.clone()))
    again = other.maybe_reset(following)
    assert not other.step(other.rand_action(again))["next", "truncated"].any()


@pytest.mark.filterwarnings("ignore:the state dict does not hold")
@pytest.mark.parametrize("make", [partial(SerialEnv, 2, cartpole), partial(cartpole, num_envs=2)])
def test_a_row_that_was_left_out_of_a_step_is_reported_truncated_by_the_next(make, opened):
    env, other = opened(make()), opened(make())
    _, root = played(env, env.reset(), 3)
    other.load_state_dict(env.state_dict())
    steps = lambda *rows: {"_step": torch.tensor(rows)}  # noqa: E731

    first = other.step(other.rand_action(root).update(steps(True, False)))["next"]
    root = other.step_mdp(root.set("next", first))
    second = other.step(other.rand_action(root.clone()).update(steps(False, True)))["next"]

    assert first["truncated"].flatten().tolist() == [True, False]
    assert second["truncated"].flatten().tolist() == [True, True]
    with pytest.raises(NotResetError, match="not restored"):
        other.step(other.rand_action(root).update(steps(True, False)))


@pytest.mark.filterwarnings("ignore:the state dict does not hold")
def test_a_rollout_from_there_makes_the_steps_that_single_steps_make(opened):
    make = lambda: TransformedEnv(SerialEnv(2, cartpole), StepCounter())  # noqa: E731
    env, one, two = (opened(make()) for _ in range(3))
    root = played(env, env.reset(), 3)[1]
    for other in (one, two):
        other.load_state_dict(env.state_dict())

    whole = one.rollout(
        9, auto_reset=False, tensordict=root.clone(), break_when_any_done=False
    ).unbind(-1)
    steps = []
    for data in whole:
        step, root = two.step_and_maybe_reset(root.set("action", data["action"]))
        steps.append(step)

    assert same((list(whole), steps))


def test_rows_whose_state_is_in_the_data_go_on_beside_those_that_begin_again(opened):
    make = lambda: TransformedEnv(  # noqa: E731
        MixedEnv([jax_rows(limit=9), SerialEnv(2, partial(make_gym, 9))]), StepCounter()
    )
    env, other = opened(make()), opened(make())
    _, root = played(env, env.reset(), 3)

    with pytest.warns(UserWarning, match="under way in GymWrapper"):
        other.load_state_dict(as_read_again(env.state_dict()))
    acted = env.rand_action(root)
    (wanted, expected), (data, following) = (
        each.step_and_maybe_reset(acted.clone()) for each in (env, other)
    )

    stateless = len(root) - 2
    assert same(([wanted[:stateless]], [data[:stateless]]))
    assert same(([expected[:stateless]], [following[:stateless]]))
    assert data["next", "truncated"][stateless:].all()
    assert following["step_count"][stateless:].flatten().tolist() == [0, 0]


@settings(max_examples=20)
@given(before=st.integers(0, 25), masked=st.booleans())
def test_it_does_not_matter_where_a_batch_is_cut(before, masked):
    first, second = (SerialEnv(3, cartpole) for _ in range(2))
    first.record_for_resume().set_seed(1)
    root = first.reset()
    for _ in range(before):
        mask = torch.tensor([True, masked, True])
        td = first.step(first.rand_action(root).set("_step", mask))
        root = first.maybe_reset(first.step_mdp(td))
    second.load_state_dict(as_read_again(first.state_dict()))

    one, two = (played(env, root.clone(), 12)[0] for env in (first, second))

    assert same((one, two))
    for env in (first, second):
        env.close()


@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("inner", [cartpole, lambda: TransformedEnv(cartpole(), NoopResetEnv(3))])
def test_batches_whose_data_travels_otherwise_go_on_from_it_too(inner, has_rows, opened):
    env, runs = opened(SerialEnv(2, inner, use_buffers=has_rows)).record_for_resume(), []
    env.set_seed(2)
    _, root = played(env, env.reset(), 13)
    state = as_read_again(env.state_dict())

    for use_buffers in (False, True):
        other = opened(SerialEnv(2, inner, use_buffers=use_buffers))
        other.load_state_dict(state)
        runs.append(played(other, root.copy(), 15)[0])

    assert same((runs[0], runs[1]))


def test_a_partial_reset_shows_what_was_known_before_the_cut(opened):
    first, second = (opened(SerialEnv(3, cartpole)) for _ in range(2))
    first.record_for_resume().set_seed(1)
    root = first.rollout(12, break_when_any_done=True)
    second.load_state_dict(as_read_again(first.state_dict()))
    ended = first.step_mdp(root[:, -1])

    shown = []
    for env in (first, second):
        masks = ended.clone()
        assert env.any_done(masks)
        shown.append(env.reset(masks.select("_reset")))

    assert same(([shown[0]], [shown[1]]))
    assert not shown[0]["done"].any()


def test_sub_envs_that_are_built_anew_write_down_too(opened):
    env = opened(SerialEnv(2, cartpole, on_worker_failure="restart", max_restarts=3))
    env.record_for_resume()
    root = env.reset()
    env._pool.backend.workers[0].host.envs[1]._env.unwrapped.step = None  # its next step raises
    data, root = env.step_and_maybe_reset(env.rand_action(root))
    _, root = played(env, root, 5)

    other = opened(SerialEnv(2, cartpole, on_worker_failure="restart", max_restarts=3))
    other.load_state_dict(as_read_again(env.state_dict()))

    assert data["next", "truncated"].flatten().tolist() == [False, True]
    numbers, runs = torch.get_rng_state(), []
    for each in (env, other):
        torch.set_rng_state(numbers)
        runs.append(played(each, root.clone(), 12)[0])
    assert same((runs[0], runs[1]))


# -------------------------------------------------------------------------------------------- refusals


def test_a_pool_that_works_on_something_is_not_saved(opened):
    env = opened(AsyncEnvPool([cartpole, cartpole])).record_for_resume()
    env.async_reset_send(env_index=[0, 1])

    for call in (env.state_dict, env.record_for_resume, lambda: env.load_state_dict({})):
        with pytest.raises(BusyEnvError, match="still processing"):
            call()
    env.async_reset_recv(2)
    assert env.state_dict()


def test_a_sub_env_that_cannot_be_saved_is_named(opened):
    env = opened(SerialEnv(2, cartpole))
    env.reset()
    env.record_for_resume()

    with pytest.raises(RuntimeError, match=r"row.* 0.*began before record_for_resume"):
        env.state_dict()


def test_another_number_of_rows_and_other_entries_are_refused(opened):
    env = opened(SerialEnv(2, cartpole)).record_for_resume()
    env.reset()
    state = env.state_dict()

    with pytest.raises(MissingKeyError, match="need"):
        opened(SerialEnv(3, cartpole)).load_state_dict(state)
    bare = {"worker0": {}, "worker1": {}, "_state": state["_state"]}
    for use_buffers, reason in (
        (False, r"lacks \['count'\]"),
        (True, "other entries than this env"),
    ):
        other = opened(SerialEnv(2, partial(Count, 5), use_buffers=use_buffers))
        with pytest.raises(ResumeError, match=reason):
            other.load_state_dict(bare)
    with pytest.raises(ResumeError, match="what this SerialEnv has shown"):
        opened(SerialEnv(2, cartpole)).load_state_dict(state["worker0"])
    with pytest.raises(MissingKeyError, match="members"):
        opened(MixedEnv([SerialEnv(2, cartpole)])).load_state_dict({"member0": state})


@pytest.mark.slow
def test_a_mixed_env_with_worker_processes_goes_on_to_the_same_bits(opened):
    make = lambda: MixedEnv([jax_rows(limit=5), gym_rows(limit=6)])  # noqa: E731

    assert same(twice(make, opened, before=13, after=12))
