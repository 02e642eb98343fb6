"""VMAS: the data of the bare simulator and of TorchRL's wrapper, random numbers of each env alone, groups and gradients."""

from __future__ import annotations

import copy
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import vmas
from torchrl.envs.libs.vmas import VmasEnv as TheirVmasEnv

from envkit import (
    Collector,
    GymWrapper,
    MarlGroupMapType,
    VmasEnv,
    VmasWrapper,
    check_env_specs,
    list_envs,
    make,
    record,
    to_torchrl,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    InputError,
    OptionError,
    SpecError,
    UnknownEnvError,
)
from envkit_bridges.worlds.vmas import env_names

STEPS, LIMIT = 7, 3


def is_same(left: Any, right: Any) -> bool:
    return set(left.keys(True, True)) == set(right.keys(True, True)) and all(
        torch.equal(left[key], right[key]) for key in left.keys(True, True)
    )


# ----------------------------------------------------------------------------------------- parity


def bare_run(name: str, actions: list[list[torch.Tensor]], **kwargs: Any) -> dict[str, list[Any]]:
    """Step the bare simulator with the actions of each agent, and reset what has ended."""
    env = vmas.make_env(name, num_envs=3, max_steps=LIMIT, terminated_truncated=True, **kwargs)
    env.seed(7)
    seen: dict[str, list[Any]] = {"before": [], "after": [], "reward": [], "ended": []}
    observation = env.reset()
    for action in actions:
        seen["before"].append(observation)
        observation, reward, terminated, truncated, _ = env.step([one.clone() for one in action])
        seen["after"].append(observation)
        seen["reward"].append(reward)
        seen["ended"].append((terminated, truncated))
        over = terminated | truncated
        if over.all():
            env.reset(return_observations=False)
        else:
            for row in over.nonzero().flatten().tolist():
                env.reset_at(row, return_observations=False)
        if over.any():
            (observation,) = env.get_from_scenario(True, False, False, False)
    return seen


def assert_equals_the_bare_simulator(name: str, **kwargs: Any) -> None:
    env = VmasEnv(name, 3, max_steps=LIMIT, seed=7, **kwargs)
    recorded = []

    def act(td: Any) -> Any:
        td = env.rand_action(td)
        recorded.append(td.select(*env.action_keys).clone())
        return td

    data = env.rollout(STEPS, act, break_when_any_done=False)

    actions = [by_agent(env, td, "action") for td in recorded]
    bare = bare_run(name, actions, **kwargs)
    assert data["next", "done"].any()
    for step in range(STEPS):
        td = data[:, step]
        terminated, truncated = bare["ended"][step]
        assert torch.equal(td["next", "terminated"][:, 0], terminated)
        assert torch.equal(td["next", "truncated"][:, 0], truncated)
        for agent, paid in enumerate(bare["reward"][step]):
            assert_equal(by_agent(env, td["next"], "reward")[agent][:, 0], paid.float().reshape(3))
            for moment, seen in ((td, "before"), (td["next"], "after")):
                shown = by_agent(env, moment, "observation")[agent]
                assert_equal(shown, bare[seen][step][agent])


