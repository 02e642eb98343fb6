"""`SyncDataCollector`: what one batch is, and what carries over into the next."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer

from envkit import (
    Collector,
    Compose,
    Composite,
    ExplorationType,
    GymEnv,
    JaxPolicy,
    MixedEnv,
    MultiAsyncCollector,
    MultiSyncCollector,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TransformedEnv,
    evaluate,
    exploration_type,
    split_trajectories,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BusyError,
    ClosedEnvError,
    ResumeError,
)
from tests.collectors.slow_model import assert_same, collected
from tests.zoo.envs import Chaos, Count, StatelessCount
from tests.zoo.jax_drift import jax_rows
from tests.zoo.shaped_envs import Groups

IDS = ("collector", "traj_ids")
DONE = ("next", "done")


def two() -> SerialEnv:
    return SerialEnv(2, lambda: Count(5))


class Told(Count):
    """Says that all it keeps of an episode is its count."""

    def get_extra_state(self):
        return self.c

    def set_extra_state(self, state):
        self.c = state


def still(td):
    return td.set("action", torch.zeros((*td.batch_size, 1), dtype=torch.int64))


def test_the_worked_example_of_one_env():
    collector = SyncDataCollector(lambda: Count(5), frames_per_batch=7, total_frames=14)

    first, second = collector

    assert first.batch_size == (7,) and first.names == ["time"] and first.device is None
    assert first[IDS].tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert first[DONE].flatten().tolist() == [False] * 4 + [True] + [False] * 2
    assert second[IDS].tolist() == [1, 1, 1, 2, 2, 2, 2]
    assert first[IDS].dtype == torch.int64
    assert set(first.keys(True, True)) == {
        *("action", "count", "done", "terminated", IDS),
        *(("next", name) for name in ("count", "reward", "done", "terminated")),
    }


def test_it_shows_its_env_what_was_asked_for_and_how_far_it_is():
    collector = Collector(Count, frames_per_batch=4, total_frames=8)
    collector.next()

    assert repr(collector) == (
        f"SyncDataCollector(env={collector.env!r}, frames_per_batch=4, total_frames=8, frames=4)"
    )
    collector.shutdown()
    assert repr(collector).endswith("total_frames=8, shut down)")


@pytest.mark.parametrize("kind", [SyncDataCollector, MultiSyncCollector, MultiAsyncCollector])
def test_the_last_batch_is_whole_and_a_warning_tells_how_much_that_is(kind):
    makers = Count if kind is SyncDataCollector else [Count]

    with pytest.warns(UserWarning, match=r"10, no multiple .* \(4\).* 12 frames") as caught:
        collector = kind(makers, frames_per_batch=4, total_frames=10)
    sizes = [batch.numel() for batch in collector]
    collector.shutdown()

    assert (sizes, len(collector), collector.frames, collector.is_finished) == (
        [4] * 3,
        3,
        12,
        True,
    )
    assert [warning.filename for warning in caught] == [__file__]


def test_a_total_of_whole_batches_warns_of_nothing():
    collector = SyncDataCollector(Count, frames_per_batch=4, total_frames=12)

    assert len(collector) == 3


def test_several_envs_have_a_row_each_and_time_comes_last():
    with pytest.warns(UserWarning, match=r"7, no multiple of the 2 envs.*batches have 8 frames"):
        collector = SyncDataCollector(two, frames_per_batch=7)

    batch = collector.next()

    assert batch.batch_size == (2, 4) and batch.names == [None, "time"]
    assert batch[IDS].tolist() == [[0] * 4, [1] * 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chaos(3),
        lambda: SerialEnv(3, lambda: Chaos(3)),
        lambda: SerialEnv(2, lambda: SerialEnv(2, Count, create_env_kwargs={"n": 2})),
        lambda: TransformedEnv(
            SerialEnv(2, lambda: Chaos(4)), Compose(StepCounter(3), RewardSum())
        ),
        lambda: StatelessCount(batch_size=[3]),
        lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
        lambda: GymEnv("CartPole-v1", num_envs=2, categorical_action_encoding=True),
        lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)),
        lambda: MixedEnv([SerialEnv(1, lambda: Chaos(2)), SerialEnv(2, lambda: Chaos(3))]),
    ],
)
def test_batches_are_those_of_a_loop_by_hand(make):
    ours, theirs = make(), make()
    collector = SyncDataCollector(ours, still_of(ours), frames_per_batch=6 * rows(ours))
    collector.set_seed(3)
    theirs.set_seed(3)

    wanted = collected(theirs, still_of(theirs), steps=6, batches=3)

    for batch in wanted:
        assert_same(collector.next(), batch)
    theirs.close()
    collector.shutdown()


def rows(env) -> int:
    return env.batch_size.numel()


def still_of(env):
    zero = env.full_action_spec.zero()
    return lambda tensordict: tensordict.update(zero.clone())


@settings(max_examples=25)
@given(
    ends=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    steps=st.integers(1, 7),
    limit=st.none() | st.integers(1, 5),
)
def test_numbers_follow_the_ends_whatever_they_are(ends, steps, limit):
    def make():
        return SerialEnv(len(ends), [lambda n=n: Count(n).add_truncated_keys() for n in ends])

    collector = SyncDataCollector(
        make, still, frames_per_batch=steps * len(ends), max_frames_per_traj=limit
    )
    env = make() if limit is None else TransformedEnv(make(), StepCounter(limit))

    for wanted in collected(env, still, steps, batches=3):
        assert_same(collector.next(), wanted)


def test_a_root_is_the_next_of_the_step_before_across_batches_too():
    collector = SyncDataCollector(two, frames_per_batch=6, total_frames=60)

    data = torch.cat(list(collector), -1)

    goes_on = data[IDS][:, 1:] == data[IDS][:, :-1]
    assert torch.equal(data["count"][:, 1:][goes_on], data["next", "count"][:, :-1][goes_on])
    assert (data["count"][:, 1:][~goes_on] == 0).all()


def test_a_limit_on_frames_truncates_across_batches():
    collector = SyncDataCollector(lambda: Count(9), frames_per_batch=2, max_frames_per_traj=3)

    data = torch.cat([collector.next() for _ in range(3)])

    assert data["next", "truncated"].flatten().tolist() == [False, False, True] * 2
    assert data["next", "step_count"].flatten().tolist() == [1, 2, 3] * 2
    assert data[IDS].tolist() == [0, 0, 0, 1, 1, 1]


def test_a_limit_leaves_a_step_count_of_the_env_alone():
    env = TransformedEnv(Count(9), StepCounter())
    collector = SyncDataCollector(env, frames_per_batch=4, max_frames_per_traj=2)

    batch = collector.next()

    assert batch["collector", "step_count"].flatten().tolist() == [0, 1, 0, 1]
    assert "collector_step_count" not in batch.keys() and "step_count" in batch.keys()
    assert batch["next", "truncated"].flatten().tolist() == [False, True] * 2


class Apart(Groups):
    """Flags of the groups alone, none at the root."""

    def __init__(self):
        super().__init__()
        flags = {name: self.done_spec[name].clone() for name in self.SIZES}
        self.done_spec = Composite(flags)

    def _out(self):
        return super()._out().exclude("done")


def test_counts_of_groups_stand_apart_from_those_of_the_env_too():
    collector = SyncDataCollector(
        lambda: TransformedEnv(Apart(), StepCounter()), frames_per_batch=3, max_frames_per_traj=9
    )

    batch = collector.next()

    for name, size in Groups.SIZES.items():
        counted = batch["collector", name, "step_count"]
        assert counted.shape == (3, size, 1)
        assert torch.equal(counted, batch[name, "step_count"])
    assert not any("collector_step_count" in key for key in batch.keys(True, True))


def test_random_frames_come_first_in_whole_batches():
    collector = SyncDataCollector(
        lambda: Count(50),
        lambda count: torch.full((1,), 7),
        frames_per_batch=4,
        init_random_frames=6,
    )

    played = [collector.next()["action"].flatten().tolist() for _ in range(3)]

    assert max(played[0] + played[1]) <= 1
    assert played[2] == [7] * 4


def test_every_batch_begins_anew_where_that_is_asked_for():
    collector = SyncDataCollector(two, frames_per_batch=6, reset_at_each_iter=True)

    first, second = collector.next(), collector.next()

    assert (first["count"][:, 0] == 0).all() and (second["count"][:, 0] == 0).all()
    assert first[IDS][:, 0].tolist() == [0, 1] and second[IDS][:, 0].tolist() == [2, 3]


def test_without_resets_envs_are_stepped_on():
    collector = SyncDataCollector(lambda: Count(2), frames_per_batch=5, reset_when_done=False)

    batch = collector.next()

    assert batch["next", "count"].flatten().tolist() == [1, 2, 3, 4, 5]
    assert batch[DONE].flatten().tolist() == [False, True, True, True, True]
    assert (batch[IDS] == 0).all()


def test_the_last_step_is_marked_where_that_is_asked_for():
    collector = SyncDataCollector(
        lambda: Count(9).add_truncated_keys(), frames_per_batch=3, set_truncated=True
    )

    first, second = collector.next(), collector.next()

    assert first["next", "truncated"].flatten().tolist() == [False, False, True]
    assert first[DONE].flatten().tolist() == [False, False, True]
    assert not first["next", "terminated"].any()
    assert second["count"].flatten().tolist() == [3, 4, 5] and (second[IDS] == 0).all()


def test_batches_are_split_then_post_processed_then_shown_to_a_hook():
    seen = []

    def postproc(td):
        seen.append(("postproc", td.batch_size, td["collector", "mask"].sum().item()))
        return td.set("mine", td["count"] * 2)

    collector = SyncDataCollector(
        lambda: Count(5),
        frames_per_batch=7,
        split_trajs=True,
        postproc=postproc,
        pre_collect_hook=lambda: seen.append("before"),
        post_collect_hook=lambda td: seen.append(("after", "mine" in td.keys())),
    )

    batch = collector.next()

    assert seen == ["before", ("postproc", (2, 5), 7), ("after", True)]
    assert batch["collector", "mask"].tolist() == [[True] * 5, [True] * 2 + [False] * 3]


def test_what_a_hook_raises_has_a_batch_post_processed_once():
    answers = iter([ZeroDivisionError()])

    def hook(batch):
        if (error := next(answers, None)) is not None:
            raise error

    def doubled(batch):
        batch["next", "reward"].mul_(2)
        return batch

    collector = SyncDataCollector(two, frames_per_batch=4, postproc=doubled, post_collect_hook=hook)
    with pytest.raises(ZeroDivisionError):
        collector.next()

    assert (collector.next()["next", "reward"] == 2).all()


def test_a_postproc_that_returns_nothing_is_told():
    collector = SyncDataCollector(two, frames_per_batch=4, postproc=lambda batch: None)

    with pytest.raises(ArgumentTypeError, match=r"postproc returned None.* must return the batch"):
        collector.next()


def test_what_postproc_raises_loses_no_batch():
    answers = iter([ZeroDivisionError("first"), None])

    def postproc(td):
        if (error := next(answers)) is not None:
            raise error
        return td

    collector = SyncDataCollector(two, frames_per_batch=4, postproc=postproc)
    with pytest.raises(ZeroDivisionError):
        collector.next()

    batch = collector.next()

    assert batch["count"].squeeze(-1).tolist() == [[0, 1], [0, 1]]
    assert (collector.frames, collector.iter) == (4, 1)


def test_what_a_policy_raises_begins_new_trajectories():
    calls = []

    def policy(td):
        calls.append(1)
        if len(calls) == 6:
            raise ZeroDivisionError
        return still(td)

    policy.__annotations__["td"] = TensorDict
    collector = SyncDataCollector(lambda: Count(9), policy, frames_per_batch=4)
    first = collector.next()
    with pytest.raises(ZeroDivisionError):
        collector.next()

    second = collector.next()

    assert first[IDS].tolist() == [0] * 4
    assert second[IDS].tolist() == [1] * 4 and second["count"][0] == 0


def test_whole_episodes_come_in_the_order_of_their_ends_and_none_is_lost():
    lengths = [3, 5, 4]
    collector = SyncDataCollector(
        lambda: SerialEnv(3, [lambda n=n: Count(n) for n in lengths]), trajs_per_batch=2
    )

    batches = [collector.next() for _ in range(20)]

    seen: dict[int, int] = {}
    for batch in batches:
        assert batch.batch_size[0] == 2 and batch.names == [None, "time"]
        for episode, mask in zip(batch, batch["collector", "mask"], strict=True):
            steps = int(mask.sum())
            assert episode[IDS][:steps].unique().numel() == 1
            assert episode["count"][:steps].flatten().tolist() == list(range(steps))
            assert episode[DONE][:steps].flatten().tolist() == [False] * (steps - 1) + [True]
            seen[int(episode[IDS][0])] = steps
    assert len(seen) == 40
    ends = list(seen.values())
    assert ends[:3] == [3, 4, 5]
    assert collector.frames == sum(ends)


def test_an_episode_that_has_no_end_is_told_of_while_it_is_waited_for(monkeypatch):
    monkeypatch.setattr("envkit.collectors.trajectories._LONG", 96)
    collector = SyncDataCollector(lambda: Count(130), still, trajs_per_batch=1)

    with pytest.warns(
        UserWarning, match=r"not ended within 96 steps.*max_frames_per_traj="
    ) as told:
        batch = collector.next()

    assert len(told) == 1 and batch.shape == (1, 130)


def test_where_that_is_an_error_no_step_is_lost_or_repeated(monkeypatch):
    monkeypatch.setattr("envkit.collectors.trajectories._LONG", 96)
    collector = SyncDataCollector(lambda: Count(130), still, trajs_per_batch=1)

    with pytest.raises(UserWarning, match="not ended within 96 steps"):
        collector.next()

    assert collector.next()["count"].flatten().tolist() == list(range(130))


def test_whole_episodes_can_come_one_after_the_other():
    collector = SyncDataCollector(two, trajs_per_batch=1, traj_format="cat", total_frames=15)

    episodes = list(collector)

    assert [episode.batch_size for episode in episodes] == [(5,)] * 3
    assert [episode[IDS].unique().item() for episode in episodes] == [0, 1, 2]


@pytest.mark.parametrize("use", [lambda env: None, lambda env: env.rollout(3)], ids=["", "used"])
def test_what_begins_anew_ends_unfinished_episodes_of_whole_batches_by_truncation(use):
    collector = SyncDataCollector(lambda: Count(40).add_truncated_keys(), trajs_per_batch=1)
    whole = collector.next()
    assert whole[DONE].sum() == 1

    if use(collector.env) is None:
        collector.reset()
        cut = collector.next()
    else:
        with pytest.warns(UserWarning, match="begins new trajectories"):
            cut = collector.next()

    assert cut["next", "truncated"].flatten()[-1] and not cut["next", "terminated"].any()
    assert cut[IDS].unique().item() == 1 and cut.batch_size[1] == 64 - 40
    assert collector.next()[IDS].unique().item() == 2


@pytest.mark.parametrize(
    "use",
    [
        lambda env: env.rollout(2),
        lambda env: env.reset(),
        lambda env: env.step(env.rand_action(env.reset())),
        lambda env: SyncDataCollector(env, still, frames_per_batch=4).next(),
    ],
    ids=["rollout", "reset", "step", "collector"],
)
def test_an_env_that_other_code_has_used_begins_new_trajectories(use):
    env = two()
    collector = SyncDataCollector(env, still, frames_per_batch=4)
    first = collector.next()

    use(env)
    with pytest.warns(UserWarning, match="by other code.*begins new trajectories"):
        batch = collector.next()

    assert not (set(first[IDS].flatten().tolist()) & set(batch[IDS].flatten().tolist()))
    assert batch["count"].squeeze(-1).tolist() == [[0, 1]] * 2 and collector.frames == 8
    after = collector.next()  # without a warning
    assert torch.equal(after["count"][:, 0], batch["next", "count"][:, -1])


@pytest.mark.parametrize("around", [lambda env: env, lambda env: TransformedEnv(env, RewardSum())])
def test_an_env_that_is_seeded_before_the_first_batch_begins_with_that_seed(around):
    pushes = torch.nn.Linear(3, 1)

    def first_batch(*, seeds_before):
        env = around(GymEnv("Pendulum-v1"))
        if seeds_before:
            env.set_seed(3)
        with SyncDataCollector(env, pushes, frames_per_batch=8) as collector:
            if not seeds_before:
                env.set_seed(3)
            return collector.next()

    one, other = first_batch(seeds_before=True), first_batch(seeds_before=False)

    assert torch.equal(one["observation"], other["observation"])


def test_an_env_that_is_seeded_between_batches_begins_new_trajectories():
    env = GymEnv("Pendulum-v1")
    with SyncDataCollector(env, torch.nn.Linear(3, 1), frames_per_batch=8) as collector:
        first = collector.next()
        env.set_seed(3)
        with pytest.warns(UserWarning, match="seeded or loaded by other code"):
            batch = collector.next()

    assert not (set(first[IDS].tolist()) & set(batch[IDS].tolist()))


def test_a_reset_of_some_rows_of_an_env_that_other_code_has_used_is_one_of_all():
    env = two()
    collector = SyncDataCollector(env, still, frames_per_batch=4)
    collector.next()
    env.rollout(3)

    with pytest.raises(ArgumentError, match="must be a bool mask"):
        collector.reset(torch.tensor([True]))
    with pytest.warns(UserWarning, match="begins new trajectories"):
        collector.reset(torch.tensor([True, False]))

    assert collector.next()["count"].squeeze(-1).tolist() == [[0, 1]] * 2


def test_a_state_saved_after_other_code_has_used_the_env_begins_new_trajectories_too():
    collectors = [
        SyncDataCollector(Told(5), still, frames_per_batch=3, total_frames=30) for _ in range(2)
    ]
    saved, loaded = collectors
    saved.next()
    saved.env.rollout(2)
    with pytest.warns(UserWarning, match="begins new trajectories"):
        state = saved.state_dict()
    loaded.load_state_dict(state)

    one, other = saved.next(), loaded.next()

    assert one["count"].flatten().tolist() == [0, 1, 2] and one[IDS].unique().tolist() == [1]
    assert_same(one, other)


def drawn(params, observation, key):
    return jax.random.uniform(key, observation.shape, minval=-1.0)


@pytest.mark.parametrize("policy", [None, JaxPolicy(drawn)])
def test_what_programs_draw_does_not_depend_on_where_batches_are_cut(policy):
    """Random actions, and a policy's own draws: as in a rollout, also after a resume and beside other runs."""
    env = jax_rows(2, limit=5)
    env.set_seed(0)
    whole = env.rollout(12, policy, break_when_any_done=False)

    for steps in (4, 12):
        collector = SyncDataCollector(
            lambda: jax_rows(2, limit=5), policy, frames_per_batch=2 * steps, seed=0
        )
        batches = []
        for _ in range(12 // steps):
            batches.append(collector.next())
            collector.env.rollout(4, break_when_any_done=False)
            other = SyncDataCollector(
                lambda: jax_rows(2, limit=5), policy, frames_per_batch=2 * steps
            )
            other.load_state_dict(collector.state_dict())
            collector = other
        joined = torch.cat(batches, -1)
        for key in ("action", "observation", ("next", "observation"), DONE):
            assert torch.equal(joined[key], whole[key]), (steps, key)


def test_a_seed_that_is_set_between_batches_decides_the_draws_that_follow():
    def collected(seed):
        collector = SyncDataCollector(lambda: jax_rows(2), frames_per_batch=8, seed=0)
        first = collector.next()
        collector.env.set_seed(seed)
        return first["action"], collector.next()["action"]

    (first, after), (again, same), (_, other) = collected(1), collected(1), collected(2)

    assert torch.equal(first, again) and torch.equal(after, same)
    assert not torch.equal(after, other)


def test_an_env_that_was_left_as_it_was_or_keeps_nothing_is_gone_on_with():
    stateful, stateless = Told(5), jax_rows(2)
    collectors = [SyncDataCollector(env, frames_per_batch=4) for env in (stateful, stateless)]
    collectors[1].set_seed(0)  # with which neither row comes to its end in these steps
    first = [collector.next() for collector in collectors]

    evaluate(stateful, still, 2)
    stateless.rollout(3)

    for collector, before in zip(collectors, first, strict=True):
        key = "count" if "count" in before.keys() else "observation"
        assert torch.equal(collector.next()[key][..., 0, :], before["next", key][..., -1, :])


def test_a_reset_by_row_begins_new_trajectories_there_alone():
    collector = SyncDataCollector(two, frames_per_batch=4)
    collector.next()

    collector.reset(torch.tensor([False, True]))
    batch = collector.next()

    assert batch["count"].squeeze(-1).tolist() == [[2, 3], [0, 1]]
    assert batch[IDS].tolist() == [[0, 0], [2, 2]]


def test_a_reset_before_anything_was_collected_leaves_the_numbers_alone():
    collector = SyncDataCollector(two, frames_per_batch=4)

    collector.reset()

    assert collector.next()[IDS].tolist() == [[0, 0], [1, 1]]


def test_seeds_give_the_same_batches_again():
    def run(seed):
        collector = SyncDataCollector(lambda: SerialEnv(2, Chaos), still, frames_per_batch=6)
        following = collector.set_seed(seed)
        return following, torch.cat([collector.next() for _ in range(3)], -1)

    (after, first), (_, again), (_, other) = run(3), run(3), run(4)

    assert after == SerialEnv(2, Chaos).set_seed(3)
    assert_same(first, again)
    assert not torch.equal(first["draw"], other["draw"])


def test_the_exploration_type_holds_while_the_policy_acts():
    seen = []

    def policy(td):
        seen.append((exploration_type(), torch.is_grad_enabled()))
        return still(td)

    for kind in (ExplorationType.RANDOM, ExplorationType.MODE):
        SyncDataCollector(Count, policy, frames_per_batch=1, exploration_type=kind).next()

    assert seen == [(ExplorationType.RANDOM, False), (ExplorationType.MODE, False)]


def test_batches_stay_as_they_are_and_what_is_written_into_them_moves_nothing():
    collector = SyncDataCollector(two, still, frames_per_batch=4)
    first = collector.next()
    kept = first.clone()

    first.apply_(lambda leaf: leaf.zero_() if leaf.dtype == torch.bool else leaf.fill_(77))
    second = collector.next()
    collector.next()

    assert second["count"].squeeze(-1).tolist() == [[2, 3], [2, 3]]
    assert kept["next", "count"].squeeze(-1).tolist() == [[1, 2], [1, 2]]


def test_a_module_with_names_writes_them_and_private_entries_go():
    def twofold(count):
        return torch.zeros_like(count), torch.ones_like(count), count * 2

    policy = TensorDictModule(twofold, ["count"], ["action", "_private", "logits"])
    collector = SyncDataCollector(two, policy, frames_per_batch=4)

    batch = collector.next()

    assert "_private" not in batch.keys()
    assert torch.equal(batch["logits"], batch["count"] * 2)


def test_a_policy_that_is_trained_in_place_acts_so_at_once_and_is_counted():
    module = torch.nn.Linear(1, 1)
    policy = TensorDictModule(
        lambda count: (module(count.float()) * 0 + module.bias).long(), ["count"], ["action"]
    )
    collector = SyncDataCollector(
        lambda: Count(50), policy, frames_per_batch=2, track_policy_version=True
    )
    seen = []
    for value in (1.0, 2.0):
        torch.nn.init.constant_(module.bias, value)
        collector.update_policy_weights_()
        batch = collector.next()
        seen.append((batch["action"].flatten().tolist(), batch["policy_version"].tolist()))

    assert seen == [([1, 1], [1, 1]), ([2, 2], [2, 2])]
    assert collector.policy_version == 2


def test_weights_are_given_by_name_as_a_td_or_a_module():
    policy = torch.nn.Linear(4, 2)
    collector = SyncDataCollector(lambda: GymEnv("CartPole-v1"), policy, frames_per_batch=2)
    other = torch.nn.Linear(4, 2)

    for weights in (other, other.state_dict(), TensorDict.from_module(other)):
        torch.nn.init.zeros_(policy.weight)
        collector.update_policy_weights_(weights)

        assert torch.equal(policy.weight, other.weight)


def follow(params, observation, key):
    return observation * 0 + params["layer"]["by"]


def by(number: float) -> dict:
    return {"layer": {"by": np.float32(number)}}


def test_a_policy_in_jax_takes_new_params_and_goes_on_with_them_after_a_resume():
    policy = JaxPolicy(follow, by(0.25))
    collector = SyncDataCollector(lambda: jax_rows(2), policy, frames_per_batch=4)
    acted = [collector.next()["action"]]

    collector.update_policy_weights_(by(0.5))
    acted.append(collector.next()["action"])
    state = collector.state_dict()
    collector.update_policy_weights_(JaxPolicy(follow, by(0.75)))
    acted.append(collector.next()["action"])
    collector.load_state_dict(state)
    acted.append(collector.next()["action"])
    collector.update_policy_weights_()
    acted.append(collector.next()["action"])

    assert [action.unique().tolist() for action in acted] == [[0.25], [0.5], [0.75], [0.5], [0.25]]
    assert collector.policy.params == by(0.25) and policy.params == by(0.25)


@pytest.mark.parametrize("params", [{"layer": 1.0}, {"layer": {"by": np.zeros(2)}}, {}])
def test_params_of_another_form_are_refused(params):
    policy = JaxPolicy(follow, by(0.25))
    collector = SyncDataCollector(lambda: jax_rows(2), policy, frames_per_batch=4)

    with pytest.raises(ArgumentError, match=r"of another architecture.*\['layer'\]\['by'\]"):
        collector.update_policy_weights_(params)


def test_a_state_of_another_batch_is_refused():
    saved = SyncDataCollector(lambda: jax_rows(2), frames_per_batch=4)
    saved.next()
    other = SyncDataCollector(lambda: jax_rows(3), frames_per_batch=6)

    with pytest.raises(ResumeError, match=r"of batch size \(2,\), but this one has \(3,\)"):
        other.load_state_dict(saved.state_dict())
    assert other.next().shape == (3, 2)


def test_frames_are_counted_to_their_end_and_then_there_is_no_more():
    collector = SyncDataCollector(two, frames_per_batch=4, total_frames=8)

    batches = list(collector)

    assert len(batches) == 2 and collector.frames == 8 and collector.iter == 2
    assert collector.next() is None and list(collector) == []


def test_statistics_say_what_was_collected_and_where_time_went():
    collector = SyncDataCollector(two, frames_per_batch=20, storing_device="cpu")
    collector.next()

    found = collector.stats()

    assert (found["frames"], found["batches"], found["episodes"]) == (20, 1, 4)
    spent = {name: value for name, value in found.items() if name.startswith("seconds/")}
    assert set(spent) == {"seconds/envs", "seconds/policy", "seconds/transfer"}
    assert min(spent.values()) > 0


def test_progress_shows_returns_and_lengths(capsys):
    collector = SyncDataCollector(two, frames_per_batch=20, total_frames=20, progress=True)

    list(collector)
    collector.shutdown()

    shown = capsys.readouterr().err
    assert "20/20" in shown and "return=5" in shown and "length=5" in shown


@pytest.mark.parametrize("is_shown_before", [True, False])
def test_after_a_resume_progress_goes_on_and_counts_no_episode_in_part(capsys, is_shown_before):
    options = {"frames_per_batch": 6, "total_frames": 18}
    first = SyncDataCollector(Told, still, progress=is_shown_before, **options)
    first.next()
    state = first.state_dict()
    first.shutdown()
    capsys.readouterr()

    second = SyncDataCollector(Told, still, progress=True, **options)
    second.load_state_dict(state)
    second.next()
    second.shutdown()

    shown = capsys.readouterr().err
    assert "12/18" in shown
    if is_shown_before:
        assert "return=5" in shown and "length=5" in shown
    else:
        assert "return" not in shown  # of the episode that ends here the first step was not seen


def test_what_post_processes_is_moved_to_where_batches_are():
    class Scales(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("by", torch.ones(()))

        def forward(self, td):
            return td

    scales = Scales()
    collector = SyncDataCollector(two, frames_per_batch=4, storing_device="meta", postproc=scales)

    assert scales.by.is_meta and collector.next().device.type == "meta"


def test_after_shutdown_there_is_nothing_and_twice_is_once():
    env = GymEnv("CartPole-v1")
    with SyncDataCollector(env, frames_per_batch=2) as collector:
        collector.next()
    collector.shutdown()

    with pytest.raises(ClosedEnvError, match="shut down"):
        collector.next()


@pytest.mark.parametrize(
    "call",
    [
        lambda collector: collector.next(),
        lambda collector: list(collector),
        lambda collector: collector.reset(),
        lambda collector: collector.set_seed(0),
        lambda collector: collector.state_dict(),
        lambda collector: collector.load_state_dict({}),
        lambda collector: collector.update_policy_weights_(),
    ],
    ids=["next", "iter", "reset", "set_seed", "state_dict", "load_state_dict", "weights"],
)
def test_a_collector_that_was_shut_down_says_so(call):
    env = two()  # which a reset would start again
    collector = SyncDataCollector(env, frames_per_batch=4)
    collector.next()
    collector.shutdown()

    with pytest.raises(ClosedEnvError, match=r"this SyncDataCollector was shut down. Build a new"):
        call(collector)


ENDINGS = {
    "shutdown": lambda collector: collector.shutdown(),
    "with": lambda collector: collector.__exit__(None, None, None),
    "async_shutdown": lambda collector: collector.async_shutdown(),
}


@pytest.mark.parametrize("ends", ENDINGS)
@pytest.mark.parametrize("limit", [None, 3])
def test_an_env_of_the_caller_serves_one_collector_after_the_other(ends, limit):
    """It stays open, whatever the collector has put around it; one that the collector made is closed."""
    env = two()
    for _ in range(2):
        collector = SyncDataCollector(env, frames_per_batch=8, max_frames_per_traj=limit)
        assert collector.next()["count"].squeeze(-1)[:, 0].tolist() == [0, 0]
        ENDINGS[ends](collector)
        assert not env.is_closed

    collector = SyncDataCollector(two, frames_per_batch=8, max_frames_per_traj=limit)
    collector.next()
    ENDINGS[ends](collector)
    assert collector.env.is_closed
    env.close()


def test_a_pool_of_the_caller_keeps_its_workers_and_can_be_closed_with_the_collector(opened):
    pool = opened(ParallelEnv(2, lambda: Count(5)))
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    with Collector(pool, frames_per_batch=4, replay_buffer=buffer) as collector:
        collector.next()
        workers = pool.worker_pids

    assert workers and pool.worker_pids == workers
    second = Collector(pool, frames_per_batch=4)
    second.next()
    second.shutdown(close_env=True)
    assert pool.is_closed


@pytest.mark.parametrize("sync", [True, False])
def test_envs_that_workers_get_copies_of_stay_open(sync):
    env = Count(5)
    with Collector([env], frames_per_batch=4, backend="process", sync=sync) as collector:
        collector.next()

    assert not env.is_closed and env.rollout(2).shape == (2,)


def test_a_collector_is_used_by_one_thread_at_a_time():
    acting, asked = threading.Event(), threading.Event()

    def waits(td):
        acting.set()
        assert asked.wait(30)
        return still(td)

    collector = SyncDataCollector(lambda: Count(9), waits, frames_per_batch=3)
    batches: list = []
    thread = threading.Thread(target=lambda: batches.append(collector.next()), name="first")
    thread.start()
    assert acting.wait(30)
    try:
        for call in (collector.next, collector.state_dict, collector.reset):
            with pytest.raises(BusyError, match="SyncDataCollector is in use by thread 'first'"):
                call()
    finally:
        asked.set()
        thread.join()

    batches.append(collector.next())

    assert torch.cat(batches)["count"].flatten().tolist() == list(range(6))


def test_the_front_door_gives_the_class_that_fits():
    collector = Collector(Count, frames_per_batch=2)

    assert type(collector) is SyncDataCollector
    assert isinstance(collector, Collector)


class Remembers(TensorDictModule):
    """Counts its own calls in an episode, in a hidden state at the root."""

    def __init__(self):
        super().__init__(
            lambda h: (torch.zeros((*h.shape[:-1], 1), dtype=torch.int64), h + 1),
            ["h"],
            ["action", ("next", "h")],
        )

    def make_tensordict_primer(self):
        from envkit import TensorDictPrimer, Unbounded

        return TensorDictPrimer(h=Unbounded((1,)), expand_specs=True)


def test_a_recurrent_policy_gets_what_it_needs_and_begins_anew_with_an_episode():
    collector = SyncDataCollector(
        lambda: SerialEnv(2, lambda: Count(3)), Remembers(), frames_per_batch=8
    )

    data = torch.cat([collector.next(), collector.next()], -1)

    assert torch.equal(data["h"], data["count"].float())
    assert data["is_init"].squeeze(-1)[0].tolist() == [True, False, False] * 2 + [True, False]


# ----------------------------------------------------------------------------- stateless envs


def test_random_batches_of_a_stateless_env_are_one_program_without_its_state():
    collector = SyncDataCollector(jax_rows(3, limit=4), frames_per_batch=18)

    data = torch.cat([collector.next(), collector.next()], -1)

    assert "state" not in data.keys() and "state" not in data["next"].keys()
    assert data[IDS].shape == (3, 12)
    assert data[DONE].squeeze(-1)[:, :4].any(-1).all()
    goes_on = data[IDS][:, 1:] == data[IDS][:, :-1]
    assert torch.equal(
        data["observation"][:, 1:][goes_on], data["next", "observation"][:, :-1][goes_on]
    )
    assert collector.env.traces["unroll"] == 1


def test_a_compiled_policy_gives_what_unroll_gives():
    policy = JaxPolicy(lambda params, observation, key: observation * 0.1, None)
    ours, theirs = jax_rows(3, limit=4), jax_rows(3, limit=4)
    collector = SyncDataCollector(ours, policy, frames_per_batch=15)
    collector.set_seed(1)
    theirs.set_seed(1)

    first, following = theirs.unroll(theirs.reset(), 5, policy)
    second, _ = theirs.unroll(following, 5, policy)

    for wanted in (first, second):
        batch = collector.next()
        assert_same(batch.exclude(IDS), wanted)


def test_a_torch_policy_leaves_the_state_out_too_unless_it_is_to_be_recorded():
    net = torch.nn.Linear(1, 1)

    without = SyncDataCollector(jax_rows(2), net, frames_per_batch=4).next()
    with_it = SyncDataCollector(jax_rows(2), net, frames_per_batch=4, record_state=True).next()

    assert "state" not in without.keys() and "state" in with_it.keys()
    assert "state" in with_it["next"].keys()


def test_the_next_batch_is_made_ahead_with_weights_one_update_older():
    policy = JaxPolicy(lambda params, observation, key: observation * 0, None)
    collector = SyncDataCollector(
        jax_rows(2),
        policy,
        frames_per_batch=4,
        prefetch=1,
        track_policy_version=True,
        total_frames=12,
    )
    versions = []
    for batch in collector:
        versions.append(batch["policy_version"].unique().tolist())
        collector.update_policy_weights_()

    assert versions == [[0], [0], [1]]


def test_prefetch_gives_the_batches_that_come_without_it():
    def run(prefetch):
        collector = SyncDataCollector(jax_rows(2, limit=3), frames_per_batch=4, prefetch=prefetch)
        collector.set_seed(0)
        return torch.cat([collector.next() for _ in range(3)], -1)

    assert_same(run(1), run(0))


def test_split_batches_are_those_of_split_trajectories():
    plain = SyncDataCollector(lambda: Count(5), still, frames_per_batch=7)
    split = SyncDataCollector(lambda: Count(5), still, frames_per_batch=7, split_trajs=True)

    assert_same(split.next(), split_trajectories(plain.next()))
