"""Eight policies x 32 rows of gymnax CartPole in one program: envkit, `jax.vmap` by hand, and the policies one after the other.

The program by hand is ``vmap`` over the policies of ``lax.scan`` over ``vmap(env.step)``, which resets what has ended. It
records what envkit records but for the flags of the root: observation, action, the true observation after the step, reward,
terminated and truncated. All policies draw their actions. In turn, eight programs run after each other, each with one policy
on its 32 rows; only the first call of a program compiles it.

Run: ``python -m bench.population [--quick]``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.distributions import Categorical

from bench.harness import compare
from envkit import GymnaxEnv, compile_policy
from envkit_bridges.dlpack import to_jax

POLICIES, ROWS = 8, 32


class Actor(nn.Module):
    """Draws one of two options; a network of one hidden layer."""

    def __init__(self, width: int):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return an option for each row."""
        logits = self.outer(torch.tanh(self.inner(observation)))
        return Categorical(logits=logits, validate_args=False).sample()


def by_hand(actors: list[Actor], steps: int) -> Callable[[], Any]:
    """Return the whole run as one would write it in JAX."""
    import gymnax

    env, env_params = gymnax.make("CartPole-v1")
    names = [name for name, _ in actors[0].named_parameters()]
    params = {
        name: to_jax(torch.stack([actor.get_parameter(name) for actor in actors]), detach=True)
        for name in names
    }

    def act(params: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
        hidden = jnp.tanh(observation @ params["inner.weight"].T + params["inner.bias"])
        logits = hidden @ params["outer.weight"].T + params["outer.bias"]
        return jax.random.categorical(key, logits)

    def begin(key: jax.Array) -> Any:
        return jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, ROWS), env_params)

    def run(params: Any, begun: Any, key: jax.Array) -> Any:
        def step(carry: Any, key: jax.Array) -> Any:
            seen, state = carry
            for_action, draw = jax.random.split(key)
            action = act(params, seen, for_action)
            following, state, reward, terminated, truncated, info = jax.vmap(
                env.step, in_axes=(0, 0, 0, None)
            )(jax.random.split(draw, ROWS), state, action, env_params)
            made = seen, action, info["final_observation"], reward, terminated, truncated
            return (following, state), made

        return jax.lax.scan(step, begun, jax.random.split(key, steps))

    begun = jax.jit(jax.vmap(begin))(jax.random.split(jax.random.PRNGKey(0), POLICIES))
    keys = jax.random.split(jax.random.PRNGKey(1), POLICIES)
    together = jax.jit(jax.vmap(run))
    return lambda: jax.block_until_ready(together(params, begun, keys))


def measure(width: int, steps: int, *, rounds: int) -> None:
    """Compare runs of one length, under networks of one size."""
    torch.manual_seed(0)
    actors = [Actor(width) for _ in range(POLICIES)]
    options: Any = {"categorical_action_encoding": True, "device": "cpu"}
    env = GymnaxEnv("CartPole-v1", batch_size=[POLICIES, ROWS], **options)
    alone = GymnaxEnv("CartPole-v1", batch_size=[ROWS], **options)
    env.set_seed(0)
    alone.set_seed(0)
    population, single = compile_policy(actors), compile_policy(Actor(width))
    first, first_alone = env.reset(), alone.reset()
    states = [actor.state_dict() for actor in actors]

    def in_turn() -> None:
        for state in states:
            single.module.load_state_dict(state)
            alone.unroll(first_alone, steps, single)

    compare(
        f"{POLICIES} policies x {ROWS} rows of gymnax CartPole, {width} hidden units, rollouts of {steps} steps",
        {
            "jax.vmap by hand": by_hand(actors, steps),
            "envkit unroll, compile_policy": lambda: env.unroll(first, steps, population),
            "envkit unroll, one policy after the other": in_turn,
        },
        steps=POLICIES * ROWS * steps,
        reference="jax.vmap by hand",
        rounds=rounds,
    )


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args().quick else 9
    for width in (16, 64):
        for steps in (32, 500):
            measure(width, steps, rounds=rounds)


if __name__ == "__main__":
    main()
