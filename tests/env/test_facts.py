"""Facts about an env: of every kind that holds others they are those of the envs inside, merged."""

from __future__ import annotations

import pickle
from dataclasses import fields

import pytest
import torch

from envkit import (
    ActionMask,
    AsyncEnvPool,
    Categorical,
    MixedEnv,
    ParallelEnv,
    PendulumEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from envkit.env.facts import Facts
from envkit.errors import SetStateError
from envkit_bridges.gym.gym_wrapper import GymWrapper
from envkit_bridges.gym.info import default_info_dict_reader
from tests.zoo.gym_envs import Informed

INFO, COUNT = ("x",), ("step_count",)


def counted():
    env = GymWrapper(Informed(length=5))
    env.set_info_dict_reader(default_info_dict_reader(["x"]))
    return TransformedEnv(env, StepCounter())


KINDS = {
    "itself": counted,
    "serial": lambda: SerialEnv(2, counted),
    "serial, tds": lambda: SerialEnv(2, counted, use_buffers=False),
    "parallel": lambda: ParallelEnv(2, counted),
    "part": lambda: SerialEnv(3, counted)[1:],
    "mixed": lambda: MixedEnv([SerialEnv(2, counted), SerialEnv(1, counted)]),
    "behind": lambda: TransformedEnv(SerialEnv(2, counted), StepCounter(step_count_key="again")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_policy_sees_neither_infos_nor_counters_of_any_kind(opened, kind):
    env, seen = opened(KINDS[kind]()), []

    def policy(*observations):
        seen.append(len(observations))
        return env.action_spec.zero().index_fill(-1, torch.tensor(0), 1)

    assert env._facts.infos == {INFO}
    assert COUNT in env._facts.bookkeeping
    env.rollout(2, policy=policy)
    assert set(seen) == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_the_class_inside_is_named_and_seeds_are_counted(opened, kind):
    env = opened(KINDS[kind]())

    assert env._facts.keeps_state == "GymWrapper"
    assert env._facts.no_start_at_state == ("IndexedEnv" if kind == "part" else "GymWrapper")
    assert env._facts.leaves_torch
    assert env._facts.seeds_taken == env.batch_size.numel()
    assert pickle.loads(pickle.dumps(env._facts)) == env._facts


def test_facts_follow_readers_and_transforms_that_are_added():
    base = GymWrapper(Informed(length=5))
    assert base._facts.infos == frozenset()
    base.set_info_dict_reader(default_info_dict_reader(["x"]))
    assert base._facts.infos == {INFO}

    env = TransformedEnv(base)
    assert env._facts.bookkeeping == frozenset()
    env.append_transform(StepCounter())
    assert env._facts.bookkeeping == {COUNT}


def test_a_method_that_is_assigned_to_an_env_is_seen_after_facts_were_read():
    env = PendulumEnv()
    outer = TransformedEnv(env)
    assert not (outer._facts.draws_own_actions or outer._draws_own_actions)

    env.rand_action = lambda tensordict=None: PendulumEnv.rand_action(env, tensordict)

    assert outer._draws_own_actions


EXAMPLE = Facts(
    infos=frozenset({("a",)}),
    bookkeeping=frozenset({("b",)}),
    action_masks=(("action", "mask"),),
    gives_nan=True,
    draws_own_actions=True,
    leaves_torch=True,
    works_elsewhere=True,
    seeds_taken=3,
    keeps_state="A",
    unsaved_state="B",
    no_start_at_state="C",
    steps_all_rows="D",
)


def test_every_fact_is_merged_but_those_that_the_batch_decides():
    merged = Facts.merged([Facts(), EXAMPLE, Facts()])

    left = {"recorded_inputs", "unrecorded", "steps_have_effects"}
    for field in fields(Facts):
        if field.name == "seeds_taken":
            assert merged.seeds_taken == 5
        elif field.name in left:
            assert getattr(merged, field.name) == field.default
        else:
            assert getattr(merged, field.name) == getattr(EXAMPLE, field.name) != field.default


def test_masks_of_unlike_envs_are_listed_once():
    masks = [Facts(action_masks=(("a", "m"),)), Facts(action_masks=(("a", "m"), ("b", "n")))]

    assert Facts.merged(masks).action_masks == (("a", "m"), ("b", "n"))


def test_a_chain_adds_the_masks_of_its_transforms():
    class Choosing(PendulumEnv):
        def __init__(self):
            super().__init__()
            self.action_spec = Categorical(2, shape=())
            shown = self.observation_spec.clone()
            shown["action_mask"] = Categorical(2, shape=(2,), dtype=torch.bool)
            self.observation_spec = shown

    assert TransformedEnv(Choosing(), ActionMask())._facts.action_masks == (
        ("action", "action_mask"),
    )


def test_a_mixed_env_waits_last_for_pools_that_work_elsewhere(opened):
    pool = opened(AsyncEnvPool([PendulumEnv] * 2))
    local = PendulumEnv(batch_size=[2])

    env = MixedEnv([pool, local])

    assert [member.env for member in env._in_order_of_waiting] == [local, pool]


def test_a_part_of_a_pool_cannot_begin_at_a_state(opened):
    part = opened(SerialEnv(3, PendulumEnv))[:2]
    root = part.fake_tensordict().exclude("next")

    with pytest.raises(SetStateError, match="IndexedEnv cannot begin"):
        part.reset(root, set_state=True)


def test_attributes_of_users_may_be_called_as_they_like():
    class Named(PendulumEnv):
        def __init__(self):
            super().__init__()
            self.runs, self.facts = 0, {}

    assert Named().rollout(2).shape == (2,)


def test_a_mixed_env_that_draws_by_the_base_class_draws_the_same():
    class Drawing(MixedEnv):
        def rand_action(self, tensordict=None):
            return super().rand_action(tensordict)

    drawn = []
    for kind in (MixedEnv, Drawing):
        env = kind([PendulumEnv(batch_size=[2]), PendulumEnv(batch_size=[1])])
        env.set_seed(0)
        drawn.append(env.rand_action(env.reset())["action"])

    assert torch.equal(*drawn)
