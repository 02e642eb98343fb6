"""Kinds of sub-envs: transformed, batched themselves, of several done levels, written in JAX."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from envkit import EnvCreator, ParallelEnv, SerialEnv, check_env_specs
from envkit.env.base import EnvBase
from envkit.specs import Bounded, Categorical, Composite, NonTensor, Unbounded
from envkit.transforms.core.transformed_env import TransformedEnv
from envkit.transforms.episodes import StepCounter, TrajCounter
from envkit.transforms.flow import ConditionalSkip, RemoveEmptySpecs
from envkit.transforms.returns import RewardSum
from tests.zoo.envs import Count

F, T = False, True
ON_BOTH = {"serial": SerialEnv, "parallel": partial(ParallelEnv, num_processes=2)}
WAYS = {
    "serial": SerialEnv,
    "serial rows": partial(SerialEnv, use_buffers=True),
    "parallel": partial(ParallelEnv, num_processes=2),
    "parallel pipes": partial(ParallelEnv, num_processes=2, use_buffers=False),
}
in_all_ways = pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)


def is_equal(left: TensorDict, right: TensorDict) -> bool:
    return set(left.keys(True, True)) == set(right.keys(True, True)) and bool((left == right).all())


# ------------------------------------------------------------------------------------ transformed


def counted(n: int) -> TransformedEnv:
    env = TransformedEnv(Count(n))
    env.append_transform(StepCounter())
    return env.append_transform(RewardSum())


@in_all_ways
def test_transformed_sub_envs_keep_what_their_transforms_remember(make):
    env = make(2, [partial(counted, 2), partial(counted, 4)])

    check_env_specs(env)
    data = env.rollout(5, break_when_any_done=False)
    frozen = env.rollout(9, break_when_all_done=True)
    names = list(env.maxs)
    env.close()

    assert data["next", "step_count"].squeeze(-1).tolist() == [[1, 2, 1, 2, 1], [1, 2, 3, 4, 1]]
    assert data["step_count"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 0]]
    assert data["next", "episode_reward"][1].flatten().tolist() == [1, 2, 3, 4, 1]
    assert frozen["next", "step_count"][0].flatten().tolist() == [1, 2, 2, 2]
    assert names == [2, 4]


class EverySecond:
    """A condition that tells the first of two envs to skip every second call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, td):
        self.calls += 1
        skips = self.calls % 2 == 0
        return torch.tensor([skips, False]) if td.batch_size else skips


@in_all_ways
def test_a_skip_decided_outside_reaches_the_sub_envs(make):
    base = make(2, partial(Count, 99))
    env = TransformedEnv(base, ConditionalSkip(EverySecond()))

    data = env.rollout(6)
    taken = list(base.steps)
    base.close()

    assert data["next", "count"].squeeze(-1).tolist() == [[1, 1, 2, 2, 3, 3], [1, 2, 3, 4, 5, 6]]
    assert taken == [3, 6]


@in_all_ways
def test_a_skip_decided_inside_leaves_the_simulator_alone(make):
    env = make(2, lambda: TransformedEnv(Count(99), ConditionalSkip(EverySecond())))

    data = env.rollout(6)
    taken = list(env.steps)
    env.close()

    assert data["next", "count"].squeeze(-1).tolist() == [[1, 1, 2, 2, 3, 3]] * 2
    assert data["next", "reward"].squeeze(-1).tolist() == [[1, 0, 1, 0, 1, 0]] * 2
    assert taken == [3, 3]


class Hollow(Count):
    """Declares and returns a node without leaves."""

    def __init__(self):
        super().__init__(9)
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int64), hollow=Composite()
        )

    def _out(self):
        return super()._out().set("hollow", TensorDict({}))


