"""Stateless envs as the sub-envs of a batched env: rows carry their state, and their own keys."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from envkit import ParallelEnv, SerialEnv, StepCounter, TransformedEnv
from envkit.env.base import EnvBase
from envkit.specs import Categorical, Composite, Unbounded
from envkit_bridges.jax.jax_env import JaxEnv
from tests.zoo.jax_drift import Drift

F, T = False, True


class Drawn(EnvBase):
    """Its state is a key, of which it draws where an episode begins; it ends after two steps.

    Without a state to begin from, it counts keys up by itself. ``given`` are the entries that its
    last `_reset` was given.
    """

    _batch_locked = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        shape, entries = (*self.batch_size, 1), {}
        for name in ("key", "place", "steps"):
            entries[name] = Unbounded(shape, dtype=torch.int64)
        self.observation_spec = Composite(entries, shape=self.batch_size)
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Categorical(2, shape=shape)
        self.first = 0
        self.keys_seen: list[str] = []

    def _root(self, key: torch.Tensor) -> TensorDict:
        entries = {"key": key, "place": key * 7 % 1000, "steps": torch.zeros_like(key)}
        return TensorDict(entries, key.shape[:-1])

    def _reset(self, td, **kwargs):
        self.keys_seen = [] if td is None else sorted(map(str, td.keys()))
        if td is not None and td.get("key", None) is not None:
            return self._root(td["key"] * 3 + 1)
        self.first += 100
        shape = (*(self.batch_size if td is None else td.batch_size), 1)
        return self._root(torch.arange(torch.Size(shape).numel()).reshape(shape) + self.first)

    def _step(self, td):
        steps = td["steps"] + 1
        entries = {"key": td["key"], "place": td["place"] + td["action"], "steps": steps}
        entries.update(reward=torch.ones_like(steps).float(), done=steps >= 2)
        return TensorDict(entries, td.batch_size)

    def _set_seed(self, seed):
        self.first = seed


def counted() -> TransformedEnv:
    return TransformedEnv(Drawn(), StepCounter())


MAKERS = {"one": Drawn, "two": partial(Drawn, batch_size=[2]), "counted": counted}


def nonstop(env) -> list[TensorDict]:
    return [env.rollout(7, break_when_any_done=False)]


def one_by_one(env) -> list[TensorDict]:
    td, steps = env.reset(), []
    for _ in range(7):
        data, td = env.step_and_maybe_reset(acted(td))
        steps.append(data)
    return steps


def resets_with_data(env) -> list[TensorDict]:
    following = env.step_mdp(env.step(acted(env.reset())))
    return [env.reset(following.clone()), env.step(acted(env.reset(following)))]


def resets_without(env) -> list[TensorDict]:
    return [env.reset(), env.reset(), env.reset(TensorDict(batch_size=env.batch_size))]


def resets_of_one_row(env) -> list[TensorDict]:
    following = env.step_mdp(env.step(acted(env.reset())))
    mask = torch.zeros_like(following["done"])
    mask[1] = True
    with_data = env.reset(following.set("_reset", mask)).clone()
    return [with_data, env.reset(TensorDict({"_reset": mask}, env.batch_size))]


def resets_with_a_part_of_the_state(env) -> list[TensorDict]:
    return [env.reset(env.reset().select("key", "place"))]


def acted(td: TensorDict) -> TensorDict:
    return td.clone().set("action", torch.ones(*td.batch_size, 1, dtype=torch.int64))


SCENARIOS = [
    nonstop,
    one_by_one,
    resets_with_data,
    resets_without,
    resets_of_one_row,
    resets_with_a_part_of_the_state,
]


@pytest.fixture(scope="module", params=MAKERS)
def envs(request):
    """Give one batched env for each way to carry the data, plain `SerialEnv` first."""
    make = MAKERS[request.param]
    ways = [
        SerialEnv(3, make, use_buffers=False),
        SerialEnv(3, make, use_buffers=True),
        ParallelEnv(3, make, num_processes=2),
        ParallelEnv(3, make, num_processes=2, use_buffers=False),
    ]
    yield ways
    for env in ways:
        env.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_rows_draw_their_episodes_from_their_own_keys_whatever_carries_the_data(envs, scenario):
    results = []
    for env in envs:
        env.set_seed(5)
        results.append([td.exclude("action") for td in scenario(env)])

    for other in results[1:]:
        for expected, td in zip(results[0], other, strict=True):
            assert set(td.keys(True, True)) == set(expected.keys(True, True))
            assert (td == expected).all()


@pytest.mark.parametrize("use_buffers", [True, False])
def test_a_reset_of_everything_tells_a_row_nothing_of_what_was(use_buffers):
    env = SerialEnv(1, Drawn, use_buffers=use_buffers)
    env.step(acted(env.reset()))

    env.reset()

    assert env.keys_seen == [[]]


def test_cached_resets_of_rows_begin_where_the_row_began_first():
    make = partial(JaxEnv, Drift(), episode_length=2, reset_mode="cached")
    runs = []
    for use_buffers in (False, True):
        env = SerialEnv(2, make, use_buffers=use_buffers)
        env.set_seed(3)
        runs.append(env.rollout(6, break_when_any_done=False))

    begun = runs[0]["observation"][:, ::2, 0]
    assert (begun == begun[:, :1]).all()
    assert begun[0, 0] != begun[1, 0]
    for run in runs:
        run.pop("action")
    assert (runs[0]["observation"][:, ::2] == runs[1]["observation"][:, ::2]).all()
    assert (runs[0]["state"][:, ::2] == runs[1]["state"][:, ::2]).all()
