"""Values that begin anew with an episode.

Checklist rows: T01, T03, T05, T13, M24, V40 (in one process).
"""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit import (
    Compose,
    ConditionalSkip,
    DTypeCastTransform,
    FinancialRegimeEnv,
    FrameSkipTransform,
    GymEnv,
    GymWrapper,
    InitTracker,
    NoopResetEnv,
    ParallelEnv,
    RemoveEmptySpecs,
    RewardSum,
    SerialEnv,
    SqueezeTransform,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TrajCounter,
    TransformedEnv,
    Unbounded,
    UnsqueezeTransform,
    VecNormV2,
    check_env_specs,
)
from envkit.arrays import episode_counters
from envkit.batched.creator import EnvCreator
from envkit.errors import KeyCollisionError, NoParentError, ResetMaskError
from tests.zoo.envs import Count
from tests.zoo.transform_envs import Team, TwoTeams

NONSTOP = {"break_when_any_done": False}


def values(td, *key) -> list:
    return td[key].flatten().tolist()


# -------------------------------------------------------------------------------------- StepCounter


def test_a_step_counter_counts_and_truncates():
    env = TransformedEnv(Count(1000), StepCounter(3))

    data = env.rollout(10)

    assert values(data, "step_count") == [0, 1, 2]
    assert values(data, "next", "step_count") == [1, 2, 3]
    assert values(data, "next", "truncated") == [False, False, True]
    assert values(data, "next", "done") == [False, False, True]
    assert values(data, "next", "terminated") == [False, False, False]
    assert values(env.rollout(7, **NONSTOP), "next", "step_count") == [1, 2, 3, 1, 2, 3, 1]
    check_env_specs(env)


def test_a_step_counter_is_declared():
    env = TransformedEnv(Count(5), StepCounter())

    assert env.observation_spec["step_count"].dtype == torch.int64
    assert env.state_spec["step_count"].shape == (1,)
    assert "truncated" not in env.done_keys
    assert "truncated" in TransformedEnv(Count(5), StepCounter(3)).done_keys


def test_a_step_counter_does_not_overwrite_a_state_of_the_env():
    def counted(**options):
        return TransformedEnv(FinancialRegimeEnv(seed=0), StepCounter(3, **options))

    with pytest.raises(
        KeyCollisionError, match=r"'step_count', shape \(1,\).*step_count_key='elapsed'"
    ):
        counted().rollout(5)

    data = counted(step_count_key="elapsed").rollout(5)
    assert data["next", "elapsed"].shape == (3, 1) and data["next", "step_count"].tolist() == [
        1,
        2,
        3,
    ]


def test_a_step_counter_keeps_what_the_env_says_of_the_end():
    env = TransformedEnv(Count(2).add_truncated_keys(), StepCounter(2))

    data = env.rollout(5)

    assert values(data, "next", "terminated") == [False, True]
    assert values(data, "next", "truncated") == [False, True]


def test_a_step_counter_can_leave_done_alone():
    env = TransformedEnv(Count(4), StepCounter(2, truncated_key="late", update_done=False))

    data = env.rollout(9)

    assert values(data, "next", "late") == [False, True]
    assert values(data, "next", "done") == [False, False]


@pytest.mark.parametrize("wrong", [{"max_steps": 0}, {"step_count_key": ("a", "b")}])
def test_a_step_counter_names_what_is_wrong(wrong):
    with pytest.raises(ValueError, match=r"an int of at least 1|must be a string"):
        StepCounter(**wrong)


@pytest.mark.parametrize("inside", [True, False])
def test_a_rollout_of_counted_pendulums(inside):
    make = partial(GymEnv, "Pendulum-v1")
    if inside:
        env = SerialEnv(3, lambda: TransformedEnv(make(), StepCounter(20)))
    else:
        env = TransformedEnv(SerialEnv(3, make), StepCounter(20))

    assert env.rollout(1000).shape == (3, 20)
    assert TransformedEnv(make(), StepCounter(20)).rollout(1000).shape == (20,)