@in_all_ways
def test_the_advice_about_empty_nodes_works(make):
    env = make(2, lambda: TransformedEnv(Hollow(), RemoveEmptySpecs()))

    data = env.rollout(3)
    env.close()

    assert data["next", "count"].squeeze(-1).tolist() == [[1, 2, 3]] * 2


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_trajectories_of_all_workers_are_numbered_without_gaps(make):
    creator = EnvCreator(lambda: TransformedEnv(Count(3), TrajCounter()))
    env = make(4, creator)

    data = env.rollout(9, break_when_any_done=False)
    env.close()

    numbers = data["traj_count"].flatten()
    assert sorted(numbers.unique().tolist()) == list(range(12))
    assert (numbers.bincount() == 3).all()


@pytest.mark.parametrize("make", ON_BOTH.values(), ids=ON_BOTH)
def test_clones_of_a_counter_in_two_creators_draw_from_one_count(make):
    counter = TrajCounter()

    def counted(steps):
        return TransformedEnv(Count(steps), counter.clone())

    env = make(2, [EnvCreator(counted, steps=3), EnvCreator(counted, steps=2)])

    data = env.rollout(6, break_when_any_done=False)
    env.close()

    assert sorted(data["traj_count"].unique().tolist()) == list(range(5))
    assert [len(row.unique()) for row in data["traj_count"]] == [2, 3]


# ------------------------------------------------------------------- batches and levels of their own


class Pair(EnvBase):
    """Two counters behind one locked env, which honours the masks itself."""

    def __init__(self, ends=(2, 3)):
        super().__init__(batch_size=[2])
        flag = Categorical(2, shape=(2, 1), dtype=torch.bool)
        self.observation_spec = Composite(count=Unbounded((2, 1), dtype=torch.int64), shape=[2])
        self.done_spec = Composite(done=flag, shape=[2])
        self.action_spec = Unbounded((2, 1))
        self.ends = torch.tensor(ends).unsqueeze(-1)
        self.count = torch.zeros(2, 1, dtype=torch.int64)
        self.stepped = torch.zeros(2, 1, dtype=torch.int64)

    def _mask(self, td, name):
        mask = None if td is None else td.get(name, None)
        return torch.ones(2, 1, dtype=torch.bool) if mask is None else mask.reshape(2, 1)

    def _reset(self, td, **kwargs):
        self.count = torch.where(self._mask(td, "_reset"), 0, self.count)
        return TensorDict({"count": self.count}, [2])

    def _step(self, td):
        moving = self._mask(td, "_step")
        self.count, self.stepped = self.count + moving, self.stepped + moving
        out = {"count": self.count, "reward": moving.float(), "done": self.count >= self.ends}
        return TensorDict(out, [2])

    def _set_seed(self, seed):
        pass


@in_all_ways
def test_a_locked_sub_env_gets_its_part_of_a_step_mask(make):
    env = make(2, Pair)
    td = env.rand_action(env.reset())

    out = env.step(td.set("_step", torch.tensor([[T, F], [F, F]])))
    stepped = [own.flatten().tolist() for own in env.stepped]
    env.close()

    assert out["next", "count"].squeeze(-1).tolist() == [[1, 0], [0, 0]]
    assert out["next", "reward"].squeeze(-1).tolist() == [[1, 0], [0, 0]]
    assert stepped == [[1, 0], [0, 0]]


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_batch_of_its_own_gets_a_step_mask_in_its_shape(shape, wrapped):
    class Seeing(Pair):
        def _step(self, td):
            self.seen = td.get("_step")
            return super()._step(td)

    inner = Seeing()
    env = TransformedEnv(inner) if wrapped else inner
    mask = torch.tensor([T, F]).reshape(shape)

    out = env.step(env.rand_action(env.reset()).set("_step", mask))

    assert inner.seen.tolist() == [T, F]
    assert mask.shape == shape
    assert "_step" not in out.keys()


def test_a_rollout_moves_all_parts_whatever_the_step_before_it_left_out(opened):
    class Driven(Pair):  # whose random actions are drawn for all steps at once
        def __init__(self):
            super().__init__(ends=(9, 9))
            self.action_spec = Bounded(-1, 1, (2, 1))

    env = opened(SerialEnv(2, Driven, use_buffers=True))
    td = env.rand_action(env.reset())
    root = env.step_mdp(env.step(td.set("_step", torch.tensor([[T, F], [F, F]]))))

    data = env.rollout(2, auto_reset=False, tensordict=root, break_when_any_done=False)

    assert data["next", "count"][..., -1, 0].tolist() == [[3, 2], [2, 2]]


