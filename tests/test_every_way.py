"""Every kind of env, run in every way there is, gives the same data from the same seed.

The measure is the bare env, stepped by hand. Whatever runs it instead shows the same root and the same `next`
of every step: bit for bit, since no way changes the number of rows that are computed together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import (
    MixedEnv,
    MultiThreadedEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from envkit.env.base import EnvBase
from envkit_bridges.gym.gym_env import GymEnv
from envkit_bridges.jax.policy.jax_policy import JaxPolicy
from envkit_bridges.worlds.brax import BraxEnv
from tests.zoo.jax_trail import following, jax_trail
from tests.zoo.kinds import Follow, make_gym, make_vector
from tests.zoo.trail import TrailBatch, TrailData, TrailEnv

SEED, STEPS = 5, 12

# ------------------------------------------------------------------------------------------- kinds


@dataclass(frozen=True)
class Kind:
    """An env and what acts in it: a function of an env that gives a policy, and the same in JAX."""

    make: Callable[[], EnvBase]
    policy: Callable[[EnvBase], Any] = Follow
    in_jax: JaxPolicy | None = None


def upright(env: EnvBase) -> Any:
    """Push the cart to where the pole leans."""

    def act(td: TensorDictBase) -> TensorDictBase:
        right = td["observation"][..., 2] > 0
        return td.set("action", torch.stack([~right, right], -1).to(env.action_spec.dtype))

    return act


def halved(env: EnvBase) -> Any:
    return lambda td: td.set("action", (td["observation"][..., :1] / 64).clamp(-1, 1))


def _halved(params: Any, observation: Any, key: Any) -> Any:
    return jnp.clip(observation[..., :1] / 64, -1, 1)


KINDS = {
    "gymnasium": Kind(make_gym),
    "cartpole": Kind(partial(GymEnv, "CartPole-v1", max_episode_steps=7), upright),
    "gymnasium vector": Kind(make_vector),
    "envpool": Kind(
        partial(
            MultiThreadedEnv,
            *(3, "CartPole-v1"),
            create_env_kwargs={"max_episode_steps": 7},
            categorical_action_encoding=False,
        ),
        upright,
    ),
    "custom": Kind(TrailEnv),
    "custom batch": Kind(TrailBatch),
    "custom stateless": Kind(partial(TrailData, batch_size=[3])),
    "jax": Kind(jax_trail, in_jax=following),
    "jax nested": Kind(partial(jax_trail, state_layout="nested"), in_jax=following),
    "brax": Kind(
        partial(BraxEnv, "fast", batch_size=[3], device="cpu", episode_length=5),
        halved,
        JaxPolicy(_halved),
    ),
}

# -------------------------------------------------------------------------------------------- ways

Run = tuple[TensorDictBase, list[int]]
"""Data of batch size (envs, *batch, time), and the seed of each of the envs."""


class Shelf:
    """Builds each env once, and the measure of each kind and seed."""

    def __init__(self):
        self._envs: dict[Any, EnvBase] = {}
        self._measures: dict[Any, TensorDictBase] = {}

    def env(self, *place: Any, make: Callable[[], EnvBase]) -> EnvBase:
        if place not in self._envs:
            self._envs[place] = make()
        return self._envs[place]

    def bare(self, name: str) -> EnvBase:
        return self.env(name, make=KINDS[name].make)

    def measure(self, name: str, seed: int) -> TensorDictBase:
        """Step the bare env by hand, one call after the other."""
        if (name, seed) not in self._measures:
            env = self.bare(name)
            act, steps = KINDS[name].policy(env), []
            env.set_seed(seed)
            td = env.reset()
            for _ in range(STEPS):
                td = env.step(act(td))
                steps.append(td.clone())
                td = env.maybe_reset(env.step_mdp(td))
            self._measures[name, seed] = torch.stack(steps, len(env.batch_size))
        return self._measures[name, seed]

    def close(self) -> None:
        for env in self._envs.values():
            env.close(raise_if_closed=False)


def advance(name: str, shelf: Shelf) -> Run:
    env = shelf.bare(name)
    act, steps = KINDS[name].policy(env), []
    env.set_seed(SEED)
    td = env.reset()
    for _ in range(STEPS):
        data, td = env.step_and_maybe_reset(act(td))
        steps.append(data)
    return torch.stack(steps, len(env.batch_size))[None], [SEED]


def rollout(name: str, shelf: Shelf, **stop: bool) -> Run:
    env = shelf.bare(name)
    env.set_seed(SEED)
    return env.rollout(STEPS, KINDS[name].policy(env), **stop)[None], [SEED]


def compiled_rollout(name: str, shelf: Shelf, **stop: bool) -> Run:
    env = shelf.bare(name)
    env.set_seed(SEED)
    return env.rollout(STEPS, KINDS[name].in_jax, **stop)[None], [SEED]


def unrolled(name: str, shelf: Shelf) -> Run:
    env = shelf.bare(name)
    env.set_seed(SEED)
    return env.unroll(env.reset(), STEPS, KINDS[name].in_jax)[0][None], [SEED]


def many(name: str, shelf: Shelf, make: Callable[[Any], EnvBase]) -> Run:
    """Two of them in a batched env; the seeds of the second one begin where those of the first one end."""
    env = shelf.env(name, make, make=lambda: make(KINDS[name].make))
    env.set_seed(SEED)
    data = env.rollout(STEPS, KINDS[name].policy(env), break_when_any_done=False)
    return data, [SEED, shelf.bare(name).set_seed(SEED)]


def in_mixed(name: str, shelf: Shelf) -> Run:
    bare = shelf.bare(name)
    wrap = (lambda make: SerialEnv(1, make)) if not bare.batch_size else (lambda make: make())
    env = shelf.env(name, "mixed", make=lambda: MixedEnv([wrap(KINDS[name].make) for _ in "12"]))
    env.set_seed(SEED)
    data = env.rollout(STEPS, KINDS[name].policy(env), break_when_any_done=False)
    return data.reshape(2, *bare.batch_size, STEPS), [SEED, bare.set_seed(SEED)]


def counted(env: EnvBase) -> EnvBase:
    return TransformedEnv(env, StepCounter()).append_transform(RewardSum())


def transformed(name: str, shelf: Shelf) -> Run:
    env = shelf.env(name, "transformed", make=lambda: counted(KINDS[name].make()))
    env.set_seed(SEED)
    data = env.rollout(STEPS, KINDS[name].policy(env), break_when_any_done=False)
    return data[None], [SEED]


def serial(make: Any) -> EnvBase:
    return SerialEnv(2, make)


def serial_rows(make: Any) -> EnvBase:
    return SerialEnv(2, make, use_buffers=True)


def serial_tensordicts(make: Any) -> EnvBase:
    return SerialEnv(2, make, use_buffers=False)


def parallel(make: Any) -> EnvBase:
    return ParallelEnv(2, make, num_processes=1)


def serial_transformed(make: Any) -> EnvBase:
    return SerialEnv(2, lambda: counted(make()))


def transformed_serial(make: Any) -> EnvBase:
    return counted(SerialEnv(2, make))


WAYS: dict[str, Callable[[str, Shelf], Run]] = {
    "step and maybe reset": advance,
    "rollout": partial(rollout, break_when_any_done=False),
    "rollout until any is done": rollout,
    "rollout until all are done": partial(rollout, break_when_all_done=True),
    "compiled rollout": partial(compiled_rollout, break_when_any_done=False),
    "compiled rollout until any is done": compiled_rollout,
    "compiled rollout until all are done": partial(compiled_rollout, break_when_all_done=True),
    "unroll": unrolled,
    "in SerialEnv": partial(many, make=serial),
    "in SerialEnv, rows": partial(many, make=serial_rows),
    "in SerialEnv, tensordicts": partial(many, make=serial_tensordicts),
    "in ParallelEnv": partial(many, make=parallel),
    "in MixedEnv": in_mixed,
    "under transforms": transformed,
    "under transforms, in SerialEnv": partial(many, make=serial_transformed),
    "in SerialEnv, under transforms": partial(many, make=transformed_serial),
}

STOPS = {way: way.split()[-3] for way in WAYS if "until" in way}  # any or all
STATELESS = {"jax", "jax nested", "brax"}
COMPILED = [way for way in WAYS if "compiled" in way or way == "unroll"]
IMPOSSIBLE = {
    (kind, way): "only a JaxEnv runs as one program"
    for kind in KINDS.keys() - STATELESS
    for way in COMPILED
}
SLOW = {  # each sub-env compiles for itself
    (kind, way)
    for kind in ("jax nested", "brax")
    for way in WAYS
    if "SerialEnv" in way or "ParallelEnv" in way
} | {
    ("envpool", "in ParallelEnv"),  # starts a process
    ("jax", "in ParallelEnv"),
    ("jax", "under transforms, in SerialEnv"),
}

# -------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.close()


def shown(td: TensorDictBase, wanted: TensorDictBase) -> TensorDict:
    """Take the entries of the game: not those that transforms add, nor the state, which `unroll` leaves out."""
    names = [key for key in wanted.keys(True, True) if not {"state", "game"} & {key, *key}]
    return td.select(*names)


def cells() -> Iterator[Any]:
    for kind in KINDS:
        for way in WAYS:
            if (kind, way) not in IMPOSSIBLE:
                marks = pytest.mark.slow if (kind, way) in SLOW else ()
                yield pytest.param(kind, way, id=f"{kind}-{way}", marks=marks)


@pytest.mark.parametrize(("kind", "way"), list(cells()))
def test_the_same_seed_gives_the_same_data(shelf, kind, way):
    data, seeds = WAYS[way](kind, shelf)

    assert len(data) == len(seeds)
    for one, seed in zip(data, seeds, strict=True):
        steps = one.shape[-1]
        measure = shelf.measure(kind, seed)
        ended = measure["next", "done"][..., 0]
        alike = shown(one, measure) == shown(measure[..., :steps], measure)
        if STOPS.get(way) == "any":
            assert ended[..., :steps].any() and not ended[..., : steps - 1].any()
        elif STOPS.get(way) == "all":
            assert ended[..., :steps].any(-1).all()
            waits = ended[..., :steps].cumsum(-1) - ended[..., :steps].int() > 0
            assert not one["next", "reward"][waits].any()
            assert one["next", "done"][waits].all()
            alike = alike[~waits]
        else:
            assert steps == STEPS
        unlike = [key for key in alike.keys(True, True) if not alike[key].all()]
        assert not unlike, f"what seed {seed} gives"
