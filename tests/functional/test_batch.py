"""Rows beside rows: independent draws, exact restarts, whole rollouts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit.errors import ArgumentError
from envkit.functional import (
    BatchedEnv,
    FrameSkip,
    TimeLimit,
    Timestep,
    done_of,
    random_policy,
    row_keys,
    transition,
    unroll,
)
from envkit.functional.batch import ON_CARD, ON_HOST, Episodic, reset_rows
from tests.zoo.jax_envs import Countdown, NoisyWalk, Pendulum, Zoo

pytestmark = pytest.mark.rounding

KEY = jax.random.PRNGKey(7)
WALK = BatchedEnv(TimeLimit(NoisyWalk(), 4))
jit_restart = jax.jit(WALK.restart_where)
jit_reset = jax.jit(WALK.reset)


def same_bits(left, right):
    left, right = (
        [np.asarray(raw(leaf)) for leaf in jax.tree.leaves(tree)] for tree in (left, right)
    )
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(left, right, strict=True)
    )


def raw(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def rows_of(tree, rows):
    """Select rows on the host, where a mask of another length compiles nothing."""
    return jax.tree.map(lambda leaf: np.asarray(raw(leaf))[np.asarray(rows)], tree)


@cache
def jitted_init(env):
    return jax.jit(env.init, static_argnums=1)


def begin(env, num_rows):
    return jitted_init(env)(KEY, num_rows)


@cache
def walked(num_rows):
    """Rows that have made one step, each in another place."""
    action = jax.random.uniform(KEY, (num_rows, 2), minval=-1)
    return jax.jit(WALK.step)(begin(WALK, num_rows)[0], action)


# ---------------------------------------------------------------------------------------- keys


def test_the_first_episode_of_a_row_does_not_depend_on_the_batch_size():
    few, many = begin(WALK, 3), begin(WALK, 50)

    assert same_bits(few, rows_of(many, range(3)))


def test_random_actions_of_a_row_do_not_depend_on_the_batch_size():
    few, many = (jax.jit(WALK.sample_action, static_argnums=1)(KEY, size) for size in (3, 50))

    assert same_bits(few, rows_of(many, range(3)))


def test_nor_on_how_jax_is_set_to_count():
    draw = jax.jit(WALK.sample_action, static_argnums=1)
    with jax.threefry_partitionable(False):
        few, many = draw(KEY, 3), draw(KEY, 50)

    assert same_bits(few, rows_of(many, range(3)))
    assert same_bits(few, draw(KEY, 3))


def test_typed_and_raw_keys_start_the_same_episodes():
    assert same_bits(jitted_init(WALK)(jax.random.key(7), 4), begin(WALK, 4))
    for key in (KEY, jax.random.key(7)):
        assert row_keys(key, 4).dtype == jnp.uint32


def test_rows_start_in_different_places_and_restart_in_new_ones():
    state, timestep = begin(WALK, 20)
    again, _ = jit_restart(jnp.ones(20, bool), state, timestep)
    places = np.concatenate([state.inner.inner["place"], again.inner.inner["place"]])

    assert len(np.unique(places, axis=0)) == 40


# ------------------------------------------------------------------------------------- restarts


@settings(max_examples=40)
@given(size=st.sampled_from([1, 40]), data=st.data())
def test_restart_where_restarts_exactly_the_masked_rows(size, data):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    before = walked(size)
    fresh = jit_reset(before[0].key)

    after = jit_restart(mask, *before)

    assert same_bits(rows_of(after, ~mask), rows_of(before, ~mask))
    assert same_bits(rows_of(after, mask), rows_of(fresh, mask))


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 999, 1000])
def test_restart_where_handles_full_and_ragged_chunks(count):
    size = 1000
    assert [ON_HOST.size(rows) for rows in (3, 100, size)] == [3, 16, 32]
    mask = np.random.default_rng(count).permutation(size) < count
    before = walked(size)

    state, timestep = jit_restart(mask, *before)

    np.testing.assert_array_equal(np.asarray(state.inner.elapsed == 0), mask)
    assert same_bits(rows_of((state, timestep), ~mask), rows_of(before, ~mask))


def test_a_restart_of_no_rows_at_all_is_allowed():
    before = begin(WALK, 0)

    assert same_bits(WALK.restart_where(jnp.zeros(0, bool), *before), before)


@pytest.mark.slow
def test_restart_where_carries_every_kind_of_leaf():
    env = BatchedEnv(Zoo())
    before = begin(env, 20)
    mask = np.arange(20) % 3 == 0

    after = jax.jit(env.restart_where)(mask, *before)

    assert same_bits(rows_of(after, ~mask), rows_of(before, ~mask))
    assert same_bits(rows_of(after, mask), rows_of(jax.jit(env.reset)(before[0].key), mask))


@pytest.mark.more
def test_a_written_restart_is_a_restart_written():
    env = BatchedEnv(Zoo())
    before = begin(env, 20)
    mask = np.arange(20) % 3 == 0

    def written(state, timestep):
        return env.restart_written(mask, state.origin, env.pack(state), timestep, env.pack)

    state, timestep = jax.jit(env.restart_where)(mask, *before)
    after = jax.jit(written)(*before)

    assert same_bits(after, (env.pack(state), timestep))


def test_no_restart_of_another_row_changes_the_next_episode_of_a_row():
    before = walked(40)
    alone = jit_restart(np.arange(40) == 3, *before)
    crowd = jit_restart(np.arange(40) % 2 == 1, *before)

    assert same_bits(rows_of(alone, [3]), rows_of(crowd, [3]))


@pytest.mark.slow
def test_gradients_pass_kept_rows_and_stop_at_restarted_ones():
    env = BatchedEnv(Pendulum())
    state, _ = begin(env, 40)
    mask = jnp.arange(40) < 10

    def total(action):
        after = env.restart_where(mask, *env.step(state, action))
        return env.step(after[0], action)[0].inner[:, 1].sum()

    plain = jax.grad(lambda a: env.step(env.step(state, a)[0], a)[0].inner[:, 1].sum())
    action = jnp.full((40, 1), 0.1)
    grad = jax.jit(jax.grad(total))(action)

    np.testing.assert_allclose(grad[10:], plain(action)[10:], rtol=1e-5)
    np.testing.assert_allclose(grad[:10], 0.15, rtol=1e-5)  # the last step's torque only


def beginnings(env, seed=0, rows=40, episodes=6):
    """Restart all rows some times and give the places where episodes began, (episodes, rows, 2)."""
    state, timestep = env.init(jax.random.PRNGKey(seed), rows)
    places = [timestep.observation["place"]]
    restart = jax.jit(env.restart_where)
    for _ in range(episodes - 1):
        state, timestep = env.step(state, jnp.ones((rows, 2)))
        state, timestep = restart(jnp.ones(rows, bool), state, timestep)
        places.append(timestep.observation["place"])
    return np.asarray(jnp.stack(places))


def test_fresh_episodes_all_begin_elsewhere():
    places = beginnings(WALK)

    assert len(np.unique(places.reshape(-1, 2), axis=0)) == 6 * 40
    before, after = places[:-1].reshape(-1), places[1:].reshape(-1)
    assert abs(np.corrcoef(before, after)[0, 1]) < 4 / np.sqrt(len(before))


def test_episodes_from_a_pool_begin_at_few_places_that_seeds_share():
    pool = BatchedEnv(NoisyWalk(), reset_mode="pool", pool_size=5)

    places, others = beginnings(pool), beginnings(pool, seed=1)

    keys = jax.vmap(lambda number: jax.random.fold_in(jax.random.PRNGKey(0), number))(jnp.arange(5))
    pooled = jax.vmap(NoisyWalk().reset)(keys)[1].observation["place"]
    found = np.unique(places.reshape(-1, 2), axis=0)
    assert (found == np.unique(pooled, axis=0)).all()
    assert (np.unique(others.reshape(-1, 2), axis=0) == found).all()
    counts = [(places == place).all(-1).sum() for place in found]
    assert min(counts) > 240 / 5 / 2  # each is drawn, about as often
    assert len(np.unique(places, axis=0)) > 1 and not (places[0] == others[0]).all()


def test_cached_episodes_begin_where_the_first_one_of_the_row_did():
    places = beginnings(BatchedEnv(NoisyWalk(), reset_mode="cached"))

    assert (places == places[0]).all()
    assert len(np.unique(places[0], axis=0)) == 40


def test_an_empty_pool_is_refused():
    with pytest.raises(ArgumentError, match="pool_size"):
        BatchedEnv(NoisyWalk(), reset_mode="pool", pool_size=0)


def test_a_pool_of_one_begins_everywhere_alike_and_the_usual_one_has_64():
    places = beginnings(BatchedEnv(NoisyWalk(), reset_mode="pool", pool_size=1), rows=4, episodes=2)

    assert (places == places[0, 0]).all()
    assert BatchedEnv(NoisyWalk()).env.pool_size == Episodic(NoisyWalk()).pool_size == 64


def test_an_unknown_reset_mode_is_refused():
    with pytest.raises(ArgumentError, match="fresh"):
        BatchedEnv(NoisyWalk(), reset_mode="stale")


@pytest.mark.parametrize(
    ("chunks", "ended", "rounds"),
    [(ON_HOST, 4096, 32), (ON_CARD, 4096, 4), (ON_CARD, 1, 1), (ON_CARD, 0, 0)],
)
def test_a_card_is_asked_a_few_times_whether_more_rows_begin_anew(chunks, ended, rounds):
    rows = 4096
    calls = []

    def reset(keys):
        jax.debug.callback(lambda: calls.append(1))
        return keys + 1

    mask = jnp.arange(rows) < ended
    reset_all = jax.jit(lambda mask, keys: reset_rows(reset, mask, keys, keys, chunks))
    fresh = reset_all(mask, jnp.arange(rows))
    jax.effects_barrier()

    assert np.array_equal(fresh, np.arange(rows) + (np.arange(rows) < ended))
    assert len(calls) == rounds


@pytest.mark.parametrize(("rows", "loops"), [(1, False), (16, False), (17, True), (600, True)])
def test_where_nothing_ends_nothing_of_a_restart_is_computed(rows, loops):
    """All of it stands in a branch. Out of a loop whose rows are always the same XLA takes the reset."""

    def restart(mask, keys):
        return reset_rows(jnp.tan, mask, keys, keys, ON_HOST)

    traced = jax.make_jaxpr(restart)(jnp.zeros(rows, bool), jnp.zeros(rows))

    (branch,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "cond")
    outside = {eqn.primitive.name for eqn in traced.eqns if eqn is not branch}
    assert not outside & {"tan", "while", "cumsum", "scatter", "select_n"}
    assert ("while" in str(branch)) == loops and "tan" in str(branch)


# ------------------------------------------------------------------------------------- rollouts


def compiled(env, **options):
    policy = random_policy(env)

    @jax.jit
    def run(carry, start):
        return unroll(env, carry, policy, None, KEY, start=start, **options)

    return run


def test_a_policy_is_given_a_key_of_its_own_at_each_step():
    def draw(params, observation, key):
        return jax.random.randint(key, (2,), 0, 1 << 30)

    env = BatchedEnv(Countdown(start=9))
    _, made = unroll(env, env.init(KEY, 2), draw, None, KEY, steps=3, start=5)

    keys = [jax.random.fold_in(KEY, number) for number in (5, 6, 7)]
    assert made.action.tolist() == [draw(None, None, key).tolist() for key in keys]


def without_reward(recorded):
    return replace(recorded, next=replace(recorded.next, reward=None))


@pytest.mark.parametrize(
    "env",
    [WALK, pytest.param(BatchedEnv(TimeLimit(Pendulum(), 3)), marks=pytest.mark.slow)],
    ids=["walk", "swing"],
)
def test_a_compiled_rollout_equals_the_python_loop(env):
    """States, observations, actions and flags in every bit; XLA may round a reward differently."""
    steps = 8
    policy = random_policy(env)
    one_step = jax.jit(
        lambda carry, key: transition(env, carry, policy, None, key, record_state=True)
    )

    carry, recorded = compiled(env, steps=steps, record_state=True)(begin(env, 20), 0)

    loop_carry = begin(env, 20)
    for index in range(steps):
        key = jax.random.fold_in(KEY, index)
        loop_carry, one = one_step(loop_carry, key)
        expected = jax.tree.map(lambda leaf, t=index: leaf[t], recorded)
        assert same_bits(without_reward(one), without_reward(expected))
        np.testing.assert_allclose(one.next.reward, expected.next.reward, rtol=3e-7, atol=1e-6)
    assert same_bits(carry[0], loop_carry[0])
    assert same_bits(carry[1].observation, loop_carry[1].observation)


class Flagged:
    """Row i shows the four bits of i as the flags of each transition."""

    ROWS = jnp.arange(16)

    def bit(self, place):
        return (self.ROWS >> place) % 2 == 1

    def restart_where(self, mask, state, timestep):
        return state, replace(timestep, terminated=self.bit(0), truncated=self.bit(1))

    def step(self, state, action):
        return state, Timestep(self.ROWS, jnp.ones(16), self.bit(2), self.bit(3))


def test_flags_of_roots_and_next_come_out_of_the_loop_as_they_went_in():
    env = Flagged()
    root = Timestep(env.ROWS, jnp.zeros(16), env.bit(0), env.bit(1))

    _, made = unroll(env, ((), root), lambda *_: env.ROWS, None, KEY, steps=3)

    flags = made.terminated, made.truncated, made.next.terminated, made.next.truncated
    for place, flag in enumerate(flags):
        assert flag.dtype == bool
        np.testing.assert_array_equal(flag, np.tile(env.bit(place), (3, 1)))


@pytest.mark.slow
def test_chunks_of_a_rollout_join_to_the_whole():
    whole_carry, whole = compiled(WALK, steps=12)(begin(WALK, 5), 0)
    chunk = compiled(WALK, steps=4)

    carry, chunks = begin(WALK, 5), []
    for start in (0, 4, 8):
        carry, part = chunk(carry, start)
        chunks.append(part)

    assert same_bits(whole, jax.tree.map(lambda *parts: jnp.concatenate(parts), *chunks))
    assert same_bits(whole_carry, carry)


def test_next_holds_the_last_observation_and_the_following_root_the_fresh_one():
    env = BatchedEnv(Countdown(start=2))

    _, recorded = compiled(env, steps=5)(begin(env, 1), 0)

    assert recorded.observation[:, 0].tolist() == [2, 1, 2, 1, 2]
    assert recorded.next.observation[:, 0].tolist() == [1, 0, 1, 0, 1]
    assert recorded.next.terminated[:, 0].tolist() == [False, True, False, True, False]
    assert not recorded.terminated.any()


def test_the_last_step_resets_nothing():
    env = BatchedEnv(Countdown(start=2))

    (_, timestep), _ = compiled(env, steps=2)(begin(env, 1), 0)

    assert timestep.observation[0] == 0
    assert done_of(timestep)[0]


def test_without_auto_reset_a_finished_row_is_stepped_on():
    env = BatchedEnv(Countdown(start=2))

    _, recorded = compiled(env, steps=4, auto_reset=False)(begin(env, 1), 0)

    assert recorded.observation[:, 0].tolist() == [2, 1, 0, -1]
    assert recorded.terminated[:, 0].tolist() == [False, False, True, True]


def test_recorded_states_unpack_to_what_was_there():
    carry = begin(WALK, 5)

    last, recorded = compiled(WALK, steps=3, record_state=True)(carry, 0)

    states = WALK.packing.unpack(recorded.state)
    assert same_bits(jax.tree.map(lambda leaf: leaf[0], states), carry[0])
    after = WALK.packing.unpack(recorded.next_state)
    assert same_bits(jax.tree.map(lambda leaf: leaf[-1], after), last[0])


def test_states_are_recorded_only_when_asked_for():
    env = BatchedEnv(Countdown(start=2))

    _, recorded = compiled(env, steps=5)(begin(env, 1), 0)

    assert recorded.state is None and recorded.next_state is None


def test_params_reach_the_policy():
    env = BatchedEnv(NoisyWalk())

    def policy(params, observation, key):
        return params * jnp.ones_like(observation["place"])

    _, recorded = unroll(env, begin(env, 2), policy, 0.25, KEY, steps=2)

    assert (recorded.action == 0.25).all()


def test_a_rollout_can_be_differentiated():
    env = BatchedEnv(FrameSkip(TimeLimit(Pendulum(), 3), 2))
    carry = begin(env, 4)

    def total(torque):
        act = lambda params, observation, key: jnp.full((4, 1), params)  # noqa: E731
        return unroll(env, carry, act, torque, KEY, steps=5)[1].next.reward.sum()

    assert jnp.isfinite(jax.jit(jax.grad(total))(0.3))