def test_levels_without_one_above_have_counters_of_their_own():
    env = TransformedEnv(TwoTeams((2, 3)), StepCounter())

    data = env.rollout(6, **NONSTOP)

    assert values(data, "a", "step_count") == [0, 1, 0, 1, 0, 1]
    assert values(data, "b", "step_count") == [0, 1, 2, 0, 1, 2]
    assert "step_count" not in data.keys()
    check_env_specs(env)


def test_truncation_reaches_the_levels_below():
    env = TransformedEnv(Team(end=9), StepCounter(2))

    data = env.rollout(5)

    assert data.shape == (2,)
    assert data["next", "agents", "truncated"].shape == (2, 3, 1)
    assert data["next", "agents", "done"].flatten(1).tolist() == [[False] * 3, [True] * 3]
    assert not data["next", "agents", "terminated"].any()
    assert ("agents", "step_count") not in env.observation_keys
    check_env_specs(env)


def test_a_state_without_a_count_counts_from_zero():
    env = TransformedEnv(Count(5), StepCounter())
    env.reset()

    assert env.step(TensorDict({"action": torch.tensor([0])}))["next", "step_count"] == 1


# -------------------------------------------------------------------------------------- InitTracker


def test_an_init_tracker_marks_first_roots():
    env = TransformedEnv(Count(3), InitTracker())

    data = env.rollout(7, **NONSTOP)

    assert values(data, "is_init") == [True, False, False, True, False, False, True]
    assert not data["next", "is_init"].any()
    check_env_specs(env)


SHAPED = {  # what a later transform makes of the marks, and their shape then
    "as they are": ([], (3, 1)),
    "with an axis more": ([UnsqueezeTransform(-1, in_keys=["is_init"])], (3, 1, 1)),
    "without an axis": ([SqueezeTransform(-1, in_keys=["is_init"])], (3,)),
    "of another dtype": (
        [DTypeCastTransform(torch.bool, torch.float32, in_keys=["is_init"])],
        (3, 1),
    ),
}


@pytest.mark.parametrize(("after", "shape"), SHAPED.values(), ids=SHAPED)
@pytest.mark.parametrize("is_inside", [False, True], ids=["around a pool", "in a pool"])
def test_a_partial_reset_leaves_the_marks_of_other_rows_alone(after, shape, is_inside):
    def behind(env):
        return TransformedEnv(env, Compose(InitTracker(), *(one.clone() for one in after)))

    make = partial(Count, 5)
    env = SerialEnv(3, lambda: behind(make())) if is_inside else behind(SerialEnv(3, make))
    mask = torch.tensor([[True], [False], [True]])
    first = env.reset()
    moved = env.step_mdp(env.rand_step(first.clone()))

    again = env.reset(first.clone().set("_reset", mask))
    later = env.reset(moved.set("_reset", mask))

    assert again["is_init"].shape == first["is_init"].shape == shape
    assert again["is_init"].bool().all()
    assert later["is_init"].bool().flatten().tolist() == [True, False, True]


def test_marks_that_the_data_does_not_hold_are_unset_where_nothing_is_reset():
    env = TransformedEnv(SerialEnv(3, partial(Count, 5)), InitTracker())
    env.reset()
    only_mask = TensorDict({"_reset": torch.tensor([False, True, False])}, [3])

    assert values(env.reset(only_mask), "is_init") == [False, True, False]


def test_each_level_has_marks_of_its_own():
    env = TransformedEnv(TwoTeams((2, 3)), InitTracker("first"))

    data = env.rollout(4, **NONSTOP)

    assert values(data, "a", "first") == [True, False, True, False]
    assert values(data, "b", "first") == [True, False, False, True]


# ---------------------------------------------------------------------------------------- RewardSum


@pytest.mark.parametrize("reward_spec", [False, True])
def test_a_reward_sum_begins_anew_with_each_episode(reward_spec):
    env = TransformedEnv(Count(3), RewardSum(reward_spec=reward_spec))

    data = env.rollout(6, **NONSTOP)

    assert values(data, "episode_reward") == [0, 1, 2, 0, 1, 2]
    assert values(data, "next", "episode_reward") == [1, 2, 3, 1, 2, 3]
    assert ("episode_reward" in env.reward_keys) is reward_spec
    assert ("episode_reward" in env.observation_keys) is not reward_spec
    assert "episode_reward" in env.state_keys
    check_env_specs(env)


