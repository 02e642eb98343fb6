"""Domain randomisation: what is drawn, when, from which numbers, and what a row steps with."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envkit.errors import ArgumentError, ArgumentTypeError
from envkit.functional import BatchedEnv, Metrics, Randomization, TimeLimit, WithoutInfo
from tests.zoo.jax_envs import Countdown, Sled

KEY, ROWS = jax.random.PRNGKey(3), 5
PUSH = jnp.full((ROWS, 1), 0.5)


def heavier(key, model):
    """Draw the mass and one of two frictions."""
    left, right = model["friction"]
    mass, friction = jax.random.uniform(key, (2,), minval=0.5, maxval=2.0)
    return {**model, "mass": mass, "friction": (left, friction * right)}


def sleds(randomize=heavier, at="episode", **how):
    env = WithoutInfo(Sled())
    return BatchedEnv(
        TimeLimit(env, None), randomization=Randomization.of(env, randomize, at), **how
    )


@pytest.fixture(scope="module", params=["episode", "construction"])
def run(request):
    """Five rows from a reset to the begin of the next episode of the last three, step by step."""
    env = sleds(at=request.param)
    moment = jax.jit(partial(env.init, num_rows=ROWS))(KEY)
    step = jax.jit(env.step)
    moments = [moment]
    for _ in range(4):
        moment = step(moment[0], PUSH)
        moments.append(moment)
    restart = jnp.arange(ROWS) > 1
    return request.param, moments, jax.jit(env.restart_where)(restart, *moment), env


def test_rows_draw_models_of_their_own_and_store_only_what_is_changed(run):
    _, moments, _, env = run

    model = moments[0][0].model

    assert set(model) == {"mass", "friction"} and set(model["friction"]) == {"1"}
    assert len(np.unique(model["mass"])) == len(np.unique(model["friction"]["1"])) == ROWS
    assert env.env.randomization.drawn_bytes(env.env) == {"mass": 4, "friction.1": 4}


def test_every_row_steps_with_what_it_has_drawn(run):
    _, moments, _, _ = run
    drawn = moments[0][0].model

    def row_of(tree, row):
        return jax.tree.map(lambda leaf: leaf[row], tree)

    for row in range(ROWS):
        model = {
            **Sled().model,
            "mass": drawn["mass"][row],
            "friction": (0.5, drawn["friction"]["1"][row]),
        }
        state = row_of(moments[0][0].inner.inner, row)
        for _, timestep in moments[1:]:
            state, alone = Sled(model).step(state, PUSH[row])
            np.testing.assert_allclose(timestep.observation[row], alone.observation, rtol=1e-6)
            assert timestep.terminated[row] == alone.terminated


def test_a_model_lasts_for_an_episode_or_for_the_row(run):
    at, moments, (restarted, _), _ = run
    before = moments[0][0].model

    kept = [
        jax.tree.map(np.array_equal, before, state.model) for state, _ in (moments[1], moments[-1])
    ]
    same = np.asarray(before["mass"]) == restarted.model["mass"]

    assert all(jax.tree.leaves(kept))
    assert list(same) == [True, True] + [at == "construction"] * 3


def test_what_was_set_in_a_stored_state_outlives_restarts_where_a_model_is_drawn_once():
    env = sleds(at="construction")
    state, _ = env.init(KEY, ROWS)
    mass = jnp.arange(1.0, 6.0)

    again, _ = env.again((state.key, {**state.model, "mass": mass}))

    assert np.array_equal(again.model["mass"], mass)
    assert not np.array_equal(again.inner.inner["speed"], state.inner.inner["speed"])


@pytest.mark.parametrize("at", ["episode", "construction"])
def test_rows_that_hold_only_the_key_of_their_env_begin_as_init_does(at):
    env = sleds(at=at)
    wanted = env.init(KEY, ROWS)

    origins = env.first_origins(jnp.tile(KEY, (ROWS, 1)))
    began = env.again(origins)

    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, began, wanted)))


def test_a_function_that_changes_nothing_changes_no_bit_and_adds_nothing_to_the_state():
    plain = BatchedEnv(TimeLimit(WithoutInfo(Sled()), None))
    same = sleds(lambda key, model: dict(model))

    begun, wanted = same.init(KEY, ROWS), plain.init(KEY, ROWS)
    stepped, expected = same.step(begun[0], PUSH), plain.step(wanted[0], PUSH)

    assert same.packing.fields == plain.packing.fields
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, (begun, stepped), (wanted, expected))))


@pytest.mark.parametrize(("mode", "models"), [("cached", 16), ("pool", 2)])
def test_what_is_drawn_is_part_of_the_beginning_that_a_reset_mode_repeats(mode, models):
    env = sleds(reset_mode=mode, pool_size=2)

    first, _ = env.init(KEY, 16)
    again, _ = env.again(first.origin)

    drawn = np.concatenate([first.model["mass"], again.model["mass"]])
    assert len(np.unique(drawn)) == models


def test_leaves_that_pass_a_jitted_function_unchanged_are_not_drawn():
    inner = jax.jit(lambda key, model: {**model, "mass": model["mass"] * 2})

    found = Randomization.of(Sled(), jax.jit(lambda key, model: inner(key, model)), "episode")

    assert list(found.drawn_bytes(Sled())) == ["mass"]


def test_a_leaf_that_is_swapped_for_another_is_changed():
    swap = Randomization.of(
        Sled(), lambda key, model: {**model, "friction": model["friction"][::-1]}
    )

    assert list(swap.drawn_bytes(Sled())) == ["friction.0", "friction.1"]


def test_no_row_sees_what_a_wrapper_around_the_env_reports():
    env = Metrics(Sled())
    rows = BatchedEnv(env, randomization=Randomization.of(env, heavier))

    state, root = rows.init(KEY, ROWS)
    _, timestep = rows.step(state, PUSH)

    assert not root.observation["metrics"]["work"].any()
    assert np.array_equal(timestep.observation["metrics"]["work"], 0.5 * timestep.reward)


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("randomize", "wanted"),
    [
        (lambda key, model: {**model, "mass": jnp.ones(3)}, r"mass as float32\[3\], but it is"),
        (lambda key, model: {**model, "steps": 2.5}, "steps as float32.*same shape and kind"),
        (lambda key, model: {"mass": 1.0}, r"another structure(?s:.)*model\.replace"),
    ],
)
def test_a_function_that_gives_another_model_is_refused(randomize, wanted):
    with pytest.raises(ArgumentError, match=wanted):
        Randomization.of(Sled(), randomize)


def _by_if(key, model):
    return {**model, "mass": 2.0} if model["mass"] > 1 else model


@pytest.mark.parametrize(
    "randomize",
    [
        _by_if,
        lambda key, model: {**model, "mass": float(model["mass"])},
        lambda key, model: {**model, "mass": np.sin(model["mass"])},
        lambda key, model: {**model, "mass": [1.0, 2.0][jax.random.bernoulli(key).astype(int)]},
        lambda key, model: {**model, "mass": key[key > 0].sum()},
    ],
)
def test_a_function_that_asks_for_values_is_told_that_it_is_traced(randomize):
    with pytest.raises(ArgumentError, match=r"asks for the value.*It is traced.*jnp\.where"):
        Randomization.of(Sled(), randomize)


def test_an_env_without_a_model_is_refused_by_its_name():
    with pytest.raises(ArgumentTypeError, match=r"Countdown has no model to randomise.*with_model"):
        Randomization.of(TimeLimit(Countdown(3), None), heavier)


def test_what_is_no_function_and_an_unknown_moment_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"\(key, model\) -> model"):
        Randomization.of(Sled(), 0.1)
    with pytest.raises(ArgumentTypeError, match=r"\(key, model\) -> model.*It takes \(model\)"):
        Randomization.of(Sled(), lambda model: model)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="randomize_at='step' is not one of"):
        Randomization.of(Sled(), heavier, "step")
