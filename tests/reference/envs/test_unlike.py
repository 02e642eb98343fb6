"""Data that does not fit one tensor: sizes that change, agents that differ, tensorclasses, specs read off data."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torchrl.envs
from tensordict import TensorDict, tensorclass

from envkit.errors import InputError, ResetOutputError
from tests.reference.compare import OURS, check_same, check_works_alike, differs
from tests.reference.envs import zoo

STOPS = [{}, {"break_when_any_done": False}, {"break_when_all_done": True}]


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_agents_that_see_unlike_shapes_roll_out(stop):
    check_works_alike(lambda lib: zoo.uneven(lib).rollout(5, **stop))
    check_works_alike(
        lambda lib: list(zoo.uneven(lib).rollout(5, return_contiguous=False, **stop).unbind(0))
    )


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_sub_envs_of_such_agents_roll_out(stop):
    def rows(lib):
        env = lib.SerialEnv(2, lambda: zoo.uneven(lib))
        return [row.exclude(("next", "terminated")) for row in env.rollout(5, **stop).unbind(0)]

    check_works_alike(rows)


def test_specs_of_unlike_agents_can_be_assigned_for_one_element():
    def rolled(lib):
        class Pair(type(zoo.uneven(lib))):
            def __init__(self):
                super().__init__()
                agents = [lib.Composite(seen=lib.Unbounded((size,))) for size in (2, 3)]
                self.observation_spec_unbatched = lib.Composite(agents=torch.stack(agents))

        return Pair().rollout(3)

    check_works_alike(rolled)


def test_specs_of_unlike_agents_gain_the_batch_of_their_env():
    class Pairs(type(zoo.uneven(OURS))):
        def __init__(self):
            OURS.EnvBase.__init__(self, batch_size=[5])
            agents = [OURS.Composite(seen=OURS.Unbounded((size,))) for size in (2, 3)]
            self.observation_spec_unbatched = OURS.Composite(agents=torch.stack(agents))

    assert Pairs().observation_spec.shape == (5,)


def test_each_of_unlike_agents_is_trained_by_its_reward():
    networks = [torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)]

    def policy(td):
        for agent, network in zip(td["agents"].unbind(-1), networks, strict=True):
            agent["action"] = network(agent["seen"]).tanh()
        return td

    zoo.uneven(OURS).rollout(3, policy)["next", "reward"].sum().backward()

    assert all(network.weight.grad.any() for network in networks)


def test_unlike_agents_begin_anew_where_a_mask_says_so():
    def reset(lib, chosen):
        env = zoo.uneven(lib)
        td = env.step_mdp(env.rand_step(env.reset())).exclude(("agents", "action"))
        return env.reset(td.set("_reset", torch.tensor([chosen])))

    check_works_alike(lambda lib: reset(lib, True))
    check_works_alike(lambda lib: reset(lib, False)["done"])
    kept = reset(OURS, False)["agents"]
    assert [part["seen"].tolist() for part in kept.unbind(0)] == [[1, 1], [1, 1, 1]]


def pushed(lib, number):
    env = lib.GymEnv("CartPole-v1")
    env.set_seed(0)
    return env.step(env.reset().set("action", torch.tensor(number)))["next", "observation"]


def test_a_number_of_an_option_is_refused_where_options_are_spelled():
    differs("options-are-spelled", lambda lib: pushed(lib, 1))

    assert pushed(torchrl.envs, 1).equal(pushed(torchrl.envs, 0))
    for number, written in ((1, "action"), ([1], r"action\.squeeze\(-1\)")):
        line = rf"one-hot rows, and not numbers of options.*one_hot\({written}, 2\)"
        with pytest.raises(InputError, match=line):
            pushed(OURS, number)


def after_a_masked_step(lib, stepped):
    env = lib.SerialEnv(2, lambda: zoo.uneven(lib))
    td = env.step_mdp(env.step(env.rand_action(env.reset())))
    return env.step(env.rand_action(td).set("_step", torch.tensor(stepped)))["next"].unbind(0)


@pytest.mark.parametrize("stepped", [[True, False], [False, True], [False, False]])
def test_a_mask_leaves_out_rows_of_unlike_agents(stepped):
    if any(stepped):
        differs("unlike-agents", lambda lib: after_a_masked_step(lib, stepped))
    rows = after_a_masked_step(OURS, stepped)

    for row, moved in zip(rows, stepped, strict=True):
        assert [part["seen"].tolist() for part in row["agents"].unbind(0)] == [
            [1.0 + moved] * size for size in (2, 3)
        ]
        assert moved or row["reward"].tolist() == [0.0]


@pytest.mark.parametrize("stepped", [True, False])
def test_one_env_of_unlike_agents_is_stepped_or_left_alone(stepped):
    def seen(lib):
        env = zoo.uneven(lib)
        td = env.step_mdp(env.step(env.rand_action(env.reset())))
        td = env.step(env.rand_action(td).set("_step", torch.tensor(stepped)))
        return td["next"].exclude("terminated", "reward")

    check_works_alike(seen)


def test_what_unlike_agents_see_is_compared_with_their_specs():
    check_works_alike(lambda lib: lib.check_env_specs(zoo.uneven(lib)))


def test_an_agent_that_sees_another_shape_than_its_spec_says_is_told():
    class Longer(type(zoo.uneven(OURS))):
        def _seen(self):
            td = super()._seen()
            td["agents"][1].set("seen", torch.zeros(4))
            return td

    with pytest.raises(
        AssertionError, match=r"\('agents', 1, 'seen'\) has shape \(4,\), its spec says \(3,\)"
    ):
        OURS.check_env_specs(Longer())


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_sub_envs_of_growing_observations_roll_out(stop):
    def steps(lib):
        env = lib.SerialEnv(2, lambda: zoo.dynamic(lib))
        return [
            step.exclude(("next", "terminated"), "terminated")
            for step in env.rollout(5, **stop).unbind(1)
        ]

    check_works_alike(steps)


@pytest.mark.parametrize("keywords", [{}, {"break_when_any_done": False}], ids=str)
def test_a_simulator_that_resets_itself_may_show_growing_observations(keywords):
    def rolled(lib):
        class Restarting(type(zoo.dynamic(lib))):
            def _step(self, tensordict):
                out = super()._step(tensordict)
                if out["done"]:
                    self.trace = torch.zeros(1, 2)
                return out.set("trace", self.trace).set("terminated", out["done"].clone())

        return Restarting(auto_reset=True).rollout(7, **keywords)

    check_works_alike(rolled)


@tensorclass
class Sight:
    near: torch.Tensor
    far: torch.Tensor


def seeing(lib):
    """Observes a tensorclass."""

    class Seeing(lib.EnvBase):
        def __init__(self):
            super().__init__()
            parts = {"near": lib.Unbounded((2,)), "far": lib.Unbounded((1,))}
            self.observation_spec = lib.Composite(sight=lib.Composite(parts, data_cls=Sight))
            self.action_spec = lib.OneHot(2)
            self.reward_spec = lib.Unbounded((1,))

        def _sight(self):
            return cast(Any, Sight)(near=torch.zeros(2), far=torch.ones(1), batch_size=[])

        def _reset(self, tensordict=None):
            return TensorDict({"sight": self._sight()})

        def _step(self, tensordict):
            done = torch.zeros(1, dtype=torch.bool)
            return TensorDict({"sight": self._sight(), "reward": torch.ones(1), "done": done})

        def _set_seed(self, seed):
            pass

    return Seeing()


def test_tensorclasses_are_observed():
    check_works_alike(lambda lib: lib.check_env_specs(seeing(lib)))
    check_works_alike(lambda lib: type(seeing(lib).rollout(3)["next", "sight"]).__name__)
    check_works_alike(lambda lib: seeing(lib).rollout(3, break_when_any_done=False)["sight"].near)
    check_works_alike(
        lambda lib: type(lib.SerialEnv(2, lambda: seeing(lib)).rollout(2)["sight"]).__name__
    )


class Looking(type(seeing(OURS))):
    """Takes data of any batch size, and sees one more than the object in it."""

    batch_locked = False

    def _reset(self, tensordict=None):
        return super()._reset().expand(() if tensordict is None else tensordict.shape).clone()

    def _step(self, tensordict):
        sight = tensordict["sight"].clone()
        sight.near += 1
        return super()._step(tensordict).expand(tensordict.shape).clone().set("sight", sight)


@pytest.mark.parametrize("make", [Looking, lambda: OURS.SerialEnv(2, Looking)])
def test_tensorclasses_go_back_into_steps(make):
    data = make().rollout(3)

    assert isinstance(data["sight"], Sight)
    assert data["next", "sight"].near[..., -1, 0].eq(3).all()


def test_rows_of_tensorclasses_are_left_out():
    batch = OURS.SerialEnv(2, Looking)
    roots = [(Looking(), TensorDict(batch_size=[2])), (batch, None)]

    for env, start in roots:
        mask = torch.tensor([True, False])
        step = env.step(env.rand_action(env.reset(start)).set("_step", mask))

        assert isinstance(step["next", "sight"], Sight)
        assert step["next", "sight"].near.tolist() == [[1, 1], [0, 0]]


def bare_class(lib):
    """Declares nothing."""

    class Bare(lib.EnvBase):
        def _reset(self, tensordict=None):
            return TensorDict({"observation": torch.zeros(3)})

        def _step(self, tensordict):
            seen = tensordict["action"].expand(3) * 1.0
            done = torch.zeros(1, dtype=torch.bool)
            return TensorDict({"observation": seen, "reward": torch.ones(1), "done": done})

        def _set_seed(self, seed):
            pass

    return Bare


def act(td):
    return td.set("action", torch.ones(1))


def test_specs_are_read_off_a_step():
    def read(lib):
        env = bare_class(lib)()
        assert env.auto_specs_(act) is env
        kinds = ("action", "reward", "done", "observation", "state")
        return [getattr(env, f"full_{kind}_spec") for kind in kinds], env.rollout(2, act)

    check_works_alike(read)
    check_works_alike(
        lambda lib: (
            bare_class(lib)()
            .auto_specs_(act, tensordict=TensorDict({"observation": torch.zeros(3)}))
            .full_observation_spec
        )
    )


def test_entries_of_other_names_are_named():
    def read(lib, **keys):
        class Stateful(bare_class(lib)):
            def _reset(self, tensordict=None):
                return super()._reset(tensordict).set("memory", torch.zeros(2))

            def _step(self, tensordict):
                return super()._step(tensordict).set("memory", tensordict["memory"] + 1)

        env = Stateful().auto_specs_(act, **keys)
        return env.full_observation_spec, env.full_state_spec

    check_works_alike(lambda lib: read(lib, observation_key=["observation", "memory"]))
    check_same(lambda lib: read(lib, reward_key="pay"))
    with pytest.raises(
        ResetOutputError, match=r"gave \['memory'\].*Name them with observation_key="
    ):
        read(OURS)
