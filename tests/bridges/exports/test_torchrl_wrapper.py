"""TorchRL's envs as envs of envkit: equal to themselves, and at home among ours."""

from __future__ import annotations

import warnings
from contextlib import closing
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from envkit import (
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TransformedEnv,
    check_env_specs,
)
from envkit.errors import ArgumentError, ArgumentTypeError, InputError, WorkerError
from envkit_bridges.exports.torchrl import TorchRLWrapper, to_torchrl
from tests.bridges.compare import assert_same
from tests.zoo.shaped_envs import Groups, Several, Wordy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl import envs as theirs


def cart_pole():
    return theirs.GymEnv("CartPole-v1")


def counted():
    transforms = theirs.Compose(theirs.StepCounter(7), theirs.RewardSum(), theirs.InitTracker())
    return theirs.TransformedEnv(cart_pole(), transforms)


def two():
    return theirs.SerialEnv(2, cart_pole)


MAKERS = {"gym": cart_pole, "unlocked": theirs.PendulumEnv, "transformed": counted, "batch": two}


def act(td):
    """Balance a pole, or push a pendulum; nothing is drawn."""
    if "th" in td.keys():
        return td.set("action", td["th"].sin().unsqueeze(-1))
    side = (td["observation"][..., 2] > 0).long()
    return td.set("action", torch.nn.functional.one_hot(side, 2))


def same_batch(env):
    return {} if env.batch_locked else {"tensordict": env.reset(TensorDict(batch_size=[3]))}


@pytest.mark.parametrize("name", MAKERS)
def test_a_rollout_is_bit_for_bit_one_of_torchrl(name):
    with closing(MAKERS[name]()) as bare, closing(TorchRLWrapper(MAKERS[name]())) as env:
        check_env_specs(env)
        assert env.set_seed(4) == bare.set_seed(4)

        expected, data = (
            each.rollout(
                120,
                act,
                break_when_any_done=False,
                auto_reset=each.batch_locked,
                **same_batch(each),
            )
            for each in (bare, env)
        )

    assert name == "unlocked" or data["next", "done"].sum() > 1
    assert_same(expected, data)
    assert env.batch_locked == bare.batch_locked


@pytest.mark.parametrize("kind", [Groups, Several, Wordy])
def test_groups_and_words_come_through_both_ways(kind):
    env = TorchRLWrapper(to_torchrl(kind()))

    check_env_specs(env)

    assert_same(
        kind().rollout(4, lambda tensordict: tensordict.update(env.full_action_spec.zero())),
        env.rollout(4, lambda tensordict: tensordict.update(env.full_action_spec.zero())),
        without=("word",),
    )


def test_rows_of_a_batched_env_are_the_envs_alone():
    env, alone = SerialEnv(2, partial(wrapped, "gym")), wrapped("gym")
    env.set_seed(0)
    alone.set_seed(0)

    data = env.rollout(60, act, break_when_any_done=False)

    assert_same(alone.rollout(60, act, break_when_any_done=False), data[0])
    env.close()
    alone.close()


def wrapped(name: str) -> TorchRLWrapper:
    return TorchRLWrapper(MAKERS[name]())


def test_it_stands_among_our_envs_under_our_transforms_and_in_our_collector():
    env = MixedEnv([wrapped("batch"), SerialEnv(2, partial(wrapped, "gym"))])
    env = TransformedEnv(env, StepCounter(5))
    collector = SyncDataCollector(env, act, frames_per_batch=40, total_frames=80)

    batches = list(collector)
    collector.shutdown()

    assert [batch.shape for batch in batches] == [(4, 10), (4, 10)]
    assert (batches[0]["next", "step_count"].squeeze(-1) == torch.tensor([1, 2, 3, 4, 5] * 2)).all()


@pytest.mark.slow
def test_processes_step_it():
    env, here = (kind(2, partial(wrapped, "gym")) for kind in (ParallelEnv, SerialEnv))
    with closing(env), closing(here):
        env.set_seed(1)
        here.set_seed(1)

        data = env.rollout(50, act, break_when_any_done=False)

        assert_same(here.rollout(50, act, break_when_any_done=False), data)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_pool_of_torchrl_is_wrapped_too():
    with closing(TorchRLWrapper(theirs.ParallelEnv(2, cart_pole))) as env:
        check_env_specs(env)

        assert env.rollout(5, act, break_when_any_done=False).shape == (2, 5)


def test_random_actions_are_of_the_options_that_its_mask_allows():
    class Masked(theirs.EnvBase):
        """Allows the option that the count says."""

        def __init__(self):
            super().__init__()
            from torchrl.data import Binary, Categorical, Composite

            self.observation_spec = Composite(action_mask=Binary(4, shape=(4,), dtype=torch.bool))
            self.action_spec = Categorical(4)
            self.count = 0

        def _out(self):
            mask = torch.zeros(4, dtype=torch.bool)
            mask[self.count % 4] = True
            return TensorDict({"action_mask": mask})

        def _reset(self, tensordict, **kwargs):
            self.count = 0
            return self._out()

        def _step(self, tensordict):
            self.count += 1
            return self._out().update({"reward": torch.zeros(1), "done": torch.zeros(1).bool()})

        def _set_seed(self, seed):
            pass

    env = TorchRLWrapper(theirs.TransformedEnv(Masked(), theirs.ActionMask()))

    data = env.rollout(8)

    assert data["action"].tolist() == [0, 1, 2, 3] * 2


def test_an_episode_that_cannot_be_saved_is_named():
    assert wrapped("gym")._facts.unsaved_state == "GymEnv"
    assert wrapped("unlocked")._facts.unsaved_state is None


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.tensor([1, 0, 0]), r"shape \(3,\), but the env takes \(2,\)"),
        (torch.full((2,), float("nan")), "must be one-hot"),
        (torch.tensor([1j, 0]), "dtype torch.complex64"),
    ],
)
def test_an_action_that_cannot_be_one_is_refused_before_the_step(action, message):
    env = TorchRLWrapper(counted())
    td = env.reset()

    with pytest.raises(InputError, match=message):
        env.step(td.clone().set("action", action))

    assert env.step(td.set("action", torch.tensor([0.0, 1.0])))["next", "step_count"] == 1
    assert td["action"].dtype == torch.float32


def test_closing_closes_both():
    env = wrapped("gym")

    env.close()

    assert env.torchrl_env.is_closed


def test_where_one_of_ours_is_needed_the_wrapper_is_named():
    cure = r"Wrap it: TorchRLWrapper\(env\)"

    with pytest.raises(WorkerError, match=cure):
        SerialEnv(2, cart_pole).reset()
    for made in (cart_pole(), cart_pole):
        with pytest.raises(ArgumentTypeError, match=cure):
            SyncDataCollector(made, None, frames_per_batch=2, total_frames=2)


def test_an_env_that_resets_itself_within_a_step_is_refused():
    env = theirs.PendulumEnv()
    env.__dict__["_torchrl_native_autoreset"] = True

    with pytest.raises(ArgumentError, match=r"resets what is done within a step"):
        TorchRLWrapper(env)
