"""PPO in one program over an env of gymnax's interface, continuous actions: what single-file trainers in JAX do."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

HIDDEN = 64
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class Step(NamedTuple):
    observation: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    next_value: jax.Array
    terminated: jax.Array
    done: jax.Array


def layers(key: jax.Array, sizes: list[int]) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(key, (m, n)) / jnp.sqrt(m), "b": jnp.zeros(n)}
        for key, m, n in zip(keys, sizes, sizes[1:], strict=False)
    ]


def forward(weights: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in weights[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ weights[-1]["w"] + weights[-1]["b"]


def log_prob(params: Any, observation: jax.Array, action: jax.Array) -> jax.Array:
    mean, deviation = forward(params["actor"], observation), jnp.exp(params["log_std"])
    each = -0.5 * ((action - mean) / deviation) ** 2 - params["log_std"]
    return each.sum(-1)


def value_of(params: Any, observation: jax.Array) -> jax.Array:
    return forward(params["critic"], observation)[..., 0]


def advantages(steps: Step) -> jax.Array:
    def back(carry: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        target = step.reward + GAMMA * step.next_value * ~step.terminated
        carry = target - step.value + GAMMA * LAMBDA * carry * ~step.done
        return carry, carry

    return jax.lax.scan(back, jnp.zeros_like(steps.value[0]), steps, reverse=True)[1]


def train(
    env: Any, key: jax.Array, *, updates: int, rows: int, length: int, epochs: int = 4
) -> jax.Array:
    """Train in one program; return by update the mean steps of an episode, from the share of steps that end one."""
    params_of_env = env.default_params
    size = env.observation_space(params_of_env).shape[0]
    actions = env.action_space(params_of_env)
    first, key = jax.random.split(key)
    params = {
        "actor": layers(first, [size, HIDDEN, HIDDEN, actions.shape[0]]),
        "critic": layers(key, [size, HIDDEN, HIDDEN, 1]),
        "log_std": jnp.full(actions.shape, -0.5),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))

    def loss(params: Any, steps: Step, advantage: jax.Array) -> jax.Array:
        ratio = jnp.exp(log_prob(params, steps.observation, steps.action) - steps.log_prob)
        scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = jnp.minimum(ratio * scaled, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * scaled)
        error = value_of(params, steps.observation) - (advantage + steps.value)
        return -gain.mean() + 0.5 * (error**2).mean()

    def env_step(carry: Any, key: jax.Array) -> tuple[Any, Step]:
        params, observation, state = carry
        noise, key = jax.random.split(key)
        mean = forward(params["actor"], observation)
        action = mean + jnp.exp(params["log_std"]) * jax.random.normal(noise, mean.shape)
        keys = jax.random.split(key, rows)
        taken = jnp.clip(action, actions.low, actions.high)
        after, state, reward, terminated, truncated, info = jax.vmap(env.step, (0, 0, 0, None))(
            keys, state, taken, params_of_env
        )
        step = Step(
            observation,
            action,
            log_prob(params, observation, action),
            value_of(params, observation),
            reward,
            value_of(params, info["final_observation"]),
            terminated,
            terminated | truncated,
        )
        return (params, after, state), step

    def update(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, learned, observation, state = carry
        begun = (params, observation, state)
        (_, observation, state), steps = jax.lax.scan(
            env_step, begun, jax.random.split(key, length)
        )
        advantage = advantages(steps)

        def epoch(carry: Any, _: None) -> tuple[Any, None]:
            params, learned = carry
            changes, learned = optimizer.update(
                jax.grad(loss)(params, steps, advantage), learned, params
            )
            return (optax.apply_updates(params, changes), learned), None

        (params, learned), _ = jax.lax.scan(epoch, (params, learned), None, epochs)
        return (params, learned, observation, state), 1 / jnp.maximum(steps.done.mean(), 1e-4)

    def whole(key: jax.Array) -> jax.Array:
        begin, key = jax.random.split(key)
        observation, state = jax.vmap(env.reset, (0, None))(
            jax.random.split(begin, rows), params_of_env
        )
        carry = params, optimizer.init(params), observation, state
        return jax.lax.scan(update, carry, jax.random.split(key, updates))[1]

    return jax.jit(whole)(key)