@in_all_ways
def test_parts_of_a_sub_env_begin_anew_each_for_itself(make):
    env = make(2, [Pair, partial(Pair, (1, 4))])

    data = env.rollout(4, break_when_any_done=False)
    check_env_specs(env)
    env.close()

    counts = data["next", "count"].squeeze(-1)
    assert counts[0].tolist() == [[1, 2, 1, 2], [1, 2, 3, 1]]
    assert counts[1].tolist() == [[1, 1, 1, 1], [1, 2, 3, 4]]
    assert data["count"].squeeze(-1)[0].tolist() == [[0, 1, 0, 1], [0, 1, 2, 0]]


@in_all_ways
def test_a_reset_begins_all_parts_anew_after_a_step_in_which_one_ended(make):
    env = make(2, [Pair, partial(Pair, (1, 4))])

    stepped = env.rand_step(env.reset())
    root = env.reset()
    env.close()

    assert stepped["next", "done"].squeeze(-1).tolist() == [[F, F], [T, F]]
    assert root["count"].squeeze(-1).tolist() == [[0, 0], [0, 0]]


@in_all_ways
def test_a_mask_without_data_leaves_the_other_parts_of_a_sub_env_as_they_were(make):
    env = make(2, [Pair, partial(Pair, (1, 4))])
    mask = torch.tensor([[F, F], [T, F]])

    env.rand_step(env.reset())
    root = env.reset(TensorDict({"_reset": mask}, [2, 2]))
    env.close()

    assert root["count"].squeeze(-1).tolist() == [[1, 1], [0, 1]]


class Groups(EnvBase):
    """Two groups with done leaves of their own; the root is done when any or all of them are.

    It begins anew as a whole, when the root mask asks for it.
    """

    def __init__(self, whole=torch.any, ends=(2, 3)):
        super().__init__()
        self.whole, self.ends = whole, ends
        value = Unbounded((1,), dtype=torch.int64)
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        names = ("left", "right")
        self.observation_spec = Composite({name: {"count": value.clone()} for name in names})
        self.done_spec = Composite(
            {**{name: {"done": flag.clone()} for name in names}, "done": flag.clone()}
        )
        self.action_spec = Unbounded((1,))

    def _out(self):
        flags = [
            torch.tensor([count >= end]) for count, end in zip(self.counts, self.ends, strict=True)
        ]
        groups = {
            name: {"count": torch.tensor([count]), "done": flag}
            for name, count, flag in zip(("left", "right"), self.counts, flags, strict=True)
        }
        return TensorDict({**groups, "done": self.whole(torch.cat(flags)).reshape(1)}, [])

    def _reset(self, td, **kwargs):
        if td is None or bool(td.get("_reset", torch.ones(1)).any()):
            self.counts = [0, 0]
        return self._out()

    def _step(self, td):
        self.counts = [count + 1 for count in self.counts]
        return self._out().set("reward", torch.ones(1))

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize(("whole", "ends_at"), [(torch.any, 2), (torch.all, 3)])
@in_all_ways
def test_the_root_flag_decides_when_groups_begin_anew(make, whole, ends_at):
    env = make(2, partial(Groups, whole))

    ended = env.rollout(9)
    td = env.reset()
    for _ in range(ends_at):
        data, td = env.step_and_maybe_reset(env.rand_action(td))
    env.close()

    assert ended.shape == (2, ends_at)
    assert env.reset_keys == ["_reset", ("left", "_reset"), ("right", "_reset")]
    assert data["next", "done"].all()
    assert td["left", "count"].flatten().tolist() == [0, 0]
    assert td["right", "count"].flatten().tolist() == [0, 0]
    assert not td["done"].any()


# ------------------------------------------------------------------------------------------- JAX


def make_drift(count: int):
    from tests.zoo.jax_drift import jax_rows  # only workers start JAX

    return jax_rows(count, limit=3)


