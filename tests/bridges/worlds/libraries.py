"""The libraries of stateless worlds: how each is built, and stepped by hand. One table for the contract of all.

Conventions
    equals  compares an env step by step with its library, see `bare`, and returns how many episodes ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.bridges.worlds.bare import assert_equals_bare


@dataclass(frozen=True)
class Library:
    """A library, and an env of it that tests step.

    Args:
        module: what `envkit_bridges` has of it.
        prefix: that of the names of its classes.
        name: the env that is stepped; ``options``: its keywords; ``steps``: how many, in which more than ``ends``
            episodes end.
        nearly: a name that there is not, close to one that there is.
        policy: the entries that it reads, and a module that chooses actions by them.
        steps_of: how many steps are compared of envs that take long.
        left_out: names that are not built here, and why.
    """

    module: Any
    prefix: str
    equals: Callable[[Any, int], int]
    name: str
    nearly: str
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 100
    ends: int = 0
    policy: tuple[list[str], Callable[[], torch.nn.Module]] | None = None
    steps_of: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def env(self) -> Any:
        return getattr(self.module, f"{self.prefix}Env")

    @property
    def wrapper(self) -> Any:
        return getattr(self.module, f"{self.prefix}Wrapper")

    def build(self, **others: Any) -> Any:
        return self.env(self.name, **{**self.options, **others})


INTEGERS = {"categorical_action_encoding": True}


def assert_equals_gymnax(env, steps):
    bare, params = env._env, env.params

    def reset(key, params):
        return {"observation": bare.reset_env(jax.random.split(key)[0], params)[0]}

    def step(state, action, params):
        key = jax.random.fold_in(state.draws, state.moves)
        seen, inner, reward, terminated, _ = bare.step_env(key, state.inner, action, params)
        truncated = bare.is_truncated(inner, params) & ~terminated
        moment = {"observation": seen, "reward": reward, "terminated": terminated}
        after = replace(state, inner=inner, moves=state.moves + 1)
        return after, {**moment, "truncated": truncated}

    resets = jax.jit(jax.vmap(reset, in_axes=(0, None)))
    steps_of = jax.jit(jax.vmap(step, in_axes=(0, 0, None)))
    return assert_equals_bare(
        env,
        steps,
        lambda keys: resets(keys, params),
        lambda state, action: steps_of(state, action, params),
    )


def assert_equals_jumanji(env, steps):
    bare = env._env

    def shown(timestep):
        last, over = timestep.last(), (timestep.discount == 0).all()
        return {
            "observation": timestep.observation,
            "reward": timestep.reward,
            "terminated": last & over,
            "truncated": last & ~over,
        }

    def reset(key):
        moment = shown(bare.reset(key)[1])
        return {"observation": moment["observation"]}

    def step(state, action):
        state, timestep = bare.step(state, action.astype(bare.action_spec.dtype))
        return state, shown(timestep)

    return assert_equals_bare(env, steps, jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step)))


def assert_equals_navix(env, steps):
    from navix import StepType
    from navix.rendering.cache import RenderingCache

    bare = env._env

    def reset(key):
        return {"observation": bare.reset(key).observation}

    def step(moment, action):
        whole = moment.state.replace(cache=RenderingCache.init(moment.state.grid))
        before = bare.reset(moment.state.key).replace(
            t=moment.t, state=whole, step_type=StepType.TRANSITION
        )
        after = bare.step(before, action)  # does not reset: no episode has ended
        state = after.state.replace(cache=moment.state.cache)
        shown = {
            "observation": after.observation,
            "reward": after.reward,
            "terminated": after.is_termination(),
            "truncated": after.is_truncation(),
        }
        return type(moment)(state, after.t), shown

    return assert_equals_bare(env, steps, jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step)))


def assert_equals_craftax(env, steps):
    bare, params = env._env, env.params

    def reset(key, params):
        return {"observation": {"observation": bare.reset_env(jax.random.split(key)[0], params)[0]}}

    def step(state, action, params):
        key = jax.random.fold_in(state.draws, state.moves)
        seen, inner, reward, done, infos = bare.step_env(key, state.inner, action, params)
        ends = {"terminated": done, "truncated": done & False}  # none lives so long
        observation = {"observation": seen}
        if env._shows_metrics:
            observation["metrics"] = infos
        after = replace(state, inner=inner, moves=state.moves + 1)
        return after, {"observation": observation, "reward": reward, **ends}

    resets = jax.jit(jax.vmap(reset, in_axes=(0, None)))
    steps_of = jax.jit(jax.vmap(step, in_axes=(0, 0, None)))
    return assert_equals_bare(
        env,
        steps,
        lambda keys: resets(keys, params),
        lambda state, action: steps_of(state, action, params),
    )


def assert_equals_xminigrid(env, steps):
    from xminigrid.types import TimeStep

    bare, params = env._env, env.params

    def shown(moment):
        last, over = moment.last(), moment.discount == 0
        ends = {"terminated": last & over, "truncated": last & ~over}
        return {"observation": moment.observation, "reward": moment.reward, **ends}

    def reset(key):
        return {"observation": bare.reset(params, key).observation}

    def step(state, action):
        zero = jnp.float32(0)
        before = TimeStep(state=state, step_type=zero, reward=zero, discount=zero, observation=zero)
        moment = bare.step(params, before, action)
        return moment.state, shown(moment)

    return assert_equals_bare(env, steps, jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step)))


def assert_equals_pgx(env, steps):
    bare = env._env

    def seen(state, is_illegal):
        return {
            "observation": state.observation,
            "action_mask": state.legal_action_mask,
            "current_player": state.current_player,
            "illegal_action": is_illegal[None],
        }

    def reset(key):
        return {"observation": seen(bare.init(jax.random.split(key)[0]), jnp.bool_(False))}

    def step(state, action):
        before = state.inner
        after = bare.step(before, action, jax.random.fold_in(state.draws, state.moves))
        moment = {
            "observation": seen(after, ~before.legal_action_mask[action]),
            "reward": after.rewards[before.current_player],
            "player_reward": after.rewards,
            "terminated": after.terminated,
            "truncated": after.truncated,
        }
        return state.after(after.replace(observation=None)), moment

    def wide(moment):
        players = np.asarray(moment["observation"]["current_player"]).astype(np.int64)
        return {**moment, "observation": {**moment["observation"], "current_player": players}}

    resets, steps_of = jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step))

    def wide_step(state, action):
        state, moment = steps_of(state, action)
        return state, wide(moment)

    return assert_equals_bare(env, steps, lambda keys: wide(resets(keys)), wide_step)


def assert_equals_jaxmarl(env, steps):
    bare, groups = env._env, env.group_map
    names = env._core.names

    def part(tree, name):
        agent = bare.agents[names.index(name)]
        if isinstance(tree, dict) and agent in tree:
            return tree[agent]
        if isinstance(tree, tuple):
            return tree[names.index(name)]
        count = len(names)
        number = names.index(name)
        return jax.tree.map(lambda leaf: leaf[number] if leaf.shape[:1] == (count,) else leaf, tree)

    def together(tree, agents):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *[part(tree, a) for a in agents])

    def shown(observed):
        return {
            group: {"observation": together(observed, agents)} for group, agents in groups.items()
        }

    def reset(key):
        return {"observation": shown(bare.reset(jax.random.split(key)[0])[0])}

    def step(state, actions):
        given = {
            bare.agents[names.index(name)]: actions[group]["action"][place]
            for group, agents in groups.items()
            for place, name in enumerate(agents)
        }
        key = jax.random.fold_in(state.draws, state.moves)
        observed, inner, rewards, dones, _ = bare.step_env(
            key, state.inner, {agent: given[agent] for agent in bare.agents}
        )
        over = jnp.asarray(dones["__all__"], bool).reshape(())
        moment = {"observation": shown(observed)}
        paid = {group: {"reward": together(rewards, agents)} for group, agents in groups.items()}
        moment["rewards"] = paid
        own = [dones.get(a, dones.get(n, over)) for a, n in zip(bare.agents, names, strict=True)]
        ended = jnp.stack([jnp.asarray(flag, bool).reshape(()) for flag in own]) | state.ended
        late = over & (env._core.limit is not None) & (state.moves + 1 >= (env._core.limit or 0))
        moment |= {"terminated": over & ~late, "truncated": over & late}
        after = state.after(inner)
        return type(state)(inner, after.draws, after.moves, ended), moment

    return assert_equals_bare(
        env, steps, jax.jit(jax.vmap(reset)), jax.jit(jax.vmap(step)), close=True
    )


# -------------------------------------------------------------------------------------------- policies


class Leaning(torch.nn.Module):
    """Push to the side to which the pole falls."""

    def forward(self, observation):
        return (observation[..., 2] + observation[..., 3] > 0).long()


class Allowed(torch.nn.Module):
    """Choose by the picture among what a mask allows."""

    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Linear(5, 4).requires_grad_(False)

    def forward(self, grid, mask):
        return torch.where(mask, self.scores(grid.mean((-3, -2))), -torch.inf).argmax(-1)


class Constant(torch.nn.Module):
    """Do the same in every step."""

    def __init__(self, option: int, axes: int):
        super().__init__()
        self.option, self.axes = option, axes

    def forward(self, observation):
        return observation.flatten(-self.axes)[..., 0].long() * 0 + self.option


# ------------------------------------------------------------------------------------------- the table


# fmt: off
def gymnax() -> Library:
    from envkit_bridges.worlds import gymnax as module

    fetched = dict.fromkeys(module.fetching_names(), "its pictures are fetched")
    return Library(module, "Gymnax", assert_equals_gymnax, "CartPole-v1", "CartPol-v1", {"batch_size": [4], **INTEGERS},
                   ends=10, policy=(["observation"], Leaning), left_out=fetched)


def jumanji() -> Library:
    from envkit_bridges.worlds import jumanji as module

    fetched = dict.fromkeys(module.fetching_names(), "its levels are fetched")
    steps = dict.fromkeys(("BinPack-v2", "MMST-v0", "FlatPack-v0", "JobShop-v0"), 20)
    return Library(module, "Jumanji", assert_equals_jumanji, "Snake-v1", "Snak-v1", {"batch_size": [4]},
                   ends=10, policy=(["grid", "action_mask"], Allowed), steps_of=steps, left_out=fetched)


def navix() -> Library:
    pytest.importorskip("navix", reason="needs the extra navix")
    from envkit_bridges.worlds import navix as module

    return Library(module, "Navix", assert_equals_navix, "Navix-Empty-5x5-v0", "Navix-Empty-7x7-v0",
                   {"batch_size": [4], "metrics": True, **INTEGERS}, 20, -1, (["observation"], lambda: Constant(2, 3)))


def craftax() -> Library:
    from envkit_bridges.worlds import craftax as module

    return Library(module, "Craftax", assert_equals_craftax, "Craftax-Classic-Symbolic-v1", "Craftax-Symbolic",
                   {"batch_size": [2], "metrics": True, **INTEGERS}, 200, 0, (["observation"], lambda: Constant(5, 1)))


def xminigrid() -> Library:
    from envkit_bridges.worlds import xminigrid as module

    return Library(module, "XMiniGrid", assert_equals_xminigrid, "MiniGrid-Empty-8x8", "MiniGrid-Empty-7x7",
                   {"batch_size": [4], **INTEGERS}, 20, -1, (["observation"], lambda: Constant(0, 3)))


def pgx() -> Library:
    from envkit_bridges.worlds import pgx as module

    return Library(module, "Pgx", assert_equals_pgx, "tic_tac_toe", "tic_tac_to", {"batch_size": [4]}, 40, 10)


def jaxmarl() -> Library:
    from envkit_bridges.worlds import jaxmarl as module

    slowest = ("ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3")
    own = {"LearnedPolicyEnemySMAX": "it is made with a policy of the user's own"}
    return Library(module, "JaxMARL", assert_equals_jaxmarl, "MPE_simple_spread_v3", "MPE_simple_spread",
                   {"batch_size": [2]}, 30, 1, steps_of=dict.fromkeys(slowest, 10), left_out=own)
# fmt: on


LIBRARIES = {of.__name__: of for of in (gymnax, jumanji, navix, craftax, xminigrid, pgx, jaxmarl)}


@cache
def shared(library: str) -> tuple[Library, Any]:
    """Return a library, and its env, which is built once."""
    one = LIBRARIES[library]()
    return one, one.build()
