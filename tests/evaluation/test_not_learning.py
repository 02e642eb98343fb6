"""What judges or tries out a policy teaches the env nothing."""

from __future__ import annotations

import random
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from envkit import (
    Collector,
    Compose,
    GymEnv,
    GymWrapper,
    MixedEnv,
    ModuleTransform,
    ParallelEnv,
    RandomTruncationTransform,
    SerialEnv,
    StepCounter,
    TrajCounter,
    Transform,
    TransformedEnv,
    VecNorm,
    VecNormV2,
    check_env_specs,
    evaluate,
)
from envkit.env.learning import left_as_it_was
from envkit.env.own_state import envs_without_episode
from envkit.errors import NotResetError

pendulum = partial(GymEnv, "Pendulum-v1", max_episode_steps=10)


def inner():
    """Build an env of programs; JAX is imported here, since workers import this file."""
    from envkit import JaxEnv
    from tests.zoo.walkers import Pendulum

    return JaxEnv(Pendulum(), batch_size=[2], episode_length=10)


class Centred(Transform):
    """A user's transform with memory: subtracts the mean of all that it has seen."""

    learns = True

    def __init__(self, in_keys):
        super().__init__(in_keys)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))

    def _apply_transform(self, value):
        if not self.frozen:
            self.total += value.sum()
            self.count += value.numel()
        return value - self.total / self.count.clamp_min(1)

    def transform_observation_spec(self, observation_spec):
        return observation_spec

    def _reset(self, td, td_reset):
        return self._call(td_reset)


def behind(make, kind):
    return TransformedEnv(make(), kind(in_keys=["observation"]))


PLACES = {
    "single": lambda kind: behind(pendulum, kind),
    "around a pool": lambda kind: behind(partial(SerialEnv, 2, pendulum), kind),
    "inside a pool": lambda kind: SerialEnv(2, partial(behind, pendulum, kind)),
    "inside workers": lambda kind: ParallelEnv(2, partial(behind, pendulum, kind), num_processes=1),
    "in programs": lambda kind: behind(inner, kind),
    "a member": lambda kind: MixedEnv([SerialEnv(2, partial(behind, pendulum, kind))]),
}


