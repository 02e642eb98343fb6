"""Worlds against what their libraries do by themselves; each function is one line of the table.

Run: ``python -m bench.worlds [--quick] [--only WORK]``
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from tensordict.nn import TensorDictModule

from bench.control import in_workers, one_env
from bench.harness import LoopsTogether, compare, rolled_out, stepped

GAMES, PISTONS = 8, 20


# ---------------------------------------------------------------------------------------- PettingZoo


def games(quick: bool) -> None:
    """Measure ParallelEnv of 8 games of Pistonball against two bare loops at the same time."""
    from envkit import ParallelEnv, PettingZooEnv, SerialEnv

    steps, processes = (4 if quick else 8), 2

    def make() -> PettingZooEnv:
        return PettingZooEnv("butterfly/pistonball_v6")

    with ExitStack() as opened:
        loops = opened.enter_context(
            LoopsTogether(partial(bare_games, GAMES // processes, steps), processes)
        )
        parallel = ParallelEnv(GAMES, make, num_processes=processes)
        serial = SerialEnv(GAMES, make)
        for env in (parallel, serial):
            env.set_seed(0)
            opened.callback(env.close)
        reference = f"{processes} bare loops at the same time"
        compare(
            f"Pistonball x{GAMES}, {PISTONS} agents, random actions",
            {
                reference: loops,
                "bare loop, one process": bare_games(GAMES, steps),
                "envkit ParallelEnv, rollout": rolled_out(parallel, steps),
                "envkit ParallelEnv, step by step": stepped(parallel, steps),
                "envkit SerialEnv, rollout": rolled_out(serial, steps),
            },
            steps=GAMES * steps,
            reference=reference,
            rounds=5 if quick else 7,
        )


def bare_games(count: int, steps: int) -> Callable[[], None]:
    """Step games by the library alone; observations of all agents are put side by side, as a policy needs them."""
    from pettingzoo.butterfly.pistonball.pistonball import parallel_env

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        envs = [parallel_env() for _ in range(count)]
    agents = envs[0].possible_agents
    shape = envs[0].observation_space(agents[0]).shape
    seen = np.empty((count, len(agents), *shape), np.uint8)
    for row, env in enumerate(envs):
        _put(seen[row], env.reset(seed=row)[0])
    generator = np.random.default_rng(0)

    def run() -> None:
        for _ in range(steps):
            actions = generator.uniform(-1, 1, (count, len(agents), 1)).astype(np.float32)
            for row, env in enumerate(envs):
                result = env.step(dict(zip(agents, actions[row], strict=True)))
                observations = result[0] if env.agents else env.reset()[0]
                _put(seen[row], observations)

    return run


def _put(rows: np.ndarray, observations: dict[str, np.ndarray]) -> None:
    for row, observation in zip(rows, observations.values(), strict=True):
        row[...] = observation


# ----------------------------------------------------------------------------- gymnax and Jumanji


def cartpole(quick: bool) -> None:
    """Measure random runs of gymnax's CartPole x 4096 as one program against the library's own scan.

    The bare scan is ``vmap(env.step)``, which resets what has ended: it computes a reset for every row at every
    step. Both record observation and action at the root, and the true observation after the step, reward,
    terminated and truncated; envkit records the flags of the root as well.
    """
    import gymnax

    from envkit import GymnaxEnv

    rows, steps = 4096, 100
    bare, params = gymnax.make("CartPole-v1")

    def begin(key: jax.Array) -> Any:
        return jax.vmap(bare.reset, in_axes=(0, None))(jax.random.split(key, rows), params)

    def step(carry: Any, key: jax.Array, params: Any) -> Any:
        seen, state = carry
        act, draw = jax.random.split(key)
        action = jax.vmap(bare.action_space(params).sample)(jax.random.split(act, rows))
        following, state, reward, terminated, truncated, info = jax.vmap(
            bare.step, in_axes=(0, 0, 0, None)
        )(jax.random.split(draw, rows), state, action, params)
        made = seen, action, info["final_observation"], reward, terminated, truncated
        return (following, state), made

    env = GymnaxEnv("CartPole-v1", batch_size=[rows], categorical_action_encoding=True)
    _against_scan(f"gymnax CartPole x{rows}", env, begin, step, params, steps, quick)


def snake(quick: bool) -> None:
    """Measure random runs of Jumanji's Snake x 1024 as one program against the library's own scan.

    The bare scan is ``vmap(AutoResetWrapper(env).step)``, which resets what has ended. What is recorded is that
    of `cartpole`; the observation has three entries, the largest of 12 x 12 x 5 floats.
    """
    from jumanji.registration import make as make_bare
    from jumanji.wrappers import AutoResetWrapper

    from envkit import JumanjiEnv

    rows, steps = 1024, 20
    bare = AutoResetWrapper(make_bare("Snake-v1"), next_obs_in_extras=True)
    actions = bare.action_spec.num_values

    def begin(key: jax.Array) -> Any:
        state, timestep = jax.vmap(bare.reset)(jax.random.split(key, rows))
        return timestep.observation, state

    def step(carry: Any, key: jax.Array, params: Any) -> Any:
        seen, state = carry
        action = jax.random.randint(key, (rows,), 0, actions)
        state, timestep = jax.vmap(bare.step)(state, action)
        is_last, is_over = timestep.last(), timestep.discount == 0
        ends = is_last & is_over, is_last & ~is_over
        made = seen, action, timestep.extras["next_obs"], timestep.reward, *ends
        return (timestep.observation, state), made

    env = JumanjiEnv("Snake-v1", batch_size=[rows])
    _against_scan(f"Jumanji Snake x{rows}", env, begin, step, None, steps, quick)


# ------------------------------------------------------------------------------------------- pgx


def connect_four(quick: bool) -> None:
    """Measure random legal games of pgx's connect_four x 4096 as one program against the library's own scan.

    The bare scan is ``vmap(auto_reset(env.step, env.init))``, and draws from the legal actions as pgx's documentation
    does. Both record observation, mask, player and action at the root; observation, mask, player, rewards and end
    after the step. envkit's observation after the last move of a game is the true one, and it records flags at the root
    and which actions were illegal, too.
    """
    from envkit import PgxEnv

    rows, steps = 4096, (20 if quick else 50)
    env = PgxEnv("connect_four", batch_size=[rows])

    def act(state: Any, key: jax.Array, params: Any) -> jax.Array:
        return jax.random.categorical(key, jnp.log(state.legal_action_mask.astype(jnp.float32)))

    begin, step = _bare_game(env._env, rows, act)
    title = f"pgx connect_four x{rows}"
    _against_scan(title, env, begin, step, None, steps, quick, acts="random legal actions")


def self_play(quick: bool) -> None:
    """Measure connect_four x 4096 played by one small torch network for both sides, against the same network in JAX.

    What is recorded is that of `connect_four`. Moves are sampled from the scores of legal actions.
    """
    from envkit import PgxEnv, compile_policy

    rows, steps = 4096, (20 if quick else 50)
    env = PgxEnv("connect_four", batch_size=[rows])
    torch.manual_seed(0)
    net = _Player()
    params = [parameter.detach().numpy() for parameter in net.parameters()]

    def act(state: Any, key: jax.Array, params: Any) -> jax.Array:
        weight, bias, weight_out, bias_out = params
        seen = state.observation.reshape(rows, -1).astype(jnp.float32)
        scores = jnp.maximum(seen @ weight.T + bias, 0) @ weight_out.T + bias_out
        noise = -jnp.log(-jnp.log(jax.random.uniform(key, scores.shape, minval=1e-9)))
        return jnp.where(state.legal_action_mask, scores + noise, -jnp.inf).argmax(-1)

    begin, step = _bare_game(env._env, rows, act)
    policy = compile_policy(TensorDictModule(net, ["observation", "action_mask"], ["action"]))
    title, acts = f"pgx connect_four x{rows}", "a small network plays itself"
    _against_scan(title, env, begin, step, params, steps, quick, policy=policy, acts=acts)


class _Player(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = torch.nn.Linear(84, 64), torch.nn.Linear(64, 7)

    def forward(self, observation: torch.Tensor, action_mask: torch.Tensor) -> torch.Tensor:
        scores = self.out(self.hidden(observation.flatten(-3).float()).relu())
        noise = -torch.log(-torch.log(torch.rand_like(scores).clamp_min(1e-9)))
        return torch.where(action_mask, scores + noise, -torch.inf).argmax(-1)


def _bare_game(bare: Any, rows: int, act: Any) -> tuple[Any, Any]:
    """Give the beginning and the step of a scan over games of pgx, which ``act`` plays."""
    from pgx.experimental.wrappers import auto_reset

    def begin(key: jax.Array) -> Any:
        return jax.vmap(bare.init)(jax.random.split(key, rows))

    def shown(state: Any) -> Any:
        return state.observation, state.legal_action_mask, state.current_player

    def step(before: Any, key: jax.Array, params: Any) -> Any:
        draw, chance = jax.random.split(key)
        action = act(before, draw, params)
        keys = jax.random.split(chance, rows)
        after = jax.vmap(auto_reset(bare.step, bare.init))(before, action, keys)
        ends = after.terminated, after.truncated
        return after, (shown(before), action, shown(after), after.rewards, ends)

    return begin, step


def _against_scan(
    title: str,
    env: Any,
    begin: Any,
    step: Any,
    params: Any,
    steps: int,
    quick: bool,
    *,
    policy: Any = None,
    acts: str = "random actions",
    reference: str = "bare lax.scan",
) -> None:
    first = jax.jit(begin)(jax.random.PRNGKey(0))

    @jax.jit
    def scan(carry: Any, key: jax.Array, params: Any) -> Any:
        return jax.lax.scan(
            lambda carry, key: step(carry, key, params), carry, jax.random.split(key, steps)
        )

    env.set_seed(0)
    root = env.reset()
    compare(
        f"{title}, {acts}, {steps} steps in one program",
        {
            reference: lambda: jax.block_until_ready(scan(first, jax.random.PRNGKey(1), params)),
            "envkit unroll": lambda: env.unroll(root, steps, policy),
        },
        steps=env.numel() * steps,
        reference=reference,
        rounds=5 if quick else 7,
    )


# --------------------------------------------------------------- Craftax, XLand-MiniGrid, JaxMARL


def craftax(quick: bool) -> None:
    """Measure random runs of Craftax-Classic, symbols, x 256 against the library's own scan.

    The bare scan is ``vmap(env.step)`` of the env that resets nothing: the one that does makes a new world for every
    row at every step, and takes 200 times as long. What is recorded is that of `cartpole`.
    """
    from craftax.craftax_env import make_craftax_env_from_name

    from envkit import CraftaxEnv

    rows, steps, name = 256, (5 if quick else 20), "Craftax-Classic-Symbolic-v1"
    bare = make_craftax_env_from_name(name, auto_reset=False)
    params = bare.default_params

    def begin(key: jax.Array) -> Any:
        return jax.vmap(bare.reset, in_axes=(0, None))(jax.random.split(key, rows), params)

    def step(carry: Any, key: jax.Array, params: Any) -> Any:
        seen, state = carry
        act, draw = jax.random.split(key)
        action = jax.random.randint(act, (rows,), 0, bare.num_actions)
        following, state, reward, done, _ = jax.vmap(bare.step, in_axes=(0, 0, 0, None))(
            jax.random.split(draw, rows), state, action, params
        )
        return (following, state), (seen, action, following, reward, done)

    env = CraftaxEnv(name, batch_size=[rows], categorical_action_encoding=True)
    title = f"Craftax-Classic symbolic x{rows}"
    works = begin, step, params, steps, quick
    _against_scan(title, env, *works, reference="bare lax.scan without resets")


def grid(quick: bool) -> None:
    """Measure random runs of XLand-MiniGrid's Empty-8x8 x 1024 against the library's own scan, as `craftax` is."""
    from xminigrid.registration import make as make_grid
    from xminigrid.wrappers import GymAutoResetWrapper

    from envkit import XMiniGridEnv

    rows, steps, name = 1024, 100, "MiniGrid-Empty-8x8"
    grid_env, params = make_grid(name)
    bare = GymAutoResetWrapper(grid_env)

    def begin(key: jax.Array) -> Any:
        return jax.vmap(bare.reset, in_axes=(None, 0))(params, jax.random.split(key, rows))

    def step(before: Any, key: jax.Array, _: Any) -> Any:
        action = jax.random.randint(key, (rows,), 0, grid_env.num_actions(params))
        after = jax.vmap(bare.step, in_axes=(None, 0, 0))(params, before, action)
        ends = after.last() & (after.discount == 0), after.last() & (after.discount != 0)
        return after, (before.observation, action, after.observation, after.reward, *ends)

    env = XMiniGridEnv(name, batch_size=[rows], categorical_action_encoding=True)
    _against_scan(f"XLand-MiniGrid Empty-8x8 x{rows}", env, begin, step, None, steps, quick)


def team(quick: bool) -> None:
    """Measure runs of JaxMARL's simple_spread x 1024 against the library's own scan, as `craftax` is.

    With random actions, and with one torch policy for the group against the same network in JAX.
    """
    import jax.numpy as jnp
    import jaxmarl
    import torch
    from tensordict.nn import TensorDictModule

    from envkit import JaxMARLEnv, compile_policy

    rows, steps, name = 1024, (20 if quick else 100), "MPE_simple_spread_v3"
    bare = jaxmarl.make(name)
    agents = bare.agents

    def begin(key: jax.Array) -> Any:
        return jax.vmap(bare.reset)(jax.random.split(key, rows))

    def stepping(act: Callable[..., Any]) -> Callable[..., Any]:
        def step(carry: Any, key: jax.Array, params: Any) -> Any:
            seen, state = carry
            acting, draw = jax.random.split(key)
            action = act(params, jnp.stack([seen[agent] for agent in agents], 1), acting)
            given = {agent: action[:, number] for number, agent in enumerate(agents)}
            following, state, reward, done, _ = jax.vmap(bare.step)(
                jax.random.split(draw, rows), state, given
            )
            return (following, state), (seen, action, following, reward, done)

        return step

    def at_random(params: Any, seen: Any, key: jax.Array) -> Any:
        return jax.random.randint(key, (rows, len(agents)), 0, 5)

    def by_network(params: Any, seen: Any, key: jax.Array) -> Any:
        (weights, bias), (out, shift) = params
        return jnp.argmax(jnp.tanh(seen @ weights + bias) @ out + shift, -1)

    class Choice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(18, 64), torch.nn.Linear(64, 5)

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(observation))).argmax(-1)

    torch.manual_seed(0)
    network = Choice()
    params = [
        (jnp.asarray(layer.weight.detach().numpy().T), jnp.asarray(layer.bias.detach().numpy()))
        for layer in (network.first, network.last)
    ]
    policy = compile_policy(
        TensorDictModule(network, [("agent", "observation")], [("agent", "action")])
    )
    env = JaxMARLEnv(name, batch_size=[rows])
    title = f"JaxMARL simple_spread x{rows}"
    _against_scan(title, env, begin, stepping(at_random), None, steps, quick)
    works = stepping(by_network), params, steps, quick
    _against_scan(title, env, begin, *works, policy=policy, acts="a torch policy for the group")


# ------------------------------------------------------------------------- MuJoCo Playground, Brax


def playground(quick: bool) -> None:
    """Measure random runs of Playground's CartpoleBalance x 256 as one program against the library's own scan.

    The bare scan is ``vmap(env.step)`` and resets nothing; envkit resets what is done, and truncates.
    """
    from envkit import PlaygroundEnv

    rows, steps = 256, (20 if quick else 100)
    env = PlaygroundEnv("CartpoleBalance", batch_size=[rows], device="cpu")
    bare = env._env

    def begin(key: jax.Array) -> Any:
        return jax.vmap(bare.reset)(jax.random.split(key, rows))

    def step(before: Any, key: jax.Array, params: Any) -> Any:
        action = jax.random.uniform(key, (rows, bare.action_size), minval=-1.0, maxval=1.0)
        after = jax.vmap(bare.step)(before, action)
        return after, (before.obs, action, after.obs, after.reward, before.done, after.done)

    _against_scan(f"Playground CartpoleBalance x{rows}", env, begin, step, None, steps, quick)


def randomized(quick: bool) -> None:
    """Measure Brax's ant with a model of its own for every row against all rows with one."""
    from envkit import BraxEnv

    rows, steps = 1024, (5 if quick else 10)
    for backend in ("spring",) if quick else ("spring", "generalized"):
        works = {}
        cases: dict[str, Any] = {"one model": {}, "a model a row": {"randomize": _jittered}}
        for title, how in cases.items():
            env = BraxEnv("ant", backend=backend, batch_size=[rows], device="cpu", **how)
            env.set_seed(0)
            works[title] = partial(env.unroll, env.reset(), steps)
        compare(
            f"Brax ant {backend} x{rows}, mass of links and friction of geoms drawn per episode",
            works,
            steps=rows * steps,
            reference="one model",
            rounds=5 if quick else 7,
        )


def _jittered(key: jax.Array, system: Any) -> Any:
    of_links, of_geoms = jax.random.split(key)
    mass, friction = system.link.inertia.mass, system.geom_friction
    link = jax.random.uniform(of_links, mass.shape, minval=0.7, maxval=1.3)
    geom = jax.random.uniform(of_geoms, (friction.shape[0], 1), minval=0.7, maxval=1.3)
    return system.tree_replace({"link.inertia.mass": mass * link, "geom_friction": friction * geom})


WORKS = {
    "games": games,
    "control": one_env,
    "control in workers": in_workers,
    "cartpole": cartpole,
    "snake": snake,
    "craftax": craftax,
    "grid": grid,
    "team": team,
    "connect_four": connect_four,
    "self_play": self_play,
    "playground": playground,
    "randomized": randomized,
}


def main() -> None:
    """Run the works, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    parser.add_argument("--only", choices=WORKS, help="one of the works")
    options = parser.parse_args()
    for name, work in WORKS.items():
        if options.only in (None, name):
            work(options.quick)


if __name__ == "__main__":
    main()
