"""Transforms of several `TransformedEnv`, one around the other: the data of one chain.

What is compared with is one `Compose` of the same transforms and one more, which does nothing and keeps all of them
from programs and rows, around the same simulators.

Conventions
    groups  names of `PIECES`, innermost env first: each group is the `Compose` of one `TransformedEnv`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase

from envkit import (
    AsyncEnvPool,
    CatFrames,
    ClipTransform,
    Compose,
    ConditionalSkip,
    DTypeCastTransform,
    EnvBase,
    ExcludeTransform,
    FrameSkipTransform,
    GymWrapper,
    InitTracker,
    MixedEnv,
    ObservationNorm,
    ParallelEnv,
    RenameTransform,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SerialEnv,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TimeMaxPool,
    Transform,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    VecNorm,
)
from envkit.errors import EnvkitError
from envkit_bridges.jax.jax_env import JaxEnv
from tests.bridges.compare import assert_same
from tests.zoo.transforms import Opaque, StatelessWalk, Walk
from tests.zoo.walkers import Walker

Groups = Sequence[Sequence[str]]

PIECES: dict[str, Callable[[], Transform]] = {
    # several that remember under one name
    "count": partial(StepCounter, 4),
    "count longer": partial(StepCounter, 6),
    "sum": RewardSum,
    "sum again": RewardSum,
    "frames": partial(CatFrames, 2, -1, ["place"], ["frames"]),
    "frames again": partial(CatFrames, 3, -1, ["place"], ["frames"]),
    "farthest": partial(TimeMaxPool, ["place"], ["place"], 2),
    "target": partial(TargetReturn, 3.0),
    "begun": InitTracker,
    "primer": partial(TensorDictPrimer, mem=Unbounded((1,)), default_value=2.0),
    # that change what is shown of it
    "scale": partial(RewardScaling, 0.5, 2.0),
    "rename count": partial(RenameTransform, ["step_count"], ["n"]),
    "rename sum": partial(RenameTransform, ["episode_reward"], ["raw_return"]),
    "sum as count": partial(RenameTransform, ["episode_reward"], ["step_count"]),
    "exclude count": partial(ExcludeTransform, "step_count"),
    "exclude sum": partial(ExcludeTransform, "episode_reward"),
    "select": partial(SelectTransform, "place", "step_count"),
    "cast count": partial(DTypeCastTransform, torch.int64, torch.float32, ["step_count"]),
    "clip count": partial(ClipTransform, ["step_count"], high=2),
    "norm sum": partial(ObservationNorm, 0.5, 2.0, ["episode_reward"]),
    "norm frames": partial(ObservationNorm, 0.5, 2.0, ["frames"]),
    "unsqueeze sum": partial(UnsqueezeTransform, -1, in_keys=["episode_reward"]),
    # that do not run on rows, nor in programs
    "skip": partial(FrameSkipTransform, 2),
    "opaque": Opaque,
}


def behind(env: EnvBase, groups: Groups, *more: Transform) -> EnvBase:
    """Stand one `TransformedEnv` around the other, the last one with transforms more."""
    for number, group in enumerate(groups, 1):
        last = more if number == len(groups) else ()
        env = TransformedEnv(env, Compose(*(PIECES[name]() for name in group), *last))
    return env


def walk() -> EnvBase:
    return GymWrapper(Walk())


def walk_behind(groups: Groups, *more: Callable[[], Transform]) -> EnvBase:
    return behind(walk(), groups, *(make() for make in more))


def two_pools(make: Callable[[], EnvBase]) -> EnvBase:
    return MixedEnv([SerialEnv(1, make), SerialEnv(1, make)])


def split(pool: Callable[..., EnvBase]) -> Callable[[Groups], EnvBase]:
    """Give the envs of a pool the first group, and stand the others around it."""
    return lambda groups: behind(pool(partial(walk_behind, groups[:1])), groups[1:])


def walkers(rows: int | None = 2) -> JaxEnv:
    return JaxEnv(
        Walker(), batch_size=[] if rows is None else [rows], device="cpu", episode_length=6
    )


serial = partial(SerialEnv, 2)
parallel = partial(ParallelEnv, 2, num_processes=1)
WAYS: dict[str, tuple[Callable[[Groups], EnvBase], Callable[..., EnvBase]]] = {
    # the nested env, and what the one chain stands around
    "alone": (walk_behind, walk),
    "in a pool": (lambda groups: serial(partial(walk_behind, groups)), partial(serial, walk)),
    "in a pool without buffers": (
        lambda groups: serial(partial(walk_behind, groups), use_buffers=False),
        partial(serial, walk),
    ),
    "around a pool": (lambda groups: behind(serial(walk), groups), partial(serial, walk)),
    "in a pool and around it": (split(serial), partial(serial, walk)),
    "in a mixed env and around it": (split(two_pools), partial(two_pools, walk)),
}
COSTLY = {
    "in a process": (lambda groups: parallel(partial(walk_behind, groups)), partial(serial, walk)),
    "in a process and around it": (split(parallel), partial(serial, walk)),
    "in an asynchronous pool": (
        lambda groups: AsyncEnvPool([partial(walk_behind, groups)] * 2),
        partial(serial, walk),
    ),
    "around programs": (lambda groups: behind(walkers(), [["opaque"], *groups]), walkers),
    "in programs": (lambda groups: behind(walkers(), groups), walkers),
    "in rows of programs": (
        lambda groups: serial(lambda: behind(walkers(None), groups), use_buffers=True),
        lambda: serial(partial(walkers, None), use_buffers=False),
    ),
}


def played(env: EnvBase, steps: int = 8) -> Iterator[TensorDictBase]:
    """Run, step with and without masks, reset in part, go on; gives all that was shown."""
    env.set_seed(3)
    spec, generator = env.full_action_spec["action"], torch.Generator().manual_seed(0)
    rows = torch.arange(env.numel()).reshape(env.batch_size)

    def act(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", spec.rand((), generator))

    yield env.rollout(steps, act, break_when_any_done=False)
    root = env.reset()
    for turn in range(steps):
        if env.batch_size and turn % 3 == 1:
            root["_step"] = rows != turn % len(rows)
        data, root = env.step_and_maybe_reset(act(root))
        yield data.clone()
        yield root.clone()
        if turn % 5 == 4:
            root["_reset"] = (rows % 2 == 0)[..., None]
            root = env.reset(root)
            yield root.clone()
    yield env.rollout(steps, act, break_when_any_done=False, auto_reset=False, tensordict=root)
    yield env.rollout(steps, act)


NOT_SHOWN = ("_memory", "_memory_2", "_memory_3", "env_index")
"""Where memory travels, and the numbers that an asynchronous pool gives its rows."""


def one_chain(base: EnvBase, groups: Groups) -> EnvBase:
    return behind(base, [[name for group in groups for name in group]], Opaque())


def assert_one_chain(nested: EnvBase, one: EnvBase) -> None:
    for here, there in zip(played(nested), played(one), strict=True):
        assert_same(here, there, without=NOT_SHOWN)


some = st.lists(st.sampled_from(list(PIECES)), max_size=3)
first = ("count", "sum", "frames", "count longer")
remembering = st.lists(st.sampled_from(first), min_size=1, max_size=3)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=4)
@given(groups=st.tuples(remembering, some, some))
def test_a_chain_around_a_chain_gives_what_one_chain_gives(way, groups):
    nested, base = WAYS[way]
    one = one_chain(base(), groups)
    try:
        one.fake_tensordict()
    except EnvkitError:  # a transform lacks what another one has taken away
        assume(False)

    assert_one_chain(nested(groups), one)


GROUPS = {
    "of one name": [["sum", "count"], ["rename sum", "scale", "sum", "count longer"]],
    "changed outside": [["count", "sum", "frames"], ["cast count", "norm sum"], ["norm frames"]],
    "left out": [["count", "sum"], ["exclude count", "rename sum"], ["sum", "count longer"]],
    "stepped by a transform": [["count", "sum"], ["rename count", "opaque", "skip"]],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("way", [*WAYS, *(pytest.param(w, marks=pytest.mark.slow) for w in COSTLY)])
def test_memory_of_one_name_in_several_chains_is_that_of_each(way, groups):
    nested, base = {**WAYS, **COSTLY}[way]
    env = nested(groups)

    assert_one_chain(env, one_chain(base(), groups))

    env.close(raise_if_closed=False)


def left_out(td: TensorDictBase) -> torch.Tensor:
    return td["place"][..., 0] > 0


STATELESS = (
    lambda groups: behind(StatelessWalk(batch_size=[2]), groups),
    partial(StatelessWalk, batch_size=[2]),
)


@pytest.mark.parametrize("around", [["begun", "count"], ["opaque", "begun", "sum"]])
@pytest.mark.parametrize(
    ("nested", "base"), [WAYS["alone"], WAYS["around a pool"], WAYS["in a pool"], STATELESS]
)
def test_rows_that_an_inner_chain_leaves_out_stand_still_for_an_outer_one(
    nested, base, around, monkeypatch
):
    monkeypatch.setitem(PIECES, "leave out", lambda: ConditionalSkip(left_out))
    groups = [["leave out"], around, ["target"]]

    assert_one_chain(nested(groups), one_chain(base(), groups))


def seen_on_rows(env: Any) -> bool:
    return env.core_around_rows() is not None


@pytest.mark.parametrize("around", [["begun", "sum", "target"], ["norm", "frames"]])
def test_statistics_of_an_inner_chain_follow_the_rows_of_a_pool(around, monkeypatch):
    monkeypatch.setitem(PIECES, "norm", partial(VecNorm, ["place"], decay=0.9))
    env = behind(serial(walk), [["norm"], around])
    one = one_chain(serial(walk), [["norm"], around])

    assert seen_on_rows(env) and not seen_on_rows(one)
    assert_one_chain(env, one)


def test_rows_that_an_outer_chain_ends_are_counted_by_an_inner_one_after_the_others(monkeypatch):
    monkeypatch.setitem(PIECES, "norm", partial(VecNorm, ["place"], decay=0.9))

    def nested(*more: str) -> EnvBase:
        return behind(serial(walk), [["norm"], [*more, "count"]])

    assert not seen_on_rows(nested())
    for here, there in zip(played(nested()), played(nested("opaque")), strict=True):
        assert_same(here, there)


def test_each_of_two_chains_sums_its_own_rewards():
    inner = behind(walk(), [["count", "sum"]])
    env = behind(inner, [["rename sum", "scale", "sum"]])
    env.set_seed(0)

    data = env.rollout(20, break_when_any_done=False)["next"]

    length = torch.where(data["done"])[0][0] + 1
    paid = (data["reward"][:length] - 0.5) / 2.0
    assert torch.allclose(data["raw_return"][:length], paid.cumsum(0))
    assert torch.allclose(data["episode_reward"][:length], data["reward"][:length].cumsum(0))
    assert data["step_count"][:length].flatten().tolist() == list(range(1, length + 1))
