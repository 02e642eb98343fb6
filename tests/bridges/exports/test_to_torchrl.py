"""Envs of envkit in TorchRL's hands: its checks, rollouts, collectors, transforms and modules."""

from __future__ import annotations

import copy
import pickle
import sys
from contextlib import closing

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from envkit import GymEnv, PendulumEnv, SerialEnv, StepCounter, TicTacToeEnv, VmasEnv
from envkit.errors import ArgumentTypeError, ClosedEnvError, InputError, MissingLibraryError
from envkit_bridges.exports.torchrl import to_torchrl
from tests.bridges.compare import assert_same
from tests.zoo.envs import Count
from tests.zoo.kinds import KINDS, Follow, make_gym
from tests.zoo.shaped_envs import Groups, Growing, Several, Wordy

IN_PROCESSES = ("ray", "ray stateless", "parallel stateless")  # as "parallel", and dear to start
CHEAP = [name for name in KINDS if not {"jax", "JAX", "JaxEnv", "parallel"} & {*name.split()}]
TRIED = [
    name if name in CHEAP else pytest.param(name, marks=pytest.mark.slow)
    for name, kind in KINDS.items()
    if name not in IN_PROCESSES
    and not kind.around.banked  # which begin with a reward of the player's
]


@pytest.fixture(scope="module")
def theirs():
    """TorchRL's module of envs, which takes seconds to import."""
    to_torchrl(Count())
    return sys.modules["torchrl.envs"]


# ------------------------------------------------------------------------------- the same episodes


@pytest.mark.parametrize("name", TRIED)
def test_a_rollout_of_torchrl_is_bit_for_bit_one_of_envkit(name):
    with closing(KINDS[name].make()) as ours, closing(KINDS[name].make()) as other:
        view, options = to_torchrl(other), {"break_when_any_done": False}
        assert ours.set_seed(5) == view.set_seed(5)

        data = ours.rollout(40, Follow(ours), **options)
        shown = view.rollout(40, Follow(ours), **options)

    assert data["next", "done"].any()
    assert_same(data, shown)


@pytest.mark.parametrize("kind", [Groups, Several, Wordy, Growing])
def test_groups_words_and_growing_shapes_pass_the_checks_of_torchrl(theirs, kind):
    view = to_torchrl(kind())

    theirs.check_env_specs(view, return_contiguous=kind is not Growing)
    data = view.rollout(12, break_when_any_done=False, return_contiguous=kind is not Growing)

    assert data.shape == (12,)
    assert kind is not Wordy or data["word"][:3] == ["none", "one", "two"]


def test_random_actions_are_those_of_the_env(theirs):
    ours, other = (SerialEnv(2, make_gym) for _ in range(2))
    ours.set_seed(3)
    view = to_torchrl(other)
    view.set_seed(3)

    drawn, shown = ours.rollout(9), view.rollout(9)

    assert_same(drawn, shown)
    ours.close()
    view.close()


def test_random_actions_below_a_transform_are_of_the_options_that_the_data_allows(theirs):
    view = to_torchrl(TicTacToeEnv())
    env = theirs.TransformedEnv(view, theirs.StepCounter())
    view.set_seed(0)

    games = [env.rollout(9) for _ in range(5)]

    assert all(game["mask"].gather(-1, game["action"][..., None]).all() for game in games)


def test_a_transform_of_torchrl_may_change_the_action(theirs):
    env = theirs.TransformedEnv(
        to_torchrl(PendulumEnv()), theirs.ActionDiscretizer(3, out_action_key="option")
    )

    theirs.check_env_specs(env)

    pushed = {round(push, 2) for push in env.rollout(20)["action"].flatten().tolist()}
    assert len(pushed) > 1 and pushed <= {-1.33, 0.0, 1.33}  # the middles of thirds


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))])
def test_a_copy_is_a_view_of_a_copy(copied):
    view = to_torchrl(PendulumEnv())
    view.set_seed(3)

    other = copied(view)
    first, second = view.rollout(4), other.rollout(4)

    assert other.env is not view.env
    assert_same(first, second)


def test_a_root_of_torchrl_keeps_the_action():
    view = to_torchrl(SerialEnv(2, Count))

    data, root = view.step_and_maybe_reset(view.rand_action(view.reset()))

    assert torch.equal(root["action"], data["action"])
    view.close()


