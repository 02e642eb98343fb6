"""One contract for every transform over every kind of env."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from envkit import (
    BraxEnv,
    Compose,
    ConditionalSkip,
    FrameSkipTransform,
    GymEnv,
    InitTracker,
    MixedEnv,
    NoopResetEnv,
    ParallelEnv,
    RemoveEmptySpecs,
    RewardSum,
    SerialEnv,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TrajCounter,
    TransformedEnv,
    Unbounded,
    check_env_specs,
)
from envkit.batched.creator import EnvCreator
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.frozen import stays_frozen
from tests.zoo.policies import Replay

make_count = partial(Count, 5)
make_brax = partial(BraxEnv, "fast", device="cpu", batch_size=[3], episode_length=5)

ENVS = {
    "count": make_count,
    "stateless": partial(StatelessCount, 5),
    "stateless batch": partial(StatelessCount, 5, batch_size=[3]),
    "cartpole": partial(GymEnv, "CartPole-v1"),
    "serial": partial(SerialEnv, 3, make_count),
    "serial without buffers": partial(SerialEnv, 3, make_count, use_buffers=False),
    "serial of stateless": partial(SerialEnv, 2, partial(StatelessCount, 5, batch_size=[2])),
    "parallel": partial(ParallelEnv, 3, make_count, num_processes=2),
    "brax": make_brax,
    "mixed": lambda: MixedEnv([SerialEnv(1, make_count), SerialEnv(2, make_count)]),
    "transformed": lambda: TransformedEnv(
        SerialEnv(2, make_count), StepCounter(None, "cut", "age")
    ),
}

primer = partial(TensorDictPrimer, mem=Unbounded((2,)), default_value=3, expand_specs=True)
EPISODIC = {
    "StepCounter": partial(StepCounter, 3),
    "InitTracker": InitTracker,
    "TensorDictPrimer": primer,
    "RewardSum": RewardSum,
    "TargetReturn": partial(TargetReturn, 4.0),
}
TRANSFORMS = {
    **EPISODIC,
    "TrajCounter": TrajCounter,
    "ConditionalSkip": partial(ConditionalSkip, lambda td: False),
    "FrameSkipTransform": partial(FrameSkipTransform, 2),
    "NoopResetEnv": partial(NoopResetEnv, 2),
    "RemoveEmptySpecs": RemoveEmptySpecs,
    "function": lambda: lambda td: td,
    "Compose": lambda: Compose(StepCounter(4), RewardSum(), InitTracker(), TargetReturn(4.0)),
}
COMPILED = (
    "Compose"  # compiled into the programs of Brax; each alone: around them, and in test_fused
)
ADDED = {
    "StepCounter": "step_count",
    "InitTracker": "is_init",
    "TensorDictPrimer": "mem",
    "RewardSum": "episode_reward",
    "TargetReturn": "target_return",
}


@pytest.fixture(scope="module", params=ENVS)
def base(request):
    env = ENVS[request.param]()
    yield env
    env.close(raise_if_closed=False)


@pytest.fixture(scope="module")
def behind(base):
    """The base env behind a transform, built once; specs that may change keep it out of programs."""

    def build(name: str) -> TransformedEnv:
        stays = name == COMPILED or not isinstance(base, BraxEnv)
        return TransformedEnv(base, TRANSFORMS[name](), spec_locked=stays)

    return cache(build)


def is_equal(left: TensorDictBase, right: TensorDictBase) -> bool:
    names = [sorted(map(str, td.keys(True, True))) for td in (left, right)]
    return names[0] == names[1] and all(
        torch.equal(left[key], right[key]) for key in left.keys(True, True)
    )


def actions_of(env, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    spec = env.full_action_spec["action"]
    return torch.stack([spec.rand((), generator) for _ in range(steps)], len(env.batch_size))


def play(env, actions: torch.Tensor, **stop) -> TensorDictBase:
    env.set_seed(3)
    return env.rollout(actions.shape[len(env.batch_size)], Replay(actions), **stop)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_specs_follow_data(behind, name):
    env = behind(name)

    check_env_specs(env, break_when_any_done=False)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_stepping_by_hand_is_stepping_and_resetting_in_one(behind, name):
    env = behind(name)
    actions, runs = actions_of(env, 8), []

    for together in (True, False):
        env.set_seed(3)
        if isinstance(env.transform, TrajCounter):
            env.transform.next_number.zero_()
        td, act, seen = env.reset(), Replay(actions), []
        for _ in range(8):
            if together:
                data, td = env.step_and_maybe_reset(act(td))
            else:
                data = env.step(act(td))
                td = env.maybe_reset(env.step_mdp(data))
            shown = [key for key in env.observation_keys if "state" not in key]
            seen += [data["next"].select("done", *shown).clone(), td.select("done", *shown).clone()]
        runs.append(seen)

    assert all(map(is_equal, *runs))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_finished_rows_are_frozen_as_without_transforms(behind, name):
    env = behind(name)

    env.set_seed(0)
    data = env.rollout(40, break_when_all_done=True)

    done = data["next", "done"][..., 0]
    assert done[..., -1].all()
    assert stays_frozen(data, env.reward_keys, is_equal)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_mask_survives(behind, name):
    env = behind(name)
    rows = torch.ones(env.batch_size, dtype=torch.bool)

    outputs = [
        env.rollout(7, break_when_any_done=False),
        env.rollout(7, break_when_all_done=True),
        env.step(env.rand_action(env.reset()).set("_step", ~rows)),
        env.reset(env.reset().set("_reset", rows)),
    ]

    keys = [key for td in outputs for key in td.keys(True)]
    assert not [key for key in keys if {"_step", "_reset"} & {key, *key}]


# ------------------------------------------------------------------------------- inside and outside


@pytest.mark.parametrize("name", [*EPISODIC, "Compose", "FrameSkipTransform"])
def test_inside_the_sub_envs_is_as_outside_around_them(name):
    make = TRANSFORMS[name]
    makers = [partial(Count, n) for n in (2, 4, 9)]
    inside = SerialEnv(3, [lambda m=m: TransformedEnv(m(), make()) for m in makers])
    outside = TransformedEnv(SerialEnv(3, makers), make())
    actions = actions_of(outside, 9)

    for stop in ({"break_when_any_done": False}, {"break_when_all_done": True}, {}):
        data = [play(env, actions, **stop) for env in (inside, outside)]

        assert is_equal(*data)


def test_inside_worker_processes_is_as_outside_around_them():
    make = TRANSFORMS["Compose"]
    inside = ParallelEnv(3, lambda: TransformedEnv(make_count(), make()), num_processes=2)
    outside = TransformedEnv(SerialEnv(3, make_count), make())
    actions = actions_of(outside, 9)

    data = [play(env, actions, break_when_any_done=False) for env in (inside, outside)]

    assert is_equal(*data)
    inside.close()


def test_trajectories_of_worker_processes_have_numbers_of_their_own():
    creator = EnvCreator(lambda: TransformedEnv(Count(2), TrajCounter()))
    env = ParallelEnv(2, creator, num_processes=2)

    numbers = env.rollout(9, break_when_any_done=False)["traj_count"]

    env.close()
    each = [row.unique().tolist() for row in numbers]
    assert sorted(each[0] + each[1]) == list(range(10))


# ------------------------------------------------------------------------------------------- masks


masks = st.lists(st.booleans(), min_size=4, max_size=4).map(torch.tensor)
MASKED = {
    "stateful": partial(SerialEnv, 4, partial(Count, 50)),
    "stateless": partial(StatelessCount, 50, batch_size=[4]),
}


def advanced(env) -> TensorDictBase:
    """A root in which every row has taken two steps and has values of its own."""
    root = env.step_mdp(env.rand_step(env.step_mdp(env.rand_step(env.reset()))))
    for key in ADDED.values():
        if key in root.keys() and root[key].dtype != torch.bool:
            root[key] = root[key] + torch.arange(4).reshape(4, 1).to(root[key].dtype) * 10
    return root


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("name", ADDED)
@settings(max_examples=12)
@given(mask=masks)
def test_a_partial_reset_begins_anew_exactly_the_masked_rows(kind, name, mask):
    env = TransformedEnv(MASKED[kind](), TRANSFORMS[name]())
    first, root = env.reset().clone(), advanced(env)

    fresh = env.reset(root.clone().set("_reset", mask[:, None]))

    assert is_equal(fresh[~mask], root[~mask])
    assert fresh[ADDED[name]][mask].equal(first[ADDED[name]][mask])


@pytest.mark.parametrize("kind", MASKED)
@pytest.mark.parametrize("name", ADDED)
@settings(max_examples=12)
@given(mask=masks)
def test_a_partial_step_touches_exactly_the_masked_rows(kind, name, mask):
    env = TransformedEnv(MASKED[kind](), TRANSFORMS[name]())
    root = env.rand_action(advanced(env))
    keys = [*env.observation_keys, "done"]

    stepped = env.step(root.clone().set("_step", mask))

    whole = TransformedEnv(StatelessCount(50, batch_size=[4]), TRANSFORMS[name]())
    expected = whole.step(root.clone())
    assert is_equal(stepped["next"][~mask].select(*keys), root[~mask].select(*keys))
    assert is_equal(stepped["next"][mask].select(*keys), expected["next"][mask].select(*keys))


# ---------------------------------------------------------------------------- copies, states, devices


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_clone_does_what_the_transform_does(name):
    made = TRANSFORMS[name]()
    first = TransformedEnv(StatelessCount(5, batch_size=[2]), made)
    second = TransformedEnv(StatelessCount(5, batch_size=[2]), first.transform.clone())
    actions = actions_of(first, 6)

    data = [play(env, actions, break_when_any_done=False) for env in (first, second)]

    skipped = ["traj_count", ("next", "traj_count")]  # clones draw from the same numbers
    assert is_equal(*(td.exclude(*skipped) for td in data))
    assert second.transform.container is second


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_state_dict_can_be_loaded(name):
    trained, fresh = (TransformedEnv(make_count(), TRANSFORMS[name]()) for _ in range(2))
    trained.rollout(7, break_when_any_done=False)

    fresh.load_state_dict(trained.state_dict())

    assert list(trained.state_dict()) == (["next_number"] if name == "TrajCounter" else [])
    assert is_equal(TensorDict(trained.state_dict()), TensorDict(fresh.state_dict()))
    actions = actions_of(trained, 7)
    assert is_equal(*(play(env, actions, break_when_any_done=False) for env in (trained, fresh)))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_moves_with_its_env(name):
    env = TransformedEnv(StatelessCount(5, batch_size=[2], device="cpu"), TRANSFORMS[name]())
    assert {value.device.type for value in env.rollout(3).values(True, True)} == {"cpu"}

    env.to("meta")

    held = [*env.specs.values(True, True), *env.transform.buffers()]
    assert {found.device.type for found in held} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("make", [make_brax, partial(SerialEnv, 3, make_count)])
def test_transforms_run_on_the_device_of_the_env(name, make):
    env = TransformedEnv(make(device="cuda"), TRANSFORMS[name]())

    check_env_specs(env, seed=0, break_when_any_done=False)
    data = env.rollout(7, break_when_any_done=False)

    assert {value.device.type for value in data.values(True, True)} == {"cuda"}