def assert_equal(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        for name, value in theirs.items():
            assert_equal(ours[name], value)
        return
    torch.testing.assert_close(
        ours,
        theirs.float() if theirs.dtype != ours.dtype else theirs,
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def by_agent(env: VmasEnv, td: Any, name: str) -> list[Any]:
    """List an entry of each agent, in the order of the simulator."""
    found = {
        agent: td[group, name][:, place]
        for group, agents in env.group_map.items()
        for place, agent in enumerate(agents)
    }
    return [found[agent.name] for agent in env.agents]


@pytest.mark.parametrize("name", ["balance", "simple_tag", "wheel"])
def test_data_is_that_of_the_bare_simulator(name):
    assert_equals_the_bare_simulator(name)


@pytest.mark.parametrize(
    "options",
    [
        {"continuous_actions": False},
        {"continuous_actions": False, "multidiscrete_actions": True},
        {"continuous_actions": False, "multidiscrete_actions": True, "dict_spaces": True},
    ],
    ids=["discrete", "several choices", "dicts"],
)
def test_choices_and_messages_are_those_of_the_bare_simulator(options):
    options = dict(options)
    if options.pop("dict_spaces", False):
        env = VmasEnv("simple_reference", 3, max_steps=LIMIT, seed=7, dict_spaces=True, **options)
        assert env.rollout(2).shape == (3, 2)
        return
    assert_equals_the_bare_simulator("simple_reference", **options)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:Force limits")  # of vel_control
@pytest.mark.slow
@pytest.mark.parametrize("name", env_names())
def test_data_of_each_scenario_is_that_of_the_bare_simulator(name):
    assert_equals_the_bare_simulator(name)


def test_torchrl_takes_it_with_the_keys_of_its_own_wrapper():
    data = to_torchrl(VmasEnv("balance", 3, max_steps=LIMIT)).rollout(2)

    theirs = TheirVmasEnv("balance", num_envs=3, max_steps=LIMIT).rollout(2)
    more = {"truncated", ("next", "truncated")}
    assert {*data.keys(True, True)} - more == {*theirs.keys(True, True)}


# --------------------------------------------------------------------------------- random numbers


def numbers() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()


def test_envs_in_turns_give_what_each_gives_alone():
    def run(*envs: VmasEnv) -> list[Any]:
        roots = [env.reset() for env in envs]
        steps = []
        for _ in range(5):
            for index, env in enumerate(envs):
                done, roots[index] = env.step_and_maybe_reset(env.rand_action(roots[index]))
                steps.append(done)
        return steps

    def env_of(seed: int) -> VmasEnv:
        return VmasEnv("balance", 2, max_steps=2, seed=seed)

    together = run(env_of(1), env_of(2))

    for seed in (1, 2):
        assert all(map(is_same, run(env_of(seed)), together[seed - 1 :: 2]))


def test_envs_in_threads_give_what_each_gives_alone_and_leave_the_global_generator():
    def run(seed: int) -> Any:
        env = VmasEnv("balance", 2, max_steps=2, seed=seed)
        return env.rollout(20, break_when_any_done=False)

    before, interval = torch.get_rng_state(), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(2) as threads:
            together = list(threads.map(run, (1, 2)))
    finally:
        sys.setswitchinterval(interval)

    assert torch.equal(torch.get_rng_state(), before)
    assert is_same(together[0], run(1)) and is_same(together[1], run(2))


def test_global_generators_stay_where_they_are_also_where_a_step_raises():
    before = numbers()
    env = VmasEnv("balance", 2, seed=0)
    env.rollout(2)
    env.set_seed(3)
    root = env.reset()
    with pytest.raises(InputError, match=r"out of its range.*clamp_actions=True"):
        env.step(root.set(("agents", "action"), torch.full((2, 3, 2), 9.0)))

    after = numbers()
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])
    assert before[2] == after[2]


def test_without_a_seed_envs_differ_and_follow_the_global_generator():
    roots = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(0)
            roots += [VmasEnv("balance", 2).reset() for _ in range(2)]

    assert is_same(roots[0], roots[2])
    assert not is_same(roots[0], roots[1])


def test_seeds_too_large_for_the_library_are_told_apart():
    roots = [VmasEnv("balance", 2, seed=seed).reset() for seed in (1, 2**32 + 1, 2**63 + 1)]

    assert not is_same(roots[0], roots[1]) and not is_same(roots[1], roots[2])
    env = VmasEnv("balance", 2)
    env.set_seed(2**32 + 1)
    assert is_same(env.reset(), roots[1])


@pytest.mark.parametrize("seed", [1, 2**32 + 1])
def test_a_seed_of_numpy_is_that_of_python_when_an_env_is_made_and_reset(seed):
    env = VmasEnv("balance", 2, seed=np.int64(seed))

    first = env.reset()

    assert is_same(first, VmasEnv("balance", 2, seed=seed).reset())
    assert is_same(first, env.reset(seed=np.int64(seed)))
    with pytest.raises(ArgumentError, match=r"seed is \[1, 2\].*Pass seed=0"):
        env.reset(seed=[1, 2])


def test_a_state_dict_holds_the_random_numbers():
    env, other = (VmasEnv("balance", 2, max_steps=2, seed=seed) for seed in (0, 1))
    env.rollout(3, break_when_any_done=False)
    with pytest.warns(
        UserWarning,
        match=r"new ones begin\. Those of .* cannot be saved.*leave record_for_resume out",
    ):
        other.load_state_dict(env.state_dict())

    assert is_same(env.reset(), other.reset())