# --------------------------------------------------------------------------- masks and batch sizes


def test_a_step_mask_and_a_reset_mask_select_rows():
    view = to_torchrl(SerialEnv(3, Count))
    td = view.rand_action(view.reset())

    stepped = view.step(td.set("_step", torch.tensor([True, False, True])))
    root = view.step_mdp(stepped.clone())
    root = view.reset(root.set("_reset", torch.tensor([[True], [False], [False]])))

    assert stepped["next", "count"].flatten().tolist() == [1, 0, 1]
    assert stepped["next", "reward"].flatten().tolist() == [1, 0, 1]
    assert root["count"].flatten().tolist() == [0, 0, 1]
    view.close()


def test_what_is_done_waits_for_the_rest_where_torchrl_freezes_it():
    view = to_torchrl(SerialEnv(2, [Count, lambda: Count(3)]))

    data = view.rollout(9, break_when_any_done=False, break_when_all_done=True)

    assert data["next", "count"][..., 0].tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 3, 3]]
    view.close()


def test_an_env_that_is_not_locked_stays_so_in_any_batch():
    view = to_torchrl(PendulumEnv(batch_size=[2]))

    root = view.reset(TensorDict(batch_size=[4]))
    data = view.rollout(3, tensordict=root, auto_reset=False)

    assert not view.batch_locked
    assert to_torchrl(SerialEnv(1, Count)).batch_locked
    assert not view.batch_locked  # theirs keeps it in the class
    assert data.shape == (4, 3)


def test_an_episode_begins_at_the_state_that_is_given():
    env = PendulumEnv()
    view = to_torchrl(env)
    td = env.reset(TensorDict(batch_size=[2]))

    again = view.reset(td.clone(), set_state=True)
    other = view.reset(td.clone(), set_state=False)

    assert all(torch.equal(again[key], td[key]) for key in env.state_keys)
    assert not torch.equal(other["th"], td["th"])


# ---------------------------------------------------------------------------- TorchRL's other parts


@pytest.mark.parametrize("name", ["serial", "custom stateless", "mixed of stateless"])
def test_transforms_of_torchrl_run_on_it(theirs, name):
    view = to_torchrl(KINDS[name].make())
    env = theirs.TransformedEnv(
        view, theirs.Compose(theirs.StepCounter(3), theirs.RewardSum(), theirs.InitTracker())
    )
    env.set_seed(0)

    theirs.check_env_specs(env)
    data = env.rollout(20, break_when_any_done=False)

    ended = data["next", "step_count"] == 3
    assert data["next", "truncated"][ended].all()
    assert torch.equal(data["is_init"], data["step_count"] == 0)
    assert torch.equal(
        data["next", "episode_reward"] - data["episode_reward"], data["next", "reward"]
    )
    env.close()