@pytest.mark.parametrize("reward_spec", [False, True])
def test_a_skipped_row_keeps_its_sum(reward_spec):
    env = TransformedEnv(SerialEnv(2, partial(Count, 9)), RewardSum(reward_spec=reward_spec))
    root = env.rand_action(env.step_mdp(env.rand_step(env.reset())))

    out = env.step(root.set("_step", torch.tensor([True, False])))

    assert values(out, "next", "episode_reward") == [2, 1]


def test_every_reward_has_a_sum_beside_it():
    env = TransformedEnv(TwoTeams((2, 3)), RewardSum())

    data = env.rollout(4, **NONSTOP)

    assert values(data, "next", "a", "episode_reward") == [1, 2, 1, 2]
    assert values(data, "next", "b", "episode_reward") == [1, 2, 3, 1]
    check_env_specs(env)


def test_a_sum_at_the_root_says_which_reset_it_obeys():
    transform = partial(RewardSum, [("a", "reward")], ["total"])

    with pytest.raises(ResetMaskError, match="reset_keys="):
        TransformedEnv(TwoTeams(), transform()).reset()
    env = TransformedEnv(TwoTeams((2, 3)), transform([("b", "_reset")]))
    assert values(env.rollout(5, **NONSTOP), "total") == [0, 1, 2, 0, 1]


def test_recorded_rewards_are_added_up_along_time():
    data = Count(5).rollout(4)

    summed = RewardSum()(data)

    assert values(summed, "next", "episode_reward") == [1, 2, 3, 4]
    only_rewards = RewardSum()(data["next"].select("reward"))
    assert values(only_rewards, "episode_reward") == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="named 'time'"):
        RewardSum()(TensorDict({"reward": torch.ones(3, 1)}, [3]))


# ------------------------------------------------------------------------------------- TargetReturn


@pytest.mark.parametrize(("mode", "shown"), [("reduce", [5, 4, 3, 5]), ("constant", [5] * 4)])
def test_a_target_is_what_is_left_of_the_return(mode, shown):
    env = TransformedEnv(Count(3), TargetReturn(5.0, mode))

    assert values(env.rollout(4, **NONSTOP), "target_return") == shown
    check_env_specs(env)
    with pytest.raises(ValueError, match="'reduce' or 'constant'"):
        TargetReturn(1.0, "half")


# -------------------------------------------------------------------------------------- TrajCounter


def test_trajectories_are_numbered_as_they_begin():
    env = TransformedEnv(
        SerialEnv(2, [partial(Count, 2), partial(Count, 3)]), TrajCounter("number")
    )

    data = env.rollout(6, **NONSTOP)

    assert data["number"].squeeze(-1).tolist() == [[0, 0, 2, 2, 4, 4], [1, 1, 1, 3, 3, 3]]
    assert data["next", "number"].equal(data["number"])
    check_env_specs(env)


def test_clones_draw_from_the_same_numbers():  # in one process
    counter = TrajCounter()
    envs = [TransformedEnv(Count(2), c) for c in (counter, counter.clone())]

    data = [env.rollout(4, **NONSTOP) for env in envs]

    assert [values(part, "traj_count") for part in data] == [[0, 0, 1, 1], [2, 2, 3, 3]]


# ---------------------------------------------------------------------------------------- in common


@pytest.mark.parametrize(
    "make", [StepCounter, InitTracker, TrajCounter, partial(TargetReturn, 1.0)]
)
def test_what_follows_episodes_needs_an_env(make):
    transform = make()

    with pytest.raises(NotImplementedError, match="TransformedEnv"):
        transform(TensorDict())
    with pytest.raises(NoParentError, match="TransformedEnv"):
        transform._reset(TensorDict(), TensorDict())


