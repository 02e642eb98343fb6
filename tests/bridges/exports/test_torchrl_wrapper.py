"""TorchRL's envs as envs of envkit: equal to themselves, and at home among ours."""

from __future__ import annotations

import copy
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
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    InputError,
    NotResetError,
    WorkerError,
)
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


@pytest.mark.parametrize("name", ["gym", "unlocked", "transformed"])
def test_a_copy_goes_on_by_itself(name):
    with closing(TorchRLWrapper(MAKERS[name]())) as env:
        env.set_seed(0)
        root = env.reset()

        twin = copy.deepcopy(env)

        runs = [
            one.rollout(6, act, auto_reset=False, tensordict=root.clone()) for one in (env, twin)
        ]
        assert twin.torchrl_env is not env.torchrl_env
        assert_same(*runs)
        twin.close()
        assert not env.is_closed


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


class Herd(theirs.EnvBase):
    """Two agents in each of three rows go on by their actions; it steps all rows, whatever a mask says."""

    group_map = {"agents": ["a", "b"]}  # noqa: RUF012
    n_agents = 2

    def __init__(self):
        from torchrl.data import Bounded, Composite, Unbounded

        super().__init__(batch_size=[3])

        def spec(**entries):
            return Composite(agents=Composite(**entries, shape=[3, 2]), shape=[3])

        self.observation_spec = spec(place=Unbounded((3, 2, 1)))
        self.action_spec = spec(action=Bounded(0.5, 1.0, (3, 2, 1)))
        self.reward_spec = spec(reward=Unbounded((3, 2, 1)))

    def _reset(self, tensordict, **kwargs):
        fresh = torch.zeros(3, 2, 1)
        if tensordict is not None and "_reset" in tensordict.keys():
            fresh = torch.where(tensordict["_reset"].reshape(3, 1, 1), fresh, self.place)
        self.place = fresh
        return TensorDict({"agents": TensorDict({"place": fresh.clone()}, [3, 2])}, [3])

    def _step(self, tensordict):
        self.place = self.place + tensordict["agents", "action"]
        agents = TensorDict({"place": self.place.clone(), "reward": self.place.clone()}, [3, 2])
        return TensorDict({"agents": agents, "done": self.place.mean(1) > 2}, [3])

    def _set_seed(self, seed):
        pass


def test_attributes_are_those_of_the_env_inside():
    env = TransformedEnv(TorchRLWrapper(Herd()), StepCounter())

    assert env.group_map == {"agents": ["a", "b"]}
    assert env.n_agents == 2
    with pytest.raises(
        AttributeError, match="neither TorchRLWrapper nor its Herd has an attribute 'n_agent'"
    ):
        env.n_agent  # noqa: B018


def test_rows_that_a_mask_leaves_out_keep_their_values_where_the_env_moves_them():
    env = TorchRLWrapper(Herd())
    check_env_specs(env)
    root = env.rand_action(env.reset())
    mask = torch.tensor([True, False, True])

    following = env.step(root.clone().set("_step", mask))["next"]

    assert following["agents", "place"][1].eq(0).all()
    assert following["agents", "reward"][1].eq(0).all()
    assert following["agents", "place"][mask].gt(0).all()


def test_a_row_that_was_moved_against_a_mask_is_refused_until_it_is_reset():
    env = TorchRLWrapper(Herd())
    mask = torch.tensor([True, False, True])
    root = env.step_mdp(env.step(env.rand_action(env.reset()).set("_step", mask)))

    with pytest.raises(
        NotResetError, match=r"rows \[1\] .* Herd is one step ahead.*Reset these rows"
    ):
        env.step(env.rand_action(root.clone()))

    env.step(env.rand_action(root.clone()).set("_step", mask))
    fresh = env.reset(root.clone().set("_reset", ~mask.unsqueeze(-1)))
    assert env.step(env.rand_action(fresh))["next", "agents", "place"][1].gt(0).all()


def test_rows_that_have_ended_wait_for_the_others():
    env = TorchRLWrapper(Herd())
    env.set_seed(4)

    data = env.rollout(8, break_when_any_done=False, break_when_all_done=True)

    ended = data["next", "done"].squeeze(-1)
    assert ended[:, -1].all() and data.shape[1] <= 5
    waits = (ended.cumsum(-1) > 1)[:, 1:]
    assert waits.any() and not waits.all()
    following = data["next", "agents", "place"]
    assert following[:, 1:][waits].equal(following[:, :-1][waits])
    assert env.rollout(2).shape == (3, 2)


def test_an_env_that_honours_masks_goes_on():
    env = TorchRLWrapper(two())
    mask = torch.tensor([True, False])
    root = env.step_mdp(env.step(act(env.reset()).set("_step", mask)))

    data = env.step(act(root))

    assert data["next", "observation"].ne(root["observation"]).any(-1).all()
    env.close()
