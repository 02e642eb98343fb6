"""Stateless envs as pure functions, and through gymnax's and Brax's interfaces: equal data, limits, infos, misuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from envkit import (
    DTypeCastTransform,
    ExcludeTransform,
    FlattenObservation,
    FrameSkipTransform,
    JaxEnv,
    PendulumJaxEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
    check_env_specs,
    make,
    to_brax,
    to_gymnax,
    to_stateless,
)
from envkit.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from envkit.functional import Box, Discrete, MultiDiscrete, Timestep
from envkit_bridges.libraries import quietly, require_quietly
from envkit_bridges.worlds.brax import import_brax
from tests.zoo.envs import Count
from tests.zoo.jax_envs import NoisyWalk
from tests.zoo.jax_ppo import train

KEYS = jax.random.split(jax.random.PRNGKey(0), 4)


class Arm:
    """Two choices and a push; it shows both, and the push may lie between 0 and 8."""

    action_space = {"turn": MultiDiscrete((2, 3)), "push": Box(0.0, 8.0, (2,))}  # noqa: RUF012
    action_masks = ((("turn",), ("allowed",)),)

    def reset(self, key):
        return jnp.int32(0), self.shown(jnp.int32(0), jnp.zeros(2, jnp.int32), jnp.zeros(2))

    def step(self, state, action):
        return state + 1, self.shown(state + 1, action["turn"], action["push"])

    def shown(self, state, turn, push):
        allowed = jnp.array([True, True, True, False, True])
        return Timestep({"turn": turn, "push": push, "allowed": allowed}, info={"at": state})


def equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for first, second in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(first, second)


def run(reset, step, actions):
    """Play in all rows at once what two pure functions of one env do: what resets and steps give but the state."""

    def all_steps():
        state, first = jax.vmap(reset)(KEYS)
        return first, jax.lax.scan(
            lambda state, action: jax.vmap(step)(state, action), state, actions
        )[1]

    return jax.jit(all_steps)()


def test_pure_functions_are_those_of_the_env_below_its_own_wrappers():
    env = to_stateless(PendulumJaxEnv())
    bare = PendulumJaxEnv()._engine.programs.env.env.env
    actions = jax.random.uniform(jax.random.PRNGKey(1), (12, 4, 1), minval=-2, maxval=2)

    equal(run(env.reset, env.step, actions), run(bare.reset, bare.step, actions))


def test_transforms_limits_and_infos_are_those_of_the_rows_of_the_env():
    def rolled(make):
        env = JaxEnv(NoisyWalk(), episode_length=7).append_transform(StepCounter(5))
        env = make(env.append_transform(RewardSum()))
        env.set_seed(0)
        check_env_specs(env)
        env.set_seed(0)
        return env.rollout(12, break_when_any_done=False)["next"]

    data = rolled(lambda env: TransformedEnv(JaxEnv(to_stateless(env, info_keys=["far"]))))
    expected = rolled(lambda env: env)

    for key in ("place", "step_count", "episode_reward", "reward", "truncated", "done"):
        assert (data[key] == expected[key]).all()
    assert (data["info", "far"] == expected["far"]).all()
    assert expected["truncated"].any()


def test_typed_keys_begin_the_episodes_of_raw_ones():
    env = to_stateless(JaxEnv(NoisyWalk()))

    equal(env.reset(jax.random.key(3))[1], env.reset(jax.random.PRNGKey(3))[1])


@pytest.mark.parametrize(
    "key", [jax.random.key(0, impl="rbg"), jax.random.split(jax.random.key(0), 3)], ids=str
)
def test_a_key_of_another_kind_and_several_are_refused(key):
    env = to_stateless(JaxEnv(NoisyWalk()))

    with pytest.raises(ArgumentError, match=r"key is key<.*Pass jax\.random\.key\(0\)"):
        env.reset(key)


def test_misuse_says_what_to_do():
    with pytest.raises(ArgumentError, match="but Count is no JaxEnv"):
        to_stateless(Count())
    with pytest.raises(ArgumentError, match=r"SerialEnv is no JaxEnv. Pass one"):
        to_stateless(TransformedEnv(SerialEnv(2, Count), StepCounter()))
    with pytest.raises(ArgumentError, match=r"FrameSkipTransform do not. Leave them out"):
        to_stateless(PendulumJaxEnv().append_transform(FrameSkipTransform(2)))
    with pytest.raises(ArgumentError, match="VecNorm of this env learns from all rows together"):
        to_stateless(PendulumJaxEnv().append_transform(VecNorm(["th"])))
    with pytest.raises(ArgumentError, match="Make it with reset_mode='fresh'"):
        to_stateless(PendulumJaxEnv(reset_mode="pool"))
    with pytest.raises(ArgumentTypeError, match="must be an env"):
        to_stateless(NoisyWalk())
    with pytest.raises(MissingKeyError, match="info_keys names 'mood'"):
        to_stateless(PendulumJaxEnv(), info_keys=["mood"])

    class Own(JaxEnv):
        def _step(self, td):
            return super()._step(td)

    with pytest.raises(ArgumentError, match="Own overrides its step or its reset"):
        to_stateless(Own(NoisyWalk()))


# ------------------------------------------------------------------------------------------ gymnax


def test_gymnax_steps_an_env_of_brax_to_the_bit_and_resets_where_it_is_cut():
    bare = import_brax().get_environment("fast")
    env = to_gymnax(make("brax/fast", episode_length=5))
    params, action = env.default_params, jnp.zeros(1)
    after = bare.reset(KEYS[0])

    observation, state = env.reset(KEYS[0], params)

    equal(observation, after.obs)
    for number in range(1, 8):
        key = jax.random.fold_in(KEYS[1], number)
        observation, state, reward, terminated, truncated, info = env.step(
            key, state, action, params
        )
        after = bare.step(after, action)
        equal(info["final_observation"], after.obs)
        assert (float(reward), bool(terminated)) == (float(after.reward), False)
        assert bool(truncated) == bool(info["truncated"]) == (number == 5)
        if truncated:
            after = bare.reset(jax.random.split(key)[1])
        equal(observation, after.obs)
        equal(env.get_obs(state, params), observation)
    assert int(state.time) == 2 and params.max_steps_in_episode == 5
    assert env.name == "fast"


def test_gymnax_params_are_those_of_an_env_of_gymnax():
    gymnax = require_quietly("gymnax")
    env, (bare, params) = to_gymnax(make("gymnax/CartPole-v1")), gymnax.make("CartPole-v1")
    heavy = params.replace(masspole=3.0)
    equal(env.default_params, jax.tree.map(np.float32, params))
    observation, state = env.reset(KEYS[0], heavy)
    known, inner = bare.reset(jax.random.split(KEYS[0])[0], heavy)
    equal(observation, known)
    equal(env.get_obs(state), known)

    for number in range(12):
        observation, state, reward, ended, _ = env.step_env(KEYS[1], state, number % 2, heavy)
        known, inner, paid, over, _ = bare.step_env(KEYS[1], inner, number % 2, heavy)
        equal((observation, ended), (known, over))
        assert reward == paid


def test_gymnax_names_spaces_and_its_wrappers_take_the_env():
    wrappers = require_quietly("gymnax.wrappers")
    env = to_gymnax(JaxEnv(Arm()), info_keys=["allowed"])
    logged, legacy = wrappers.LogWrapper(env), wrappers.LegacyStepAPIWrapper(env)
    action = env.action_space().sample(KEYS[0])

    observation, state = logged.reset(KEYS[0])
    *_, info = logged.step(KEYS[0], state, action)
    old = legacy.step(KEYS[0], legacy.reset(KEYS[0])[1], action)

    assert env.action_space().spaces["turn"].contains(action["turn"])
    assert (env.name, env.num_actions) == ("Arm", 2 + 3 + 2)
    assert env.observation_space().spaces["push"].shape == (2,)
    assert jax.tree.map(jnp.shape, observation) == {"push": (2,), "turn": (2,)}
    assert not info["returned_episode"] and info["allowed"].shape == (5,)
    assert len(old) == 5 and int(old[4]["at"]) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_written_for_gymnax_learns_a_pendulum_of_brax():
    env = to_gymnax(make("brax/inverted_pendulum", backend="spring", episode_length=200))

    lengths = train(env, jax.random.key(0), updates=40, rows=128, length=32, epochs=8)

    assert lengths[:3].mean() < 30 < 60 < lengths[-3:].mean()


# -------------------------------------------------------------------------------------------- Brax


def test_brax_steps_its_own_env_to_the_bit_under_its_training_wrappers():
    envs = import_brax()
    actions = jax.random.uniform(KEYS[1], (12, 4, 1), minval=-1)

    def played(env):
        wrapped = envs.training.wrap(env, episode_length=5)

        def step(state, action):
            state = wrapped.step(state, action)
            return state, (state.obs, state.reward, state.done, state.info["truncation"])

        state = wrapped.reset(KEYS)
        return state.obs, jax.lax.scan(step, state, actions)[1]

    bare, ours = envs.get_environment("fast"), to_brax(make("brax/fast"))

    equal(jax.jit(played, static_argnums=0)(ours), jax.jit(played, static_argnums=0)(bare))
    assert (ours.observation_size, ours.action_size) == (bare.observation_size, bare.action_size)


def test_brax_actions_are_scores_of_allowed_options_and_numbers_within_bounds():
    env = to_brax(JaxEnv(Arm(), episode_length=1), info_keys=["allowed"])
    state = jax.jit(env.reset)(KEYS[0])
    # the push first: by name, then two and three options, of which the fourth is not allowed
    action = jnp.array([-1.0, 0.5, 0.1, 0.3, 0.2, 0.9, 0.4])

    after = jax.jit(env.step)(state, action)

    assert env.action_size == 7 and env.observation_size == {"push": (2,), "turn": (2,)}
    assert after.obs["push"].tolist() == [0.0, 6.0] and after.obs["turn"].tolist() == [1, 2]
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert not after.done and after.info["truncation"] and after.info["truncated"]
    assert int(after.info["at"]) == 1


def test_gymnax_bounds_counters_by_what_jax_counts_to():
    env = to_gymnax(JaxEnv(NoisyWalk()).append_transform(StepCounter(5)))
    space = env.observation_space().spaces["step_count"]

    observation, _ = env.reset(KEYS[0])

    assert space.contains(observation["step_count"]) and not space.contains(jnp.int32([-1]))


def test_rewards_of_a_reset_are_zeros_in_the_form_of_a_step():
    env = to_stateless(JaxEnv(_two_rewards()))

    def step(carry, action):
        return env.step(carry[0], action), None

    (_, timestep), _ = jax.lax.scan(step, env.reset(KEYS[0]), jnp.zeros(3, jnp.int32))

    assert env.reset(KEYS[0])[1].reward.tolist() == [0, 0]
    assert timestep.reward.tolist() == [1, 1]


def test_brax_and_gymnax_take_one_reward_and_actions_they_can_spell():

    class Whole(Arm):
        action_space = Box(0, 3, (2,), np.int32)
        action_masks = ()

    with pytest.raises(ArgumentError, match=r"ExcludeTransform\('player_reward'\)"):
        to_brax(make("pgx/tic_tac_toe"))
    with pytest.raises(ArgumentError, match=r"has shape \(2,\). Add its parts up with Lin"):
        to_gymnax(JaxEnv(_two_rewards()))
    with pytest.raises(ArgumentError, match="takes float Boxes, Discrete and MultiDiscrete"):
        to_brax(JaxEnv(Whole()))
    with pytest.raises(ArgumentError, match="to_brax takes stateless envs over JAX"):
        to_brax(Count())
    game = make("pgx/tic_tac_toe", transforms=[ExcludeTransform("player_reward")])
    state = to_brax(game).reset(KEYS[0])
    assert state.obs["action_mask"].all()


def _two_rewards():
    class Two:
        action_space, reward_shape = Discrete(2), (2,)

        def reset(self, key):
            return jnp.int32(0), Timestep(jnp.int32(0))

        def step(self, state, action):
            return state, Timestep(state, jnp.ones(2))

    return Two()


def cart_pole():
    return to_brax(make("gymnax/CartPole-v1"))


def breakout():
    """Breakout of MinAtar, which pgx has: its picture as one axis of floats, and the reward of its only player."""
    transforms = [
        ExcludeTransform("player_reward"),
        FlattenObservation(-3, -1, in_keys=["observation"]),
        DTypeCastTransform(torch.bool, torch.float32, in_keys=["observation"]),
    ]
    game = make("pgx/minatar-breakout", transforms=transforms)
    return to_brax(game, info_keys=["action_mask", "current_player"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("build", "steps", "normalizes", "random", "learnt"),
    # a random policy falls after some 22 steps, and hits a brick in every third episode
    [
        (cart_pole, 20_000, True, 50, 100),
        pytest.param(*(breakout, 100_000, False, 1, 2), marks=pytest.mark.sweep),
    ],
    ids=["CartPole of gymnax", "a game of pgx"],
)
def test_brax_training_learns(build, steps, normalizes, random, learnt, monkeypatch):
    with quietly():
        from brax.training.agents.ppo import train as ppo
    # Brax 0.14.2 calls it, and JAX 0.10 has it no more
    copies = lambda tree, devices: jax.tree.map(lambda leaf: jnp.stack([leaf] * len(devices)), tree)  # noqa: E731
    monkeypatch.setattr(jax, "device_put_replicated", copies, raising=False)
    curve = []

    ppo.train(
        build(),
        num_timesteps=steps,
        episode_length=200,
        num_envs=64,
        num_eval_envs=64,
        unroll_length=10,
        batch_size=64,
        num_minibatches=4,
        num_updates_per_batch=4,
        num_evals=2,
        learning_rate=1e-3,
        discounting=0.99,
        normalize_observations=normalizes,
        progress_fn=lambda steps, metrics: curve.append(float(metrics["eval/episode_reward"])),
    )

    assert curve[0] < random < learnt < curve[-1]