def test_several_of_them_keep_out_of_each_others_way():
    env = TransformedEnv(
        Count(5), Compose(StepCounter(3), InitTracker(), RewardSum(), StepCounter(9, "late", "all"))
    )

    data = env.rollout(7, **NONSTOP)

    assert values(data, "all") == values(data, "step_count") == [0, 1, 2, 0, 1, 2, 0]
    assert values(data, "episode_reward") == [0, 1, 2, 0, 1, 2, 0]
    check_env_specs(env)


def test_tallies_work_on_numpy_arrays():
    count, rewards = np.array([0, 4]), np.array([0.5, 2.0])

    assert episode_counters.counted(count).tolist() == [1, 5]
    assert episode_counters.added(rewards, rewards).tolist() == [1.0, 4.0]
    assert episode_counters.left(rewards, rewards).tolist() == [0.0, 0.0]


def test_a_step_counter_leaves_the_truncation_of_the_env_itself():
    env = TransformedEnv(GymEnv("CartPole-v1", max_episode_steps=2), StepCounter(max_steps=5))

    data = env.rollout(9)

    assert values(data, "next", "truncated") == [False, True]
    assert values(data, "next", "step_count") == [1, 2]


def test_each_sum_obeys_its_own_reset():
    sums = RewardSum(reset_keys=[("a", "_reset"), ("b", "_reset")])
    env = TransformedEnv(TwoTeams((9, 9), batch_size=[1]), sums)
    root = env.step_mdp(env.rand_step(env.reset()))
    root["a", "_reset"], root["b", "_reset"] = torch.tensor([[False]]), torch.tensor([[True]])

    fresh = env.reset(root)

    assert fresh["a", "episode_reward"].item() == 1.0
    assert fresh["b", "episode_reward"].item() == 0.0


@pytest.mark.parametrize("names", [["time", None], [None, "time"]])
def test_recorded_rewards_are_summed_along_the_axis_of_time(names):
    data = TensorDict({"reward": torch.ones(3, 2, 1)}, [3, 2], names=names)

    sums = RewardSum()(data)["episode_reward"][..., 0]

    axis = names.index("time")
    expected = torch.arange(1.0, data.shape[axis] + 1)
    assert sums.equal(expected[:, None].expand(3, 2) if axis == 0 else expected.expand(3, 2))


# --------------------------------------------------------------------------------------- sums of many


class Tenths(gymnasium.Env):
    """Pays a tenth for each step of an episode of some length."""

    observation_space = gymnasium.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int):
        self.length, self.t = length, 0

    def _seen(self):
        return np.full(1, self.t, np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._seen(), {}

    def step(self, action):
        self.t += 1
        return self._seen(), 0.1, self.t >= self.length, False, {}


def tenths(*lengths: int) -> SerialEnv:
    return SerialEnv(len(lengths), [lambda n=n: GymWrapper(Tenths(n)) for n in lengths])


def test_a_compensated_sum_of_many_rewards_does_not_drift():
    env = TransformedEnv(tenths(1200, 1200), RewardSum(compensated=True))
    plain = TransformedEnv(tenths(1200, 1200), RewardSum())

    sums, drifted = (
        one.rollout(2000, break_when_any_done=False)["next", "episode_reward"][0, :, 0]
        for one in (env, plain)
    )

    steps = torch.arange(2000) % 1200 + 1
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, steps * 0.1, rtol=2e-7, atol=0)
    assert (drifted - steps * 0.1).abs().max() > 1e-4
    env.close()
    plain.close()


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_many_tenths_are_a_tenth_of_their_number(library):
    if library == "jax":
        import jax
        import jax.numpy as jnp

        def add(carried, _):
            return episode_counters.compensated(*carried, jnp.float32(0.1)), None

        zero = jnp.zeros(()), jnp.zeros(())
        total = jax.jit(lambda: jax.lax.scan(add, zero, length=200_000)[0][0])()
    else:
        make = np.full if library == "numpy" else torch.full
        reward = make((1,), 0.1, dtype=np.float32 if library == "numpy" else torch.float32)
        total = excess = reward * 0
        for _ in range(20_000):
            total, excess = episode_counters.compensated(total, excess, reward)
    expected = 20_000.0 if library == "jax" else 2000.0
    assert float(total.reshape(())) == pytest.approx(expected, rel=1e-7)