class Platform(Count):
    def platform(self):
        import jax

        return jax.default_backend()


def test_a_jax_env_runs_in_a_worker_on_the_cpu():
    env = ParallelEnv(2, partial(make_drift, 3), num_processes=1)

    def still(td):
        return td.set("action", torch.zeros(2, 3, 1))

    env.set_seed(0)
    td = env.rollout(4, still, break_when_any_done=False)
    again = env.reset()
    env.close()

    assert env.batch_size == (2, 3)
    assert td["next", "truncated"].squeeze(-1).tolist() == [[[F, F, T, F]] * 3] * 2
    assert td["observation"][..., 0, :].equal(td["next", "observation"][..., 2, :])
    assert not td["observation"][..., 3, :].equal(td["observation"][..., 2, :])
    assert not again["done"].any()


def test_jax_in_a_worker_uses_the_cpu_whatever_the_parent_uses(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    # spawned, since the tests' fork server has imported jax
    env = ParallelEnv(1, Platform, mp_start_method="spawn")
    env.start()

    platforms = env.platform()
    env.close()

    assert platforms == ["cpu"]


# ----------------------------------------------------------------------------------- any sequence

STEPS = st.tuples(st.just("step"), st.lists(st.booleans(), min_size=3, max_size=3))
RESETS = st.tuples(st.just("reset"), st.lists(st.booleans(), min_size=3, max_size=3))


@pytest.fixture(scope="module", params=WAYS)
def counters(request):
    env = WAYS[request.param](3, partial(Count, 99))
    yield env
    env.close()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(STEPS | RESETS, max_size=8), keep=st.booleans())
def test_masks_do_to_rows_what_the_rules_say(counters, moves, keep):
    """The model is one integer for each row; ``keep`` passes the current data to a reset."""
    env = counters
    td, counts = env.reset(), [0, 0, 0]
    for kind, mask in moves:
        if kind == "step":
            out = env.step(env.rand_action(td.copy()).set("_step", torch.tensor(mask)))
            counts = [count + moved for count, moved in zip(counts, mask, strict=True)]
            assert out["next", "reward"].flatten().tolist() == [float(moved) for moved in mask]
            td = env.step_mdp(out)
        else:
            known = td.copy() if keep else TensorDict(batch_size=[3])
            td = env.reset(known.set("_reset", torch.tensor(mask).unsqueeze(-1)))
            counts = [0 if begins else count for count, begins in zip(counts, mask, strict=True)]
        assert td["count"].flatten().tolist() == counts
        assert list(env.c) == counts
        assert not {"_step", "_reset"} & set(td.keys())


class Tagged(Count):
    """Is told in each step a name and a history of any length, and counts both."""

    def __init__(self):
        super().__init__(99)
        self.state_spec = Composite(tag=NonTensor(()), history=Unbounded((-1,)))

    def _step(self, td):
        out = super()._step(td)
        return out.set("count", out["count"] + len(td["history"]) + len(td["tag"]))


def test_inputs_that_are_no_tensors_or_of_any_length_reach_sub_envs(opened):
    env = opened(SerialEnv(2, Tagged))
    td = env.reset().set("action", torch.zeros(2, 1, dtype=torch.int64))
    td.set("tag", NonTensorStack("a", "bcd")).set("history", torch.zeros(2, 4))

    out = env.step(td)

    assert out["next", "count"].flatten().tolist() == [1 + 4 + 1, 1 + 4 + 3]


class Talkative(Count):
    """Says more in each step than its specs declare."""

    def _step(self, td):
        return super()._step(td).set(("extra", "words"), torch.ones(1))


@pytest.mark.parametrize("use_buffers", [True, False])
def test_what_no_spec_of_a_sub_env_declares_is_left_out(opened, use_buffers):
    env = opened(SerialEnv(2, partial(Talkative, 9), use_buffers=use_buffers))

    data = env.rand_step(env.reset())

    assert set(data["next"].keys(True, True)) == {"count", "reward", "done", "terminated"}
