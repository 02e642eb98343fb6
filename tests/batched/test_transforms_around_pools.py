"""Rollouts of a pool behind transforms, recorded on rows: the data of the same pool stepped one by one.

What is compared with has a transform more, which does nothing and cannot be shown stacked rows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envkit import (
    Compose,
    GymEnv,
    GymWrapper,
    NormalizeReward,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TransformedEnv,
    VecNorm,
    VecNormV2,
    compile_policy,
)
from envkit.batched.exchange import shown_rows
from envkit.errors import WorkerError
from tests.batched.test_faults import interrupt_at_random
from tests.batched.test_transforms_in_workers import CHAINS, ROWS, Walk, assert_told_the_same, play
from tests.bridges.compare import assert_same
from tests.transforms.chains import Opaque
from tests.zoo.envs import Count


@pytest.fixture
def recordings(monkeypatch):
    """Count the rollouts that are recorded on rows."""
    found = []

    def counted(env, rows, run, **options):
        made = recorded(env, rows, run, **options)
        found.append(made is not None)
        return made

    recorded = shown_rows.recorded
    monkeypatch.setattr(shown_rows, "recorded", counted)
    return found


@pytest.fixture(scope="module")
def pools():
    """Two equal pools in this process, and two with workers."""
    made = {
        kind: [kind(ROWS, lambda: GymWrapper(Walk())) for _ in range(2)]
        for kind in (SerialEnv, ParallelEnv)
    }
    yield made
    for pair in made.values():
        for pool in pair:
            pool.close()


def behind(pool, chain, *more):
    return TransformedEnv(pool, Compose(*chain(), *more))


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_recorded_rollouts_show_what_single_steps_show(pools, recordings, kind, chain):
    fast, slow = pools[kind]

    told = play(behind(fast, chain))
    expected = play(behind(slow, chain, Opaque()))

    assert_told_the_same(told, expected)
    assert recordings == [True]


STATISTICS = {
    "of observations": lambda: [VecNorm(["place"], decay=0.9), StepCounter(4)],
    "of two entries": lambda: [RewardSum(), VecNorm(["place", "episode_reward"], ["x", "y"])],
    "of returns": lambda: [NormalizeReward(gamma=0.9), RewardSum()],
    "frozen": lambda: [VecNorm(["place"]).freeze()],
}


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
@pytest.mark.parametrize("chain", STATISTICS.values(), ids=STATISTICS)
def test_statistics_count_what_single_steps_count(pools, recordings, kind, chain):
    fast, slow = behind(pools[kind][0], chain), behind(pools[kind][1], chain, Opaque())

    told, expected = play(fast), play(slow)

    assert_told_the_same(told, expected)
    assert recordings == [True]
    for one, other in zip(fast.transform[:-1] or fast.transform, slow.transform, strict=False):
        assert one.state_dict().keys() == other.state_dict().keys()
        for name, value in one.state_dict().items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state_dict()[name]))


def test_rows_that_are_not_finite_are_counted_and_told_as_by_single_steps(recordings):
    class Gap(Walk):
        """Gives no number now and then."""

        def _observe(self):
            observation = super()._observe()
            if self.calls % 7 == 5:
                observation["place"][0] = np.nan
            return observation

    found = []
    for more in ([], [Opaque()]):
        pool = SerialEnv(ROWS, lambda: GymWrapper(Gap()))
        env = TransformedEnv(pool, Compose(VecNorm(["place"]), *more))
        env.set_seed(0)
        with pytest.warns(UserWarning, match="NaN or an infinite number"):
            data = env.rollout(20, break_when_any_done=False)
        found.append((data, env.transform[0].skipped_rows, env.transform[0].statistics))
        pool.close()

    assert recordings == [True]
    assert int(found[0][1]) == int(found[1][1]) > 0
    shown = [data["next", "place"] for data, _, _ in found]
    assert torch.equal(shown[0].nan_to_num(5.5), shown[1].nan_to_num(5.5))
    assert_same(found[0][2], found[1][2])


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_transforms_of_an_env_inside_are_one_chain_with_those_around_it(pools, recordings, kind):
    fast, slow = pools[kind]

    def nested(pool, *more):
        inside = TransformedEnv(TransformedEnv(pool, StepCounter(5)), RewardSum())
        outside = StepCounter(4, step_count_key="steps"), VecNorm(["place"])
        return TransformedEnv(inside, Compose(*outside, *more))

    env, other = nested(fast), nested(slow, Opaque())
    told, expected = play(env), play(other)

    assert_told_the_same(told, expected)
    assert recordings == [True]
    env.base_env.append_transform(RewardSum(out_keys=["again"]))
    data = env.rollout(3, break_when_any_done=False)
    assert recordings == [True, True]
    assert torch.equal(data["next", "again"], data["next", "episode_reward"])


class Module(torch.nn.Module):
    """Acts on what only transforms show."""

    def forward(self, td):
        up = (td["step_count"] + (td["episode_reward"] > 0)) % 2
        return td.set("action", torch.nn.functional.one_hot(up.squeeze(-1).long(), 2))


class OfLeaves(torch.nn.Module):
    def forward(self, place):
        return torch.nn.functional.one_hot((place.sum(-1) > 0).long(), 2)


def of_leaves():
    from tensordict.nn import TensorDictModule

    return TensorDictModule(OfLeaves(), ["place"], ["action"])


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize(
    "policy",
    [lambda: None, Module, of_leaves, lambda: compile_policy(of_leaves())],
    ids=["random", "of TensorDicts", "of leaves", "compiled"],
)
def test_whoever_acts_and_when_it_stops(pools, recordings, policy, stops):
    def chain():
        return [RewardSum(), StepCounter(4)]

    fast, slow = pools[SerialEnv]
    rolled = []
    for env in (behind(fast, chain), behind(slow, chain, Opaque())):
        env.set_seed(5)
        torch.manual_seed(0)
        data = env.rollout(70, policy(), break_when_any_done=stops)
        root = env.step_mdp(data[..., -1])
        rolled += [
            data,
            env.rollout(9, policy(), auto_reset=False, tensordict=root, break_when_any_done=stops),
        ]

    assert_told_the_same(rolled[:2], rolled[2:])
    assert recordings == [True, True]


def test_collectors_record_on_rows_too(pools, recordings):
    def batches(pool, *more):
        pool.set_seed(1)
        torch.manual_seed(0)
        env = TransformedEnv(pool, Compose(RewardSum(), StepCounter(3), *more))
        collector = SyncDataCollector(env, None, frames_per_batch=6 * ROWS, total_frames=18 * ROWS)
        return [batch.clone() for batch in collector]

    fast, slow = pools[SerialEnv]

    for one, other in zip(batches(fast), batches(slow, Opaque()), strict=True):
        assert_same(one, other)
    assert recordings == [True] * 3


def test_a_limit_that_is_set_between_steps_ends_episodes(pools, recordings):
    counter = StepCounter()
    env = TransformedEnv(pools[SerialEnv][0], counter)
    env.rollout(3, break_when_any_done=False)

    counter.max_steps = 2
    data = env.rollout(9, break_when_any_done=False)

    assert int(data["next", "step_count"].max()) == 2
    assert (data["next", "truncated"] >= (data["next", "step_count"] == 2)).all()
    assert (data["step_count"][:, 1:][data["next", "done"][:, :-1]] == 0).all()


class Remembered(Count):
    """A count that its caller keeps."""

    def __init__(self):
        super().__init__()
        self.state_spec = self.observation_spec.clone()


def test_what_cannot_be_shown_stacked_rows_goes_step_by_step(pools, recordings):
    pool = pools[SerialEnv][0]

    class Overriding(TransformedEnv):
        def step(self, tensordict):
            return super().step(tensordict)

    for env in (
        TransformedEnv(pool, VecNormV2(["place"])),
        TransformedEnv(pool, Compose(StepCounter(), Opaque())),
        Overriding(pool, StepCounter()),
        TransformedEnv(TransformedEnv(pool, Opaque()), StepCounter()),
        TransformedEnv(TransformedEnv(pool, VecNorm(["place"])), StepCounter()),
        TransformedEnv(SerialEnv(ROWS, Remembered, use_buffers=True), StepCounter()),
    ):
        assert env.rollout(3, break_when_any_done=False).shape == (ROWS, 3)
    assert not recordings


@pytest.mark.parametrize("calls", [{1}, {2, 3}, {33}])
@pytest.mark.parametrize(
    "use",
    [
        lambda env: env.step_and_maybe_reset(
            env.rand_action(env.fake_tensordict().exclude("next"))
        ),
        lambda env: env.base_env.rollout(3, break_when_any_done=False),
        lambda env: env.reset(seed=5),
    ],
    ids=["a step", "a rollout of the pool", "a reset"],
)
def test_a_policy_that_uses_the_env_changes_no_step_before(pools, use, calls):
    def played(env):
        count = 0

        def act(td):
            nonlocal count
            count += 1
            if count in calls:
                use(env)
            return Module()(td)

        env.set_seed(3)
        torch.manual_seed(0)
        return env.rollout(40, act, break_when_any_done=False)

    def chain():
        return [RewardSum(), StepCounter(5)]

    fast, slow = pools[SerialEnv]

    assert_same(played(behind(fast, chain)), played(behind(slow, chain, Opaque())))


def test_a_reset_of_one_row_by_a_policy_leaves_the_others_in_the_episode_just_begun(pools):
    pool, calls = pools[SerialEnv][0], []
    env = behind(pool, lambda: [RewardSum(), StepCounter(1)])  # each step begins all rows again
    first_row = TensorDict({"_reset": torch.arange(ROWS) == 0}, [ROWS])

    def act(td):
        calls.append(td["place"].clone())
        if len(calls) == 2:
            assert pool.reset(first_row)["place"][1:].equal(td["place"][1:])
        return env.rand_action(td)

    env.rollout(3, act, break_when_any_done=False)

    assert len(calls) == 3 and not calls[0].equal(calls[1])


def test_ctrl_c_at_any_moment_leaves_a_pool_that_goes_on(pools):
    env = behind(pools[ParallelEnv][0], lambda: [RewardSum(), StepCounter(5)])
    env.rollout(60, break_when_any_done=False)

    times = 20
    ended = interrupt_at_random(lambda: env.rollout(60, break_when_any_done=False), times)

    assert ended > 0.8 * times
    data = env.rollout(9, break_when_any_done=False)
    assert int(data["next", "step_count"].max()) <= 5
    assert (data["step_count"][:, 0] == 0).all()


def test_a_row_that_raises_is_named_and_the_pool_can_be_reset():
    makers = [lambda at=at: GymWrapper(Walk(at)) for at in (None, 4, None, None)]
    with SerialEnv(ROWS, makers) as pool:
        env = TransformedEnv(pool, Compose(RewardSum(), StepCounter()))

        with pytest.raises(WorkerError, match=r"row 1|env 1"):
            env.rollout(20, break_when_any_done=False)

        data = env.rollout(5, break_when_any_done=False)
        assert (data["step_count"][:, 0] == 0).all() and (data["episode_reward"][:, 0] == 0).all()


def test_a_pool_that_is_started_again_records_again(recordings):
    env = TransformedEnv(
        SerialEnv(2, lambda: GymEnv("CartPole-v1")), Compose(RewardSum(), StepCounter())
    )
    shapes = []
    for _ in range(2):
        shapes.append(env.rollout(5, break_when_any_done=False)["episode_reward"].shape)
        env.close()

    assert shapes == [(2, 5, 1)] * 2 and recordings == [True, True]


def test_another_default_device_changes_nothing(pools):
    def chain():
        return [RewardSum(), StepCounter(4)]

    fast, slow = pools[SerialEnv]
    fast.set_seed(2), slow.set_seed(2)
    wanted = behind(slow, chain).rollout(9, OfPlace(), break_when_any_done=False)

    with torch.device("meta"):
        data = behind(fast, chain).rollout(9, OfPlace(), break_when_any_done=False)

    assert_same(data, wanted)


class OfPlace:
    """Acts without making a tensor where the default device says."""

    def __call__(self, td):
        up = (td["place"].sum(-1, keepdim=True) > 0).long()
        return td.set("action", torch.cat([1 - up, up], -1))