def test_recorded_rewards_are_summed_in_64_bits_episode_by_episode():
    env = tenths(700, 5)
    data = env.rollout(1000, break_when_any_done=False)
    env.close()

    sums = RewardSum()(data)["next", "episode_reward"][..., 0]

    steps = torch.arange(1000)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums[0], (steps % 700 + 1) * 0.1, rtol=2e-7, atol=0)
    torch.testing.assert_close(sums[1], (steps % 5 + 1) * 0.1, rtol=1e-6, atol=0)
    joined = RewardSum()(torch.cat([data[0, :3], data[1, :3]]))
    assert joined["next", "episode_reward"].flatten()[[2, 3, 5]].tolist() == pytest.approx(
        [0.3, 0.1, 0.3]
    )


# ---------------------------------------------------------------------------- several levels

masks = st.lists(st.booleans(), min_size=2, max_size=2).map(torch.tensor)


AT_EACH_LEVEL = {
    "StepCounter": (StepCounter, "step_count"),
    "InitTracker": (InitTracker, "is_init"),
    "RewardSum": (RewardSum, "episode_reward"),
    "TensorDictPrimer": (
        lambda: TensorDictPrimer(
            {("a", "mem"): Unbounded((1,)), ("b", "mem"): Unbounded((1,))},
            default_value=3.0,
            reset_key=("a", "_reset"),
            expand_specs=True,
        ),
        "mem",
    ),
}


AT_ANY_LEVEL = {
    **{name: make for name, (make, _) in AT_EACH_LEVEL.items()},
    "TrajCounter": TrajCounter,
    "VecNormV2": lambda: VecNormV2(
        [("a", "count"), ("b", "count")], [("a", "c"), ("b", "c")], stateful=False
    ),
    "TargetReturn": lambda: TargetReturn(
        4.0, in_keys=[("a", "reward")], out_keys=["left"], reset_key=("a", "_reset")
    ),
    "NoopResetEnv": lambda: NoopResetEnv(1),
    "FrameSkipTransform": lambda: FrameSkipTransform(2),
    "ConditionalSkip": lambda: ConditionalSkip(lambda td: False),
    "RemoveEmptySpecs": RemoveEmptySpecs,
}


@pytest.mark.parametrize("name", AT_ANY_LEVEL)
def test_specs_follow_data_where_there_are_several_levels(name):
    make = AT_ANY_LEVEL[name]

    check_env_specs(TransformedEnv(TwoTeams((4, 6), batch_size=[2]), make()))
    check_env_specs(SerialEnv(2, lambda: TransformedEnv(TwoTeams((4, 6)), make())))


@pytest.mark.parametrize("name", AT_EACH_LEVEL)
@settings(max_examples=10)
@given(left=masks, right=masks)
def test_each_level_begins_anew_where_its_own_mask_says(name, left, right):
    make, entry = AT_EACH_LEVEL[name]
    env = TransformedEnv(TwoTeams((9, 9), batch_size=[2]), make())
    first = env.reset().clone()
    root = env.step_mdp(env.rand_step(env.step_mdp(env.rand_step(env.reset()))))
    root["a", entry] = (root["a", entry] + 1).to(root["a", entry].dtype)
    asked = root.clone()
    for level, mask in (("a", left), ("b", right)):
        asked[level, "_reset"] = mask[:, None]

    fresh = env.reset(asked)

    for level, mask in (("a", left), ("b", right)):
        assert fresh[level, "count"][mask].equal(first[level, "count"][mask])
        assert fresh[level, "count"][~mask].equal(root[level, "count"][~mask])
        assert fresh[level, entry][mask].equal(first[level, entry][mask])
        assert fresh[level, entry][~mask].equal(root[level, entry][~mask])


def test_trajectories_of_worker_processes_have_numbers_of_their_own():
    creator = EnvCreator(lambda: TransformedEnv(Count(2), TrajCounter()))
    env = ParallelEnv(2, creator, num_processes=2)

    numbers = env.rollout(9, break_when_any_done=False)["traj_count"]

    env.close()
    each = [row.unique().tolist() for row in numbers]
    assert sorted(each[0] + each[1]) == list(range(10))
