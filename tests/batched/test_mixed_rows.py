"""Rollouts of mixed pools, recorded on rows: the data of the same pools stepped one by one, which a callback asks for."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit import (
    GymEnv,
    GymWrapper,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    SyncDataCollector,
    compile_policy,
)
from envkit.errors import StaleDataError, WorkerError
from tests.bridges.compare import assert_same
from tests.zoo.transforms import Walk

SECOND = {"both here": SerialEnv, "one in workers": ParallelEnv}


def walks(second=SerialEnv, rows=(2, 3)):
    return MixedEnv(
        [
            SerialEnv(rows[0], lambda: GymWrapper(Walk())),
            second(rows[1], lambda: GymWrapper(Walk())),
        ]
    )


@pytest.fixture(scope="module", params=SECOND)
def pair(request):
    envs = [walks(SECOND[request.param]) for _ in range(2)]
    yield envs
    for env in envs:
        env.close()


def one_by_one(env, data):
    """Ask for general steps."""


def chosen(place):
    return torch.nn.functional.one_hot((place.sum(-1) > 0).long(), 2)


def function(place, lamps, level):
    return chosen(place + lamps.sum(-1, keepdim=True))


def writing(td):
    """Carry a count beside the action."""
    count = td.get("count", torch.zeros(*td.batch_size, 1))
    td["next", "count"] = count + 1
    return td.set("count", count).set("action", chosen(td["place"]))


def leaving(td):
    """Write an entry beside the action in each step."""
    return td.set("seen", td["place"] * 2).set("action", chosen(td["place"]))


class Chosen(torch.nn.Module):
    def forward(self, place):
        return chosen(place)


def module():
    return TensorDictModule(Chosen(), ["place"], ["action"])


POLICIES = {
    "random": lambda: None,
    "a function": lambda: function,
    "one that writes under next": lambda: writing,
    "one that writes an entry": lambda: leaving,
    "a module": module,
    "a compiled module": lambda: compile_policy(module()),
}


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_recorded_rollouts_show_what_single_steps_show(pair, policy, stops):
    rollouts = []
    for env, callback in zip(pair, (None, one_by_one), strict=True):
        env.set_seed(3)
        with torch.no_grad():
            first = env.rollout(70, policy(), break_when_any_done=stops, callback=callback)
            again = env.rollout(9, policy(), break_when_any_done=False, callback=callback)
        rollouts += [first, again]

    assert env._rows_for_run() is not None
    assert_same(rollouts[0], rollouts[2])
    assert_same(rollouts[1], rollouts[3])


def test_after_a_recorded_rollout_rows_are_stepped_and_reset_alone(pair):
    results = []
    for env, callback in zip(pair, (None, one_by_one), strict=True):
        env.set_seed(3)
        data = env.rollout(12, break_when_any_done=False, callback=callback)
        root = env.step_mdp(data[:, -1]).clone()
        root["_step"] = torch.tensor([True, False, True, False, False])
        part = env.step(env.rand_action(root))
        masks = torch.tensor([False, True, False, False, True])[:, None]
        results.append((part, env.reset(env.step_mdp(part).set("_reset", masks))))

    assert_same(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])


def test_data_that_a_recorded_rollout_has_left_behind_is_refused(pair):
    env = pair[0]
    root = env.reset()
    env.rollout(3, break_when_any_done=False)

    with pytest.raises(StaleDataError, match="cannot go back"):
        env.rollout(3, auto_reset=False, tensordict=root, break_when_any_done=False)


@pytest.mark.parametrize("callback", [None, one_by_one])
def test_a_policy_that_resets_the_env_in_the_middle_leaves_stale_data(pair, callback):
    env = pair[0]

    def act(td):
        if td["state", "moment"].max() > first + 4:
            env.reset()
        return td.set("action", chosen(td["place"]))

    first = env.reset()["state", "moment"].max()
    with pytest.raises(StaleDataError, match="cannot go back"):
        env.rollout(9, act, break_when_any_done=False, callback=callback)

    data = env.rollout(5, break_when_any_done=False)
    began = data["next", "done"][:, :-1].long()
    passed = data["state", "moment"][:, 1:] - data["next", "state", "moment"][:, :-1]
    assert torch.equal(passed, began)


class Broken(Walk):
    """Fails in its third step."""

    def step(self, action):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 3:
            raise ValueError("broken")
        return super().step(action)


def test_a_member_that_fails_leaves_the_others_usable():
    env = MixedEnv(
        [SerialEnv(2, lambda: GymWrapper(Walk())), SerialEnv(1, lambda: GymWrapper(Broken()))]
    )
    env.reset()

    with pytest.raises(WorkerError, match="broken"):
        env.rollout(9, break_when_any_done=False)

    assert all(member.newest is None for member in env.members)
    assert env.rollout(4, break_when_any_done=False).shape == (3, 4)
    env.close()


def test_collected_batches_are_those_of_single_steps(pair):
    batches = []
    for env in pair:
        env.set_seed(5)
        collector = SyncDataCollector(
            env,
            function,
            frames_per_batch=40,
            total_frames=120,
            auto_register_policy_transforms=False,
        )
        batches.append([batch.exclude("collector") for batch in collector])

    for got, wanted in zip(*batches, strict=True):
        assert_same(got, wanted)


def test_other_members_go_step_by_step():
    counted = MixedEnv(
        [GymEnv("CartPole-v1", num_envs=2), SerialEnv(2, lambda: GymEnv("CartPole-v1"))]
    )
    data = counted.rollout(6, break_when_any_done=False)

    assert counted._rows_for_run() is None
    assert data.shape == (4, 6)
    counted.close()