def test_a_collector_and_a_buffer_of_torchrl_take_its_steps(theirs):
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyTensorStorage(60), batch_size=8)
    collector = Collector(
        to_torchrl(SerialEnv(2, Count)), None, frames_per_batch=20, total_frames=60
    )

    counts = []
    for batch in collector:
        buffer.extend(batch.reshape(-1))
        counts.append(batch["next", "count"][0].flatten().tolist())
    collector.shutdown()

    assert counts == [[1, 2, 3, 4, 5] * 2] * 3
    assert len(buffer) == 60
    assert torch.equal((sample := buffer.sample())["count"] + 1, sample["next", "count"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "backend", ["threading", pytest.param("multiprocessing", marks=pytest.mark.slow)]
)
def test_an_asynchronous_collector_of_torchrl_batches_what_they_observe(theirs, backend):
    from torchrl.collectors import AsyncBatchedCollector

    policy = TensorDictModule(
        lambda observation: torch.nn.functional.one_hot((observation[..., 2] > 0).long(), 2),
        in_keys=["observation"],
        out_keys=["action"],
    )
    collector = AsyncBatchedCollector(
        [one_pole] * 2,
        policy=policy,
        frames_per_batch=20,
        total_frames=40,
        env_backend=backend,
        transport="driver",
    )

    data = torch.cat([batch.clone() for batch in collector])
    collector.shutdown()

    assert data["env_index"].unique().tolist() == [0, 1]
    for row in range(2):
        steps = data[data["env_index"] == row]
        assert steps["observation"][1:].equal(steps["next", "observation"][:-1])
        assert steps["action"].argmax(-1).equal((steps["observation"][:, 2] > 0).long())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_processes_of_torchrl_step_them(theirs):
    from torchrl.collectors import MultiSyncCollector

    collector = MultiSyncCollector(
        [one_pole, one_pole], None, frames_per_batch=20, total_frames=40, cat_results="stack"
    )

    batches = [batch.clone() for batch in collector]
    collector.shutdown()

    assert [batch.shape for batch in batches] == [(2, 10)] * 2
    assert (batches[0]["next", "reward"] == 1).all()


def one_pole():
    return to_torchrl(GymEnv("CartPole-v1"))


def test_an_actor_of_torchrl_is_made_for_its_action_spec(theirs):
    from torchrl.modules import QValueActor

    view = to_torchrl(SerialEnv(2, make_gym))
    actor = QValueActor(torch.nn.Linear(3, 4), spec=view.action_spec, in_keys=["observation"])

    data = view.rollout(4, actor)

    assert view.action_spec.is_in(data["action"][:, 0])
    view.close()


def test_torchrls_batched_env_is_made_of_them(theirs):
    env = theirs.SerialEnv(2, lambda: to_torchrl(Count()))

    theirs.check_env_specs(env)

    assert env.rollout(9, break_when_any_done=False)["next", "count"].max() == 5
    env.close()


# ---------------------------------------------------------------------------- state, place and life


def test_its_state_dict_is_that_of_the_env():
    view = to_torchrl(PendulumEnv())
    view.set_seed(1)
    state = view.state_dict()
    first = view.rollout(4)

    view.load_state_dict(state)

    assert_same(first, view.rollout(4))


def test_it_moves_with_its_env():
    env = PendulumEnv()
    view = to_torchrl(env)

    moved = view.to("cpu")

    assert moved is view
    assert env.device == view.device == view.action_spec.device == torch.device("cpu")


def test_view_and_env_are_closed_together():
    env = SerialEnv(1, Count)
    view = to_torchrl(env)
    view.close()

    assert env.is_closed and view.is_closed
    view.close()
    with pytest.raises(ClosedEnvError, match="not running"):
        env.close(raise_if_closed=True)


def test_a_view_that_is_dropped_leaves_its_env_open():
    env = SerialEnv(1, Count)

    to_torchrl(env).reset()

    assert not env.is_closed
    env.close()


# -------------------------------------------------------------------------------------- bad input


def test_an_action_that_does_not_fit_is_told_by_the_env():
    view = to_torchrl(SerialEnv(2, make_gym))
    td = view.reset().set("action", torch.zeros(2, 7))

    with pytest.raises(InputError, match=r"'action' has shape \(2, 7\)"):
        view.step_and_maybe_reset(td)

    view.close()


def test_public_attributes_are_those_of_the_env(theirs):
    with closing(to_torchrl(VmasEnv("balance", 2, n_agents=2))) as view:
        env = theirs.TransformedEnv(view, theirs.RewardSum())

        assert env.n_agents == 2 and env.group_map == {"agents": ["agent_0", "agent_1"]}
        assert not hasattr(view, "_numbers")
        with pytest.raises(AttributeError, match="nor its VmasEnv has an attribute 'n_agent'"):
            view.n_agent  # noqa: B018


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda theirs: theirs.PendulumEnv(),
            r"of type PendulumEnv, .*an env of TorchRL\. TorchRLWrapper\(env\)",
        ),
        (lambda theirs: StepCounter(), r"of type StepCounter, .*Pass GymEnv\("),
        (lambda theirs: "CartPole-v1", r"of type str, .*Pass GymEnv"),
    ],
)
def test_what_is_no_env_of_ours_is_refused(theirs, make, message):
    with pytest.raises(ArgumentTypeError, match=message):
        to_torchrl(make(theirs))


def test_a_missing_torchrl_is_told_with_the_extra_that_brings_it(monkeypatch):
    for name in ("torchrl", "torchrl.envs", "envkit_bridges.exports.torchrl_subclasses"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torchrl")

    class Hidden:
        def find_spec(self, name, *_):
            if name.partition(".")[0] == "torchrl":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])

    with pytest.raises(MissingLibraryError, match=r"'\.\[torchrl\]'"):
        to_torchrl(Count())
