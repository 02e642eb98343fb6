"""One contract for every kind of env: what users may rely on without knowing what is inside."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import BraxEnv, GymEnv, MixedEnv, ParallelEnv, SerialEnv, check_env_specs
from envkit.base import EnvBase
from envkit.errors import ClosedEnvError
from tests.drift import gym_rows
from tests.envs import Count, StatelessCount
from tests.jax_drift import jax_rows
from tests.policies import Replay

make_count = partial(Count, 5)
make_cartpole = partial(GymEnv, "CartPole-v1", max_episode_steps=7)
make_brax = partial(BraxEnv, "fast", device="cpu", batch_size=[3], episode_length=5)


def make_mixed() -> MixedEnv:
    return MixedEnv([jax_rows(limit=5), gym_rows(limit=6)])


KINDS = {
    "count": make_count,
    "stateless count": partial(StatelessCount, 5, batch_size=[3]),
    "cartpole": make_cartpole,
    "pendulum": partial(GymEnv, "Pendulum-v1", max_episode_steps=5),
    "serial count": partial(SerialEnv, 3, make_count),
    "serial cartpole": partial(SerialEnv, 3, make_cartpole),
    "serial cartpole without buffers": partial(SerialEnv, 3, make_cartpole, use_buffers=False),
    "serial of stateless": partial(SerialEnv, 2, partial(StatelessCount, 5, batch_size=[2])),
    "parallel count": partial(ParallelEnv, 3, make_count, num_processes=2),
    "parallel cartpole": partial(ParallelEnv, 3, make_cartpole, num_processes=2),
    "brax": make_brax,
    "brax nested": partial(make_brax, state_layout="nested"),
    "mixed": make_mixed,
}


kinds = [
    pytest.param(kind, marks=pytest.mark.slow if kind == "brax nested" else ()) for kind in KINDS
]


@pytest.fixture(scope="module", params=kinds)
def env(request):
    env = KINDS[request.param]()
    yield env
    env.close(raise_if_closed=False)


def is_equal(left: TensorDictBase, right: TensorDictBase) -> bool:
    """Compare keys, layout and bits."""
    names = [sorted(map(str, td.keys(True, True))) for td in (left, right)]
    return names[0] == names[1] and all(
        torch.equal(left[key], right[key]) for key in left.keys(True, True)
    )


def private_keys(td: TensorDictBase) -> list:
    return [key for key in td.keys(True) if {"_step", "_reset"} & {key, *key}]


def layout(td: TensorDictBase, batch_dims: int) -> dict:
    return {key: (td[key].shape[batch_dims:], td[key].dtype) for key in td.keys(True, True)}


def first_root(env: EnvBase) -> TensorDictBase:
    env.set_seed(3)
    return env.reset()


def play(env: EnvBase, actions: torch.Tensor, **stop) -> TensorDictBase:
    env.set_seed(3)
    return env.rollout(actions.shape[len(env.batch_size)], Replay(actions), **stop)


def recorded_actions(env: EnvBase, steps: int) -> torch.Tensor:
    spec = env.full_action_spec["action"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.stack([spec.rand() for _ in range(steps)], len(env.batch_size))


# ------------------------------------------------------------------------------------ the two calls


def test_the_specs_say_what_comes_out(env):
    check_env_specs(env)


def test_reset_gives_a_root_with_nothing_done(env):
    root = env.reset()

    assert root.batch_size == env.batch_size
    assert root.device == env.device
    assert not root["done"].any()
    assert set(root.keys(True, True)) == {
        *env.full_observation_spec.keys(True, True),
        *env.full_done_spec.keys(True, True),
    }


def test_reset_and_step_return_the_data_they_were_given(env):
    td = env.reset()

    again = env.reset(td)
    stepped = env.step(env.rand_action(td))

    assert again is td
    assert stepped is td


def test_a_step_changes_nothing_at_the_root(env):
    td = env.rand_action(env.reset())
    before = td.clone()

    env.step(td)

    assert is_equal(td.exclude("next"), before)


def test_next_holds_observations_rewards_and_flags(env):
    following = env.rand_step(env.reset())["next"]

    assert set(following.keys(True, True)) == {
        *env.full_observation_spec.keys(True, True),
        *env.full_reward_spec.keys(True, True),
        *env.full_done_spec.keys(True, True),
    }
    assert following["reward"].shape == (*env.batch_size, 1)
    assert following["done"].shape == (*env.batch_size, 1)


def test_the_next_root_has_neither_reward_nor_action(env):
    data = env.rand_step(env.reset()).set("mine", torch.zeros(env.batch_size))

    root = env.step_mdp(data)

    assert set(root.keys(True, True)) == {
        "mine",
        *env.full_observation_spec.keys(True, True),
        *env.full_done_spec.keys(True, True),
    }
    assert is_equal(root.exclude("mine"), data["next"].exclude("reward"))


def test_a_fake_step_has_the_layout_of_a_real_one(env):
    fake = env.fake_tensordict()

    real = env.rollout(1)

    dims = len(env.batch_size)
    assert layout(fake, dims) == layout(real, dims + 1)
    assert fake.batch_size == env.batch_size


def test_preset_next_entries_win_over_computed_ones(env):
    td = env.rand_action(env.reset())
    reward = torch.full((*env.batch_size, 1), 77.0)
    td["next"] = TensorDict({"reward": reward.clone()}, env.batch_size)

    out = env.step(td)

    assert out["next", "reward"].equal(reward)
    assert "done" in out["next"]


def test_data_that_was_given_out_is_safe_from_later_steps(env):
    given = [env.reset()]
    for _ in range(6):
        data, root = env.step_and_maybe_reset(env.rand_action(given[-1].clone()))
        given += [data, root]
    copies = [td.clone() for td in given]

    _, root = env.step_and_maybe_reset(env.rand_action(given[-1].clone()))
    env.reset()
    env.rollout(12, break_when_any_done=False)
    root.apply_(torch.zeros_like)

    assert all(map(is_equal, given, copies))


# ------------------------------------------------------------------------------------------ rollout


def test_a_rollout_puts_time_last_and_names_it(env):
    data = play(env, recorded_actions(env, 3))

    assert data.batch_size == (*env.batch_size, 3)
    assert data.names[-1] == "time"
    assert is_equal(
        data[..., 1:].select(*env.observation_keys),
        data["next"][..., :-1].select(*env.observation_keys),
    )


def test_a_rollout_stops_when_anything_is_done(env):
    data = env.rollout(60)

    done = data["next", "done"]
    steps = data.shape[-1]
    assert steps < 60
    assert not done[..., : steps - 1, :].any()
    assert done[..., -1, :].any()


def test_a_non_stop_rollout_begins_anew_where_something_is_done(env):
    data = env.rollout(12, break_when_any_done=False)

    done = data["next", "done"][..., :-1, 0]
    assert data.shape[-1] == 12
    assert done.any()
    assert not data["done"].any()
    for key in env.observation_keys:
        pairs = data[..., 1:][key] == data[..., :-1]["next"][key]
        carried = pairs.reshape(*done.shape, -1).all(-1)
        assert carried[~done].all()


def test_a_rollout_until_all_are_done_freezes_what_is(env):
    data = env.rollout(60, break_when_all_done=True)

    done = data["next", "done"][..., 0]
    assert data.shape[-1] < 60
    assert done[..., -1].all()
    assert (done[..., 1:] >= done[..., :-1]).all()
    frozen = done[..., :-1]
    assert is_equal(data[..., 1:][frozen], data[..., :-1][frozen])


def test_the_stop_rules_agree_up_to_the_first_end(env):
    actions = recorded_actions(env, 20)

    any_done, all_done, nonstop = (
        play(env, actions, **stop)
        for stop in ({}, {"break_when_all_done": True}, {"break_when_any_done": False})
    )

    steps = any_done.shape[-1]
    assert is_equal(any_done, all_done[..., :steps])
    assert is_equal(any_done, nonstop[..., :steps])


def test_a_seed_repeats_a_rollout_of_recorded_actions(env):
    actions = recorded_actions(env, 12)

    first, second = (play(env, actions, break_when_any_done=False) for _ in range(2))

    assert is_equal(first, second)


def test_stepping_by_hand_gives_the_rollout(env):
    actions = recorded_actions(env, 12)
    data = play(env, actions, break_when_any_done=False)

    td, steps, act = first_root(env), [], Replay(actions)
    for _ in range(12):
        done, td = env.step_and_maybe_reset(act(td))
        steps.append(done)

    assert is_equal(torch.stack(steps, len(env.batch_size)), data)


def test_step_and_maybe_reset_is_a_step_and_a_reset(env):
    actions = recorded_actions(env, 8)
    runs = []

    for together in (True, False):
        td, act, seen = first_root(env), Replay(actions), []
        for _ in range(8):
            if together:
                data, td = env.step_and_maybe_reset(act(td))
            else:
                data = env.step(act(td))
                td = env.maybe_reset(env.step_mdp(data))
            seen.append(torch.stack([data["next"].select("done", *env.observation_keys)]))
            seen.append(td.clone())
        runs.append(seen)

    assert all(map(is_equal, *runs))


@pytest.mark.parametrize(
    "stop", [{}, {"break_when_any_done": False}, {"break_when_all_done": True}]
)
def test_a_callback_sees_each_step_but_the_last(env, stop):
    seen = []

    data = env.rollout(4, callback=lambda _, td: seen.append(td["next", "reward"].clone()), **stop)

    assert len(seen) == data.shape[-1] - 1
    for step, reward in enumerate(seen):
        assert reward.equal(data["next", "reward"][..., step, :])


def test_a_rollout_can_go_on_where_another_ended(env):
    actions = recorded_actions(env, 6)
    whole = play(env, actions, break_when_any_done=False)

    first = play(env, actions[(slice(None),) * len(env.batch_size) + (slice(0, 3),)])
    assert not first["next", "done"].any()
    rest = env.rollout(
        3,
        Replay(actions[(slice(None),) * len(env.batch_size) + (slice(3, 6),)]),
        auto_reset=False,
        tensordict=env.step_mdp(first[..., -1]),
        break_when_any_done=False,
    )

    assert is_equal(torch.cat([first, rest], len(env.batch_size)), whole)


def test_starting_without_reset_needs_data(env):
    with pytest.raises(RuntimeError, match="auto_reset"):
        env.rollout(3, auto_reset=False)


def test_masks_are_in_no_output(env):
    root = env.reset()
    mask = torch.zeros(*env.batch_size, 1, dtype=torch.bool)
    outputs = [
        root,
        env.step(env.rand_action(root.clone()).set("_step", mask)),
        *env.step_and_maybe_reset(env.rand_action(root.clone()).set("_step", ~mask)),
        env.reset(root.clone().set("_reset", ~mask)),
        *(
            env.rollout(12, **stop)
            for stop in ({"break_when_any_done": False}, {"break_when_all_done": True})
        ),
    ]

    assert [private_keys(td) for td in outputs] == [[]] * len(outputs)


# ------------------------------------------------------------------------------------------ masks


def half(env: EnvBase) -> torch.Tensor:
    """Select every second row; of an env without rows nothing."""
    return (torch.arange(env.batch_size.numel()) % 2 == 1).reshape(env.batch_size)


def test_rows_that_are_not_stepped_repeat_their_root(env):
    root = env.step_mdp(env.rand_step(env.reset()))
    mask = half(env)

    out = env.step(env.rand_action(root.clone()).set("_step", mask))

    kept = ["done", *env.observation_keys]
    assert is_equal(out["next"][~mask].select(*kept), root[~mask].select(*kept))
    assert is_equal(out.exclude("next", "action"), root)
    assert not out["next", "reward"][~mask].any()


def test_rows_that_were_not_stepped_go_on_from_where_they_were(env):
    actions = recorded_actions(env, 2)
    act = Replay(actions)
    root = first_root(env)
    skipped = env.step(act(root).set("_step", torch.zeros(env.batch_size, dtype=torch.bool)))
    stepped = env.step(act(env.step_mdp(skipped)))

    direct = env.step(first_root(env).set("action", stepped["action"].clone()))

    assert is_equal(stepped["next"], direct["next"])


def test_rows_that_are_not_reset_keep_all_they_had(env):
    if not env.batch_size:
        pytest.skip("one simulator cannot be reset in part")
    td = env.rand_step(env.step_mdp(env.rand_step(env.reset())))
    root = env.rand_action(env.step_mdp(td))
    mask = half(env)

    fresh = env.reset(root.clone().set("_reset", mask[..., None]))

    assert is_equal(fresh[~mask], root[~mask])
    assert fresh["action"].equal(root["action"])
    assert not fresh["done"][mask].any()


# ----------------------------------------------------------------------------------------- closing


@pytest.mark.parametrize("kind", kinds)
def test_a_closed_env_says_so(kind):
    env = KINDS[kind]()
    env.reset()
    was_closed = env.is_closed

    env.close()

    assert not was_closed
    assert env.is_closed
    with pytest.raises(ClosedEnvError):
        env.close()
    env.close(raise_if_closed=False)