def test_a_copy_draws_by_itself_and_the_same():
    env = VmasEnv("balance", 2, seed=0)
    twin = copy.deepcopy(env)

    assert is_same(env.reset(), twin.reset())
    assert is_same(env.reset(), twin.reset())


# ----------------------------------------------------------------------------- resets, ends, frozen rows


def test_rows_that_a_mask_leaves_out_go_on():
    runs = []
    for resets in (False, True):
        env = VmasEnv("balance", 4, seed=0)
        actions = [env.full_action_spec.rand(generator=_generator(step)) for step in range(4)]
        root = env.step_mdp(env.step(env.reset().update(actions[0])))
        if resets:
            mask = torch.tensor([True, False, True, False])[:, None]
            root = env.reset(root.set("_reset", mask))
        runs.append(env.step(root.update(actions[1]))["next"])

    assert is_same(runs[0][1::2], runs[1][1::2])
    assert not torch.equal(
        runs[0]["agents", "observation"][::2], runs[1]["agents", "observation"][::2]
    )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_limit_truncates_and_infos_begin_at_zero():
    data = VmasEnv("balance", 2, max_steps=3, seed=0).rollout(5, break_when_any_done=False)

    assert data["next", "truncated"][..., 0].tolist() == [[False, False, True, False, False]] * 2
    assert data["agents", "info", "pos_rew"][:, [0, 3]].eq(0).all()
    assert data["next", "agents", "info", "pos_rew"].ne(0).any()


def test_gradients_are_those_of_the_bare_simulator():
    push = torch.tensor([0.3, -0.2], requires_grad=True)
    env = VmasEnv("navigation", 2, max_steps=2, grad_enabled=True, seed=7)

    def act(td: Any) -> Any:
        return td.set(("agents", "action"), push.expand(2, 4, 2))

    data = env.rollout(4, act, break_when_any_done=False)
    (ours,) = torch.autograd.grad(data["next", "agents", "reward"].sum(), push)

    bare = vmas.make_env("navigation", num_envs=2, grad_enabled=True)
    bare.seed(7)
    paid = torch.zeros(())
    for _ in range(2):
        bare.reset()
        for _ in range(2):
            paid = paid + sum(one.sum() for one in bare.step([push.expand(2, 2)] * 4)[1])
    (theirs,) = torch.autograd.grad(paid, push)
    assert torch.allclose(ours, theirs)
    assert theirs.abs().min() > 0


# -------------------------------------------------------------------------------------- specs, groups


@pytest.mark.parametrize("categorical", [True, False], ids=["numbers", "one-hot"])
@pytest.mark.parametrize("several", [False, True], ids=["one choice", "several"])
def test_specs_and_data_agree(several, categorical):
    env = VmasEnv(
        "simple_world_comm",
        2,
        continuous_actions=False,
        categorical_actions=categorical,
        multidiscrete_actions=several,
        seed=0,
    )

    check_env_specs(env)

    assert list(env.group_map) == ["lead_adversary", "adversary", "agent"]


def test_a_group_map_decides_where_agents_are():
    group_map = {"ends": ["agent_2", "agent_0"], "middle": ["agent_1"]}
    env = VmasEnv("balance", 2, group_map=group_map, seed=0)
    whole = VmasEnv("balance", 2, seed=0).reset()["agents", "observation"]

    check_env_specs(env)
    env.set_seed(0)
    root = env.reset()

    assert torch.equal(root["ends", "observation"], whole[:, [2, 0]])
    assert torch.equal(root["middle", "observation"], whole[:, [1]])


def test_an_env_object_is_wrapped():
    env = VmasWrapper(vmas.make_env("balance", num_envs=2, max_steps=2, dict_spaces=True), seed=1)

    check_env_specs(env)

    assert env.rollout(4)["next", "truncated"].shape == (2, 2, 1)
    assert env.n_agents == 3  # of the simulator


