"""Transforms outside of programs, told of resets without the question whether there are any: the data is the same.

On a card the question waits; here reading on the CPU counts as waiting.
"""

from __future__ import annotations

import pytest
import torch

from envkit import (
    ActionScaling,
    CatFrames,
    ClipTransform,
    Compose,
    DTypeCastTransform,
    ObservationNorm,
    PermuteTransform,
    RandomTruncationTransform,
    RenameTransform,
    RewardSum,
    SignTransform,
    StepCounter,
    TargetReturn,
    TransformedEnv,
    UnsqueezeTransform,
)
from envkit.transforms.core import transform_stepping as transform_steps
from envkit.transforms.core.fusable import FusableTransform
from envkit_bridges.jax import engine
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.jax.test_order import HostReads, on_gpu
from tests.zoo.walkers import Walker

ROWS = 4


def clip():
    """A transform with a way in, so that it and all behind it run outside of programs."""
    return ClipTransform("place", None, "action", low=-0.5, high=0.5)


CHAINS = {
    "clip": lambda: [clip()],
    "scaling": lambda: [ActionScaling(loc=0.0, scale=2.0)],
    "cast": lambda: [DTypeCastTransform(torch.float32, torch.float64, "place", None, "action")],
    "norm": lambda: [ObservationNorm(0.1, 2.0, in_keys="place", in_keys_inv="action")],
    "rename": lambda: [RenameTransform("place", "seen", "action", "push")],
    "sign": lambda: [SignTransform("place", None, "action")],
    "shapes": lambda: [
        clip(),
        UnsqueezeTransform(-1, in_keys="place"),
        PermuteTransform((-1, -2), in_keys="place"),
    ],
    "memory": lambda: [StepCounter(), clip(), RewardSum(), CatFrames(2, -1, "place")],
    "return": lambda: [clip(), TargetReturn(3.0), StepCounter(step_count_key="count")],
}
IMPURE = {
    "a function": lambda: [clip(), lambda td: td],
    "more ends": lambda: [clip(), StepCounter(2)],
    "random ends": lambda: [clip(), StepCounter(), RandomTruncationTransform(1, 5)],
}


@pytest.fixture(scope="module", params=["cpu", on_gpu("cuda")])
def walker(request):
    return JaxEnv(Walker(), batch_size=[ROWS], episode_length=3, device=request.param)


def let_reading_wait(monkeypatch, waits):
    for module in (engine, transform_steps):
        monkeypatch.setattr(module, "reading_waits", lambda tensor: waits)


@pytest.fixture
def waiting(monkeypatch):
    let_reading_wait(monkeypatch, True)


def acted(env, td):
    (key,), spec = env.action_keys, env.action_spec
    push = torch.linspace(-0.9, 0.9, 2 * ROWS, dtype=spec.dtype, device=spec.device)
    return td.set(key, push.reshape(ROWS, 2))


def stepped(env, steps=8):
    """Make steps and the resets that follow them; gives each transition and each root."""
    env.set_seed(0)
    td, seen = env.reset(), []
    for _ in range(steps):
        data, td = env.step_and_maybe_reset(acted(env, td))
        seen += [data.clone(), td.clone()]
    return seen


def is_same(first, second):
    return set(first.keys(True, True)) == set(second.keys(True, True)) and (first == second).all()


@pytest.mark.parametrize("chain", [*CHAINS, *IMPURE])
def test_the_data_is_the_same(walker, chain, monkeypatch):
    make = (CHAINS | IMPURE)[chain]
    seen = []
    for waits in (False, True):
        let_reading_wait(monkeypatch, waits)
        seen.append(stepped(TransformedEnv(walker, Compose(*make()))))
    expected, found = seen

    assert any(step["next", "done"].any() for step in expected[::2])
    assert all(is_same(*pair) for pair in zip(expected, found, strict=True))


class Shifted(FusableTransform):
    """Changes what steps show, and nothing that resets show."""

    only_adds_done = True

    def step_leaves(self, root, following, constants):
        return {("place",): following["place",] + 1}


@pytest.mark.parametrize("waits", [False, True])
def test_rows_that_go_on_keep_what_transforms_made_of_their_step(waits, monkeypatch):
    env = JaxEnv(Walker(), batch_size=[ROWS], episode_length=9)
    let_reading_wait(monkeypatch, waits)
    seen = stepped(TransformedEnv(env, Compose(*CHAINS["scaling"](), Shifted())), 9)

    ended = torch.stack([step["next", "done"][:, 0] for step in seen[::2]])
    assert (ended.any(1) & ~ended.all(1)).any()  # some rows begin anew while others go on
    for data, root in zip(seen[::2], seen[1::2], strict=True):
        on = ~data["next", "done"][:, 0]
        assert torch.equal(root["place"][on], data["next", "place"][on])
        assert (root["place"][~on] < 1).all()


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("chain", CHAINS)
def test_no_flag_is_read(walker, chain):
    env = TransformedEnv(walker, Compose(*CHAINS[chain]()))
    stepped(env, 4)
    td = acted(env, env.reset())

    with HostReads() as reads:
        env.step_and_maybe_reset(td)

    assert reads.reads == []


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("chain", IMPURE)
def test_flags_are_read_where_a_reset_of_nothing_could_leave_a_trace(walker, chain):
    env = TransformedEnv(walker, Compose(*IMPURE[chain]()))
    td = acted(env, env.reset())

    with HostReads() as reads:
        env.step_and_maybe_reset(td)

    assert reads.reads


def test_a_promise_is_not_inherited():
    class Counting(ClipTransform):
        def _reset(self, td, td_reset):
            self.resets = getattr(self, "resets", 0) + 1
            return super()._reset(td, td_reset)

    assert clip().is_pure and not Counting("place", None, "action", low=0, high=1).is_pure
    assert StepCounter().is_pure and not type("Own", (StepCounter,), {"_reset": clip})().is_pure