@pytest.fixture(params=[VecNorm, VecNormV2, Centred], ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.mark.filterwarnings("ignore:evaluate.. ends the episodes")
@pytest.mark.parametrize("place", PLACES)
def test_one_policy_is_judged_alike_twice_and_statistics_stay_where_they_were(place, kind, opened):
    env = opened(PLACES[place](kind))
    env.set_seed(0)
    env.rollout(15, break_when_any_done=False)
    sizes = [spec.shape[-1] for spec in (env.observation_spec["observation"], env.action_spec)]
    policy = TensorDictModule(torch.nn.Linear(*sizes), ["observation"], ["action"])
    before = shown_after(env)

    both = evaluate(env, {"one": policy, "again": policy}, 4, seed=1, max_steps=10)

    assert torch.equal(both["one"].returns, both["again"].returns)
    assert torch.equal(shown_after(env), before)


def shown_after(env):
    """Give what an env shows after a seed, while nothing learns."""
    with left_as_it_was(env):
        env.set_seed(7)
        return env.reset()["observation"].clone()


@pytest.mark.filterwarnings("ignore:evaluate.. ends the episodes")
def test_statistics_learn_if_that_is_asked_for_and_again_afterwards(opened):
    env = opened(behind(pendulum, VecNormV2))
    env.rollout(5)
    policy = TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"])

    evaluate(env, policy, 1, seed=1)
    assert not env.transform.frozen
    with left_as_it_was(env):
        with left_as_it_was(env):
            assert env.transform.frozen
        assert env.transform.frozen
    assert not env.transform.frozen
    count = env.transform.kept["observation"].count.clone()
    env.rollout(5)
    assert (env.transform.kept["observation"].count > count).all()


def test_a_check_of_specs_teaches_nothing(opened):
    env = opened(behind(pendulum, VecNormV2))
    env.rollout(5)
    count = env.transform.kept["observation"].count.clone()

    check_env_specs(env)

    assert torch.equal(env.transform.kept["observation"].count, count)


def test_trying_a_policy_out_changes_no_data(kind):
    net = torch.nn.Linear(3, 1).requires_grad_(False)
    module = TensorDictModule(net, ["observation"], ["action"])

    def collected(policy):
        make = partial(behind, pendulum, kind)
        with Collector(make, policy, frames_per_batch=20, total_frames=20) as collector:
            collector.set_seed(3)
            return collector.next()["observation"]

    tried = collected(module)

    assert torch.equal(collected(module), tried)
    assert torch.equal(collected(lambda td: td.set("action", net(td["observation"]))), tried)


def counted():
    chain = (StepCounter(), TrajCounter(), RandomTruncationTransform(2, 6, prob=0.2))
    return TransformedEnv(pendulum(), Compose(*chain))


RECORDED = {
    "single": counted,
    "around a pool": lambda: TransformedEnv(SerialEnv(2, pendulum), TrajCounter()),
    "inside a pool": lambda: SerialEnv(2, counted),
    "inside workers": lambda: ParallelEnv(2, counted, num_processes=1),
    "in programs": lambda: TransformedEnv(inner(), Compose(StepCounter(), TrajCounter())),
    "a member": lambda: MixedEnv([SerialEnv(2, counted)]),
}


def steps_after(env, root, count=12):
    """Give what random steps from a root show."""
    shown = []
    for _ in range(count):
        data, root = env.step_and_maybe_reset(env.rand_action(root))
        shown.append(data["next", "observation"].clone())
        if "traj_count" in root.keys():
            shown.append(root["traj_count"].clone().float())
    return shown


def the_same(ones, others):
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def leave(env, how):
    """Do something with an env that must leave no trace."""
    if how == "check":
        check_env_specs(env, seed=11)
    elif how == "evaluate":
        evaluate(env, env.rand_action, 2, seed=9, max_steps=5)
    elif how == "error":
        with pytest.raises(ZeroDivisionError):
            evaluate(env, lambda td: 1 / 0, 2, seed=9)
    elif how == "ctrl-c":
        calls = iter(range(3))

        def interrupted(td):
            if next(calls) == 2:
                raise KeyboardInterrupt
            return env.rand_action(td)

        with pytest.raises(KeyboardInterrupt):
            evaluate(env, interrupted, 2, seed=9)
    else:
        with left_as_it_was(env):
            env.set_seed(5)
            env.rollout(4)
            leave(env, "check")
            env.rollout(3)


@pytest.mark.parametrize("how", ["check", "evaluate", "error", "ctrl-c", "nested"])
@pytest.mark.parametrize("place", RECORDED)
def test_an_env_goes_on_as_if_it_had_not_been_used(place, how, opened):
    first, second = opened(RECORDED[place]()), opened(RECORDED[place]())
    runs = []
    for env in (first, second):
        env.record_for_resume().set_seed(2)
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        env.rollout(7, break_when_any_done=False)
        root = env.reset()
        if env is second:
            leave(env, how)
        runs.append(steps_after(env, root))
        runs[-1].append(torch.tensor([torch.rand(()), np.random.rand(), random.random()]))

    assert the_same(*runs)


@pytest.mark.parametrize("place", RECORDED)
def test_an_env_that_was_only_seeded_is_left_as_it_was_without_a_warning(place, opened):
    first, second = opened(RECORDED[place]()), opened(RECORDED[place]())
    for env in (first, second):
        env.record_for_resume().set_seed(2)

    evaluate(second, second.rand_action, 2, seed=9, max_steps=5)

    assert the_same(*(steps_after(env, env.reset()) for env in (first, second)))


@pytest.mark.parametrize("make", [pendulum, partial(GymEnv, "Pendulum-v1", num_envs=2), counted])
def test_an_env_that_was_never_reset_still_waits_for_that_and_records_nothing(make, opened):
    env = opened(make())

    for _ in range(2):  # neither gives a warning
        evaluate(env, env.rand_action, 2, seed=9, max_steps=5)
        check_env_specs(env)

    env.reset()
    assert envs_without_episode(env.state_dict())


def test_an_env_in_an_episode_that_was_not_written_down_gives_one_warning():
    env = counted()
    env.rollout(3)

    with pytest.warns(
        UserWarning, match=r"evaluate\(\) ends the episodes under way in TransformedEnv"
    ) as told:
        evaluate(env, env.rand_action, 2, seed=9, max_steps=5)

    assert len(told) == 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore:evaluate.. ends the episodes")
def test_what_was_learnt_stays_if_that_was_asked_for(place, kind, opened):
    env = opened(PLACES[place](kind))
    env.set_seed(0)
    before = shown_after(env)

    evaluate(env, env.rand_action, 2, seed=1, max_steps=10, update_stats=True)

    assert not torch.equal(shown_after(env), before)


def test_trying_a_policy_out_leaves_counters_alone():
    net = torch.nn.Linear(3, 1).requires_grad_(False)
    module = TensorDictModule(net, ["observation"], ["action"])

    def collected(policy, env):
        with Collector(env, policy, frames_per_batch=30, total_frames=30) as collector:
            return collector.next()

    envs = [counted() for _ in range(2)]
    for env in envs:
        env.set_seed(3)
    torch.manual_seed(0)
    tried = collected(module, envs[0])
    torch.manual_seed(0)
    untried = collected(lambda td: td.set("action", net(td["observation"])), envs[1])

    for key in ("observation", "traj_count", ("collector", "traj_ids")):
        assert torch.equal(tried[key], untried[key]), key


def test_layers_that_get_their_size_meanwhile_keep_it_and_all_else_goes_back():
    lazy = TensorDictModule(torch.nn.LazyLinear(3), ["observation"], ["seen"])
    sized = TensorDictModule(torch.nn.Linear(3, 2), ["observation"], ["more"])
    transforms = Compose(*(ModuleTransform(module=module) for module in (lazy, sized)))
    env = TransformedEnv(pendulum(), transforms)
    before = sized.module.weight.clone()

    with left_as_it_was(env), torch.no_grad():
        env.rollout(2)
        sized.module.weight.zero_()

    assert lazy.module.weight.shape == (3, 3)
    assert torch.equal(sized.module.weight, before)


UNRECORDED = {
    "single": pendulum,
    "vectorised": partial(GymEnv, "Pendulum-v1", num_envs=2),
    "behind transforms": counted,
    "serial": partial(SerialEnv, 2, pendulum),
    "a part of a pool": lambda: SerialEnv(3, pendulum)[:2],
    "mixed": lambda: MixedEnv([SerialEnv(2, counted)]),
}


@pytest.mark.parametrize("make", UNRECORDED.values(), ids=UNRECORDED)
def test_an_env_that_evaluate_could_not_put_back_is_stepped_after_a_reset_alone(make):
    env = make()
    root = env.step_mdp(env.rand_step(env.reset()))

    with pytest.warns(UserWarning, match=r"evaluate\(\) ends the episodes under way"):
        evaluate(env, env.rand_action, 2, seed=9, max_steps=5)

    with pytest.raises(NotResetError, match=r"since evaluate\(\).*Call reset\(\) after"):
        env.step(env.rand_action(root))
    env.rand_step(env.reset())


class Growing(gymnasium.Wrapper):
    """An env whose episodes depend on how many came before, so that none can be played again."""

    episodes = 0

    def reset(self, **kwargs):
        self.episodes += 1
        observation, info = super().reset(**kwargs)
        return observation + self.episodes, info


@pytest.mark.parametrize("rows", [None, 2])
def test_a_result_is_not_lost_where_the_env_does_not_get_back(rows):
    def make():
        return GymWrapper(Growing(gymnasium.make("Pendulum-v1")))

    env = make() if rows is None else SerialEnv(rows, make)
    root = env.record_for_resume().reset()

    with pytest.warns(UserWarning, match=r"evaluate\(\) ends the episodes under way.*Reset"):
        result = evaluate(env, env.rand_action, 2, seed=9, max_steps=5)

    assert result.lengths.tolist() == [5, 5]
    with pytest.raises(NotResetError, match=r"since evaluate\(\)"):
        env.step(env.rand_action(root))
    assert not env.rand_step(env.reset())["next", "done"].any()


@pytest.mark.parametrize("kind", [VecNorm, VecNormV2])
@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
def test_statistics_of_no_data_are_warned_of_where_a_policy_acts(kind, around):
    def normed(env):
        return TransformedEnv(env, kind(["observation"]))

    env = normed(SerialEnv(2, pendulum)) if around else SerialEnv(2, lambda: normed(pendulum()))

    with pytest.warns(
        UserWarning, match=r"\['observation'\]\) has not normalised.*load_state_dict"
    ):
        evaluate(env, lambda observation: observation[..., :1], 2, seed=0)

    evaluate(env, None, 2, seed=0)
    evaluate(env, lambda observation: observation[..., :1], 2, seed=0, update_stats=True)
    evaluate(env, lambda observation: observation[..., :1], 2, seed=0)
    env.close()