def test_make_builds_many_rows_and_one():
    many = make("vmas/balance", 4, max_episode_steps=2, n_agents=2)
    one = make("vmas/balance")

    assert many.rollout(5)["agents", "action"].shape == (4, 2, 2, 2)
    assert one.reset().batch_size == ()
    assert len(list_envs(world="vmas")) == len(env_names()) > 40


def test_a_collector_takes_it():
    env = VmasEnv("balance", 3, max_steps=2, seed=0)

    (batch,) = Collector(env, frames_per_batch=12, total_frames=12)

    assert batch["next", "done"].sum() == 6


def test_pictures_are_drawn_of_each_row():
    try:
        env = VmasEnv("balance", 2, from_pixels=True, pixels_only=True, seed=0)
    except Exception as error:  # no display and no EGL
        pytest.skip(f"{type(error).__name__}: {error}")

    data = env.rollout(1)

    assert data["pixels"].shape == (2, 1, 700, 700, 3)
    assert data["pixels"].dtype == torch.uint8
    assert not torch.equal(data["pixels"][0], data["pixels"][1])
    assert ("agents", "observation") not in data.keys(True)
    assert env.render().shape == (700, 700, 3)


def test_a_video_shows_the_rows_that_are_asked_for(tmp_path):
    env = VmasEnv("balance", 3, seed=0)
    try:
        env.render()
    except Exception as error:  # no display and no EGL
        pytest.skip(f"{type(error).__name__}: {error}")

    video = record(env, None, tmp_path / "rows.gif", 2, rows=[0, 2])

    first, last = video.frames[0].chunk(2, -1)
    assert first.shape[-2:] == (700, 700)
    assert not torch.equal(first, last)


class Uneven(vmas.simulator.scenario.BaseScenario):
    """Two agents of one name that observe unlike things."""

    def make_world(self, batch_dim: int, device: torch.device, **kwargs: Any) -> Any:
        core = vmas.simulator.core
        world = core.World(batch_dim, device)
        for number in range(2):
            world.add_agent(core.Agent(name=f"agent_{number}"))
        return world

    def reset_world_at(self, env_index: int | None = None) -> None:
        pass

    def observation(self, agent: Any) -> Any:
        return {"place": agent.state.pos[:, : 1 + int(agent.name[-1])]}

    def reward(self, agent: Any) -> torch.Tensor:
        return agent.state.pos[:, 0]


def test_a_scenario_of_ones_own_may_observe_dicts_and_its_unlike_agents_are_apart():
    apart = MarlGroupMapType.ONE_GROUP_PER_AGENT
    env = VmasEnv(Uneven(), 2, group_map=apart, seed=0)

    check_env_specs(env)

    assert env.reset()["agent_1", "observation", "place"].shape == (2, 1, 2)
    with pytest.raises(SpecError, match=r"unlike shapes.*ONE_GROUP_PER_AGENT"):
        VmasEnv(Uneven(), 2)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: VmasEnv("balanc", 2), UnknownEnvError, "Did you mean 'balance'"),
        (lambda: VmasEnv(3, 2), ArgumentTypeError, "scenario is 3.*a name or a BaseScenario"),
        (lambda: VmasEnv("balance", 0), ArgumentError, "num_envs"),
        (lambda: VmasEnv("balance", 2, max_steps=0), ArgumentError, "max_steps"),
        (lambda: VmasEnv("balance", 2, agents=2), OptionError, "'agents': 2.*not used"),
        (lambda: VmasEnv("balance", 2, batch_size=[3]), BatchSizeError, "has 2 rows"),
        (lambda: VmasEnv("balance", 2, group_map={"a": ["agent_0"]}), ArgumentError, "in 0 groups"),
        (
            lambda: VmasEnv("simple", 2, group_map={"done": ["agent_0"]}),
            ArgumentError,
            "means something else",
        ),
        (lambda: VmasWrapper("balance"), ArgumentTypeError, r"VmasEnv\('balance'\)"),
        (
            lambda: GymWrapper(vmas.make_env("balance", 2, wrapper="gymnasium_vec")),
            ArgumentTypeError,
            r"VmasWrapper\(env\.unwrapped\)",
        ),
        (lambda: make("vmas/balance", 2, backend="serial"), ArgumentError, "Leave backend out"),
    ],
)
def test_what_cannot_be_built_is_refused(build, error, words):
    with pytest.raises(error, match=words):
        build()
