"""Loops that stop where an episode ends: which rows count, and what a row shows that waits for others."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from envkit.functional import BatchedEnv, unroll_until
from tests.zoo.jax_envs import Countdown

KEY = jax.random.PRNGKey(0)


def still(params, observation, key):
    return jnp.zeros(3, jnp.int32)


def run(rule, counted, limit=5, policy=still, **how):
    """Run three rows that end after 1, 3 and 9 steps."""
    env = BatchedEnv(Countdown(start=9))
    state, timestep = env.init(KEY, 3)
    carry = replace(state, inner=jnp.array([1, 3, 9])), timestep

    given = env, carry, policy, None, KEY, jnp.array(counted)
    return unroll_until(*given, rule=rule, capacity=5, limit=limit, **how)


RUNS = pytest.mark.parametrize(
    ("rule", "counted", "limit", "steps", "ended"),
    [
        ("any", [True, True, True], 5, 1, True),
        ("any", [False, True, True], 5, 3, True),
        ("any", [False, False, True], 4, 4, False),
        ("all", [True, True, False], 5, 3, True),
        ("all", [True, False, False], 5, 1, True),
        ("all", [True, True, True], 4, 4, False),
    ],
)


@RUNS
def test_only_rows_that_count_end_a_run(rule, counted, limit, steps, ended):
    _, _, stopped = run(rule, counted, limit)

    assert (int(stopped.made), bool(stopped.ended)) == (steps, ended)


@RUNS
@pytest.mark.parametrize("every", [2, 3, 9])
def test_nothing_is_kept_of_steps_beyond_the_end(rule, counted, limit, steps, ended, every):
    carry, recorded, stopped = run(rule, counted, limit)
    after, others, so_too = run(rule, counted, limit, check_every=every)

    assert jax.tree.all(jax.tree.map(jnp.array_equal, (carry, stopped), (after, so_too)))
    same = jax.tree.map(
        lambda *pair: jnp.array_equal(*(leaf[:steps] for leaf in pair)), recorded, others
    )
    assert jax.tree.all(same)


def test_a_run_counts_its_steps_from_0_where_it_is_not_told_otherwise():
    def draw(params, observation, key):
        return jax.random.randint(key, (3,), 0, 1 << 30)

    running = 2  # the other rows wait, and repeat what they did last
    first, same, later = (
        run("all", [True, True, True], policy=draw, **at)[1].action[:, running].tolist()
        for at in ({}, {"start": 0}, {"start": 1})
    )

    assert first == same
    assert first[1:] == later[:-1]


def test_a_row_that_is_done_waits_for_the_others_and_is_paid_nothing():
    (state, timestep), recorded, _ = run("all", [True, True, False])

    assert recorded.next.observation[:3].T.tolist() == [[0, 0, 0], [2, 1, 0], [8, 7, 6]]
    assert recorded.next.reward[:3].T.tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert recorded.next.terminated[:3, 0].all()
    assert state.inner.tolist() == [0, 0, 6] and timestep.observation.tolist() == [0, 0, 6]
    assert recorded.state is None and recorded.next.reward.shape == (5, 3)
