"""Envs of EnvPool: the library stepped by hand, rows that are told when to reset, seeds, masks, bad input."""

import copy
import os
import subprocess
import sys
import textwrap
from functools import partial

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from envkit import (
    Compose,
    GymEnv,
    InitTracker,
    MixedEnv,
    MultiThreadedEnv,
    MultiThreadedEnvWrapper,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
    default_info_dict_reader,
)
from envkit.env.seeding import seed_chain
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    CopyError,
    EncodingError,
    InputError,
    MissingLibraryError,
    NotResetError,
    OptionError,
    ResumeError,
    StaleDataError,
    StepMaskError,
)
from envkit_bridges.worlds.envpool.library import import_envpool

envpool = import_envpool()

pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered")  # the bare library's

ROWS = 4
cartpole = partial(MultiThreadedEnv, ROWS, "CartPole-v1")
short = partial(cartpole, create_env_kwargs={"max_episode_steps": 5})


@pytest.fixture
def env():
    with cartpole() as env:
        env.set_seed(0)
        yield env


@pytest.fixture
def short_env():
    with short() as env:
        env.set_seed(0)
        yield env


def bare_pool(name, seed, count=ROWS, **options):
    seeds = np.array(seed_chain(seed, count)[0], np.uint32).view(np.int32)
    return envpool.make_gymnasium(name, num_envs=count, env_seed=seeds.tolist(), **options)


def bare_steps(pool, actions):
    """Step the library by hand, resetting what has ended; roots, and what each step gave."""
    root, _ = pool.reset()
    for action in actions:
        following, reward, terminated, truncated, _ = pool.step(action)
        yield root, following, reward, terminated, truncated
        root, over = following.copy(), np.flatnonzero(terminated | truncated).astype(np.int32)
        if len(over):
            root[over] = pool.reset(over)[0]


# ----------------------------------------------------------------------------- the library by hand


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"max_episode_steps": 30}),
        ("Hopper-v4", {}),
        ("FrozenLake-v1", {}),
    ],
)
@pytest.mark.parametrize("way", ["recorded", "stepped"])
def test_data_is_that_of_the_bare_library_to_the_bit(name, options, way):
    with MultiThreadedEnv(ROWS, name, create_env_kwargs=options) as env:
        env.set_seed(7)
        if way == "recorded":
            data = env.rollout(120, break_when_any_done=False)
        else:
            td, steps = env.reset(), []
            for _ in range(120):
                step, td = env.step_and_maybe_reset(env.rand_action(td))
                steps.append(step)
            data = torch.stack(steps, 1)

    pool = bare_pool(name, 7, **options)
    actions = data["action"].unbind(1)
    bare = list(bare_steps(pool, [action.numpy() for action in actions]))

    assert data["next", "done"].any()
    roots, following, rewards, terminated, truncated = (
        np.stack(part, 1) for part in zip(*bare, strict=True)
    )
    assert np.array_equal(data["observation"], roots)
    assert np.array_equal(data["next", "observation"], following)
    assert np.array_equal(data["next", "reward"][..., 0], rewards)
    assert np.array_equal(data["next", "terminated"][..., 0], terminated)
    assert np.array_equal(data["next", "truncated"][..., 0], truncated)


def with_memory():
    """Make a policy that writes more than its action."""
    torch.manual_seed(0)
    logits = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])

    def act(td):
        seen = td.get("seen", torch.zeros(ROWS, 1)) + 1
        return logits(td).update({"action": td["logits"].argmax(-1), "seen": seen})

    return act


@pytest.mark.parametrize("policy", [None, with_memory()], ids=["random", "policy"])
def test_recording_gives_what_stepping_does(policy):
    datas = []
    with short() as env, torch.no_grad():
        for callback in (None, lambda env, td: None):  # with one, every step is made by itself
            env.set_seed(3)
            datas.append(env.rollout(20, policy, callback=callback, break_when_any_done=False))

    recorded, stepped = datas
    assert sorted(recorded.keys(True, True), key=str) == sorted(stepped.keys(True, True), key=str)
    assert (recorded == stepped).all()
    assert policy is None or recorded["seen"][0, -1] == 20


def test_a_policy_that_masks_a_step_is_obeyed_where_recording_was_under_way(env):
    steps = iter(range(9))

    def act(td):
        if next(steps) == 3:
            td["_step"] = torch.tensor([True, False, True, True])
        return td.set("action", torch.ones(ROWS, dtype=torch.int64))

    data = env.rollout(6, act, break_when_any_done=False)

    assert data.shape == (ROWS, 6)
    stood = (data["next", "observation"] == data["observation"]).all(-1)
    assert stood.nonzero().tolist() == [[1, 3]]


# ------------------------------------------------------------------------------------------- specs


def test_specs_are_those_of_the_librarys_spaces(env):
    assert env.batch_size == (ROWS,) and env.batch_locked
    assert env.action_spec.shape == (ROWS,) and env.action_spec.dtype == torch.int64
    assert env.full_reward_spec["reward"].shape == (ROWS, 1)
    assert sorted(env.full_done_spec.keys()) == ["done", "terminated", "truncated"]
    assert env.single_observation_spec["observation"].shape == (4,)


def test_discrete_actions_are_one_hot_where_that_is_asked_for():
    runs = []
    for categorical in (True, False):
        with cartpole(categorical_action_encoding=categorical) as env:
            env.set_seed(0)
            chosen = torch.tensor([0, 1, 1, 0])
            action = chosen if categorical else nn.functional.one_hot(chosen, 2)
            runs.append(env.step(env.reset().set("action", action))["next", "observation"])
            check_env_specs(env)

    assert torch.equal(*runs)


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Maze-v0", "HumanoidRun-v1", "Pong-v5"])
def test_integers_masks_nested_and_unbounded_observations_and_pixels_are_as_declared(name):
    with MultiThreadedEnv(2, name) as env:
        env.set_seed(0)

        check_env_specs(env)


def test_an_observation_that_is_none_of_its_space_is_refused(env):
    with MultiThreadedEnv(2, "FrozenLake-v1", create_env_kwargs={"size": 8}) as env:
        assert env.observation_spec["observation"].n == 64
    codec = env.core.observation

    with pytest.raises(EncodingError, match=r"'observation' is 64, which is not in its space"):
        codec.encode_arrays(np.array([3, 64], np.int32))


# ----------------------------------------------------------------------------------- rows and masks


def test_rows_that_a_mask_leaves_out_stand_still_and_go_on_as_if_nothing_had_been(env):
    mask = torch.tensor([True, False, True, False])
    td = env.reset().set("action", torch.ones(ROWS, dtype=torch.int64))
    root = td.clone()

    following = env.step(td.set("_step", mask))["next"]

    assert torch.equal(following["observation"][~mask], root["observation"][~mask])
    assert (following["observation"][mask] != root["observation"][mask]).any(-1).all()
    assert torch.equal(following["reward"][:, 0], mask.float())

    late = env.step(env.step_mdp(td).set("action", root["action"]))
    env.set_seed(0)
    whole = env.step(env.reset().set("action", root["action"]))
    assert torch.equal(late["next", "observation"][~mask], whole["next", "observation"][~mask])


def test_a_mask_of_no_row_steps_nothing(env):
    td = env.rand_action(env.reset())

    out = env.step(td.clone().set("_step", torch.zeros(ROWS, dtype=torch.bool)))

    assert torch.equal(out["next", "observation"], td["observation"])


def test_rows_are_reset_where_a_mask_says_so(env):
    data = env.rollout(3)
    td = env.step_mdp(data[:, -1])
    mask = torch.tensor([[False], [True], [False], [False]])

    fresh = env.reset(td.clone().set("_reset", mask))

    changed = (fresh["observation"] != td["observation"]).any(-1)
    assert changed.tolist() == [False, True, False, False]
    assert env.reset(td.clone().set("_reset", mask & False)).batch_size == (ROWS,)


def test_a_row_that_has_ended_must_be_reset_or_left_out(short_env):
    data = short_env.rollout(5)
    td = short_env.rand_action(short_env.step_mdp(data[:, -1]))
    over = td["done"][:, 0]
    assert over.all()

    with pytest.raises(StepMaskError, match=r"rows \[0, 1, 2, 3\] have ended.*Reset"):
        short_env.step(td.exclude("done", "terminated", "truncated"))


def test_a_step_before_the_first_reset_is_refused(env):
    with pytest.raises(NotResetError, match=r"rows \[0, 1, 2, 3\] .*Call reset"):
        env.step(env.rand_action())


def test_terminated_and_truncated_are_told_apart():
    with short() as cut, cartpole() as fallen:
        ended = cut.rollout(9)["next"][:, -1]
        assert ended["truncated"].all() and not ended["terminated"].any()

        ended = fallen.rollout(400)["next"][:, -1]
        assert ended["terminated"].any() and not ended["truncated"].any()


def test_frames_are_repeated_until_a_row_ends():
    name, options = "CartPole-v1", {"max_episode_steps": 8}
    with MultiThreadedEnv(ROWS, name, frame_skip=3, create_env_kwargs=options) as env:
        env.set_seed(1)
        action = torch.tensor([0, 1, 1, 0])
        data = env.rollout(4, actions=[action] * 3)
        pool = bare_pool(name, 1, **options)

    bare = list(bare_steps(pool, [action.numpy().astype(np.int32)] * 8))

    assert data["next", "reward"][..., 0].tolist() == [[3, 3, 2]] * ROWS
    assert np.array_equal(data["next", "observation"][:, 1], bare[5][1])
    assert np.array_equal(data["next", "observation"][:, 2], bare[7][1])
    assert data["next", "truncated"][:, 2].all()


# -------------------------------------------------------------------------------------- seeds, infos


def test_row_i_has_the_ith_seed_of_the_chain():
    seeds, after = seed_chain(5, ROWS)
    with cartpole() as env, MultiThreadedEnv(1, "CartPole-v1") as one:
        following = env.set_seed(5)
        together = env.reset()["observation"]
        apart = []
        for seed in seeds:
            one.set_seed(seed)
            apart.append(one.reset()["observation"])
        assert env.set_seed(5, static_seed=True) == 5
        same = env.reset()["observation"]

    assert following == after
    assert torch.equal(together, torch.cat(apart))
    assert (same == same[0]).all()


def test_an_env_that_was_not_seeded_follows_torchs_global_generator():
    starts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        with cartpole() as env:
            starts.append(env.reset()["observation"])

    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


@pytest.mark.parametrize("name", ["seed", "env_seed"])
def test_a_seed_among_the_keywords_may_be_too_large_for_the_library(name):
    def first(seed):
        seeds = seed if name == "seed" else [seed, seed + 9]
        with MultiThreadedEnv(2, "CartPole-v1", create_env_kwargs={name: seeds}) as env:
            return env.reset()["observation"]

    roots = {seed: first(seed) for seed in (5, 2**31 + 5, 2**32 + 5, 2**63 + 5, -(2**40))}

    assert len({tuple(root.flatten().tolist()) for root in roots.values()}) == len(roots)
    assert all(torch.equal(first(seed), root) for seed, root in roots.items())


def test_seeds_too_large_for_the_library_are_told_apart():
    starts = []
    for seed in (1, 2**31 + 1, 2**32 + 1, 2**63 + 1):
        with MultiThreadedEnv(1, "CartPole-v1") as env:
            env.set_seed(seed)
            starts.append(tuple(env.reset()["observation"][0].tolist()))

    assert len(set(starts)) == 4


def test_infos_are_read_without_the_row_numbers():
    with MultiThreadedEnv(2, "HalfCheetah-v4") as env:
        env.set_seed(0)
        env.set_info_dict_reader(default_info_dict_reader())
        data = env.rollout(2)

        assert {"x_position", "elapsed_step"} <= set(data["next"].keys())
        assert "env_id" not in data.keys() and "players" not in data.keys()
        assert data["next", "elapsed_step"].tolist() == [[1, 2], [1, 2]]
        check_env_specs(env)


# -------------------------------------------------------------------------------- in other envs


def test_transforms_see_the_true_last_observation_and_fresh_roots(short_env):
    env = TransformedEnv(short_env, Compose(StepCounter(), RewardSum(), InitTracker()))

    data = env.rollout(12, break_when_any_done=False)

    assert data["next", "step_count"][0, :, 0].tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    assert data["is_init"][0, :, 0].nonzero()[:, 0].tolist() == [0, 5, 10]
    check_env_specs(env)


def test_it_steps_beside_other_envs():
    gym = SerialEnv(2, partial(GymEnv, "CartPole-v1", categorical_action_encoding=True))
    with MixedEnv([short(), gym]) as env:
        env.set_seed(0)
        data = env.rollout(12, break_when_any_done=False)

        check_env_specs(env)

    assert data.shape == (ROWS + 2, 12)
    assert data["next", "truncated"][:ROWS, 4].all()


def test_what_a_subclass_overrides_is_honoured():
    class Doubled(MultiThreadedEnv):
        def read_reward(self, reward):
            return 2 * super().read_reward(reward)

    with Doubled(ROWS, "CartPole-v1") as env:
        env.set_seed(0)
        mask = torch.tensor([True, False, True, True])

        rollout = env.rollout(30, break_when_any_done=False)
        masked = env.step(env.rand_action(env.reset()).set("_step", mask))

    assert (rollout["next", "reward"] == 2).all()
    assert masked["next", "reward"][:, 0].tolist() == [2, 0, 2, 2]


def test_a_step_that_was_not_received_is_lost_to_the_next(env):
    td = env.rand_action(env.reset())

    older = env._send(td.clone())
    newer = env._send(td.clone())

    with pytest.raises(StaleDataError, match="Receive a step before the next one"):
        older.recv()
    assert newer.recv()["next", "reward"].eq(1).all()


# ------------------------------------------------------------------------------- wrapper and life


def test_a_pool_that_exists_is_wrapped():
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=3, seed=1, max_episode_steps=6)
    with MultiThreadedEnvWrapper(pool) as env:
        assert env.batch_size == (3,)
        assert env.config["max_episode_steps"] == 6
        first = env.reset()["observation"].clone()
        env.set_seed(0)
        assert not torch.equal(env.reset()["observation"], first)
        assert env.config["max_episode_steps"] == 6
        check_env_specs(env)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MultiThreadedEnv(0, "CartPole-v1"), ArgumentError, "num_workers is 0"),
        (lambda: MultiThreadedEnv(2.5, "CartPole-v1"), ArgumentTypeError, "num_workers is 2.5"),
        (lambda: MultiThreadedEnv(2, "CartPole-v7"), ArgumentError, "Did you mean 'CartPole-v1'"),
        (lambda: MultiThreadedEnv(2, 7), ArgumentTypeError, "env_name is 7, of type int"),
        (
            lambda: cartpole(create_env_kwargs={"max_episode_step": 3}),
            OptionError,
            "Did you mean 'max_episode_steps'",
        ),
        (lambda: cartpole(create_env_kwargs={"num_envs": 3}), OptionError, "num_workers"),
        (lambda: cartpole(batch_size=(3,)), BatchSizeError, r"batch_size is \(3,\).*4 envs"),
        (lambda: cartpole(frame_skip=0), ArgumentError, "frame_skip is 0"),
        (lambda: MultiThreadedEnv(2, "Go9x9-v1"), ArgumentError, "up to 2 players"),
        (lambda: MultiThreadedEnvWrapper("CartPole-v1"), ArgumentTypeError, "MultiThreadedEnv"),
        (
            lambda: MultiThreadedEnvWrapper(envpool.make_dm("CartPole-v1", num_envs=2)),
            ArgumentTypeError,
            "env_type='gymnasium'",
        ),
        (
            lambda: MultiThreadedEnvWrapper(
                envpool.make_gymnasium("CartPole-v1", num_envs=4, batch_size=2)
            ),
            ArgumentError,
            "in batches of 2",
        ),
        (
            lambda: MultiThreadedEnv(2, "CartPole-v1", create_env_kwargs=[3]),  # type: ignore[arg-type]
            ArgumentTypeError,
            r"create_env_kwargs are \[3\], of type list, but must be one dict",
        ),
    ],
)
def test_what_cannot_be_an_env_says_how_to_make_one(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_actions_that_are_none_of_the_spec_are_refused_before_anything_moves(env):
    td = env.reset()

    with pytest.raises(InputError, match="row 2"):
        env.step(td.clone().set("action", torch.tensor([0, 1, 2, 0])))

    assert env.step(td.set("action", torch.zeros(ROWS, dtype=torch.int64)))["next", "reward"].all()


def test_its_episodes_begin_again_where_a_state_dict_is_loaded(env):
    td = env.reset()
    with pytest.warns(UserWarning, match="episodes under way in MultiThreadedEnv"):
        env.load_state_dict(env.state_dict())

    data, root = env.step_and_maybe_reset(env.rand_action(td))
    later = env.step(env.rand_action(root))

    assert data["next", "truncated"].all() and not root["done"].any()
    assert data["next", "observation"].equal(td["observation"])
    assert later["next", "reward"].all() and not later["next", "truncated"].any()


def test_its_episodes_can_be_neither_saved_nor_copied_nor_reset_with_options(env):
    with pytest.raises(ResumeError, match="EnvPool keeps the states"):
        env.record_for_resume().state_dict()
    with pytest.raises(CopyError, match="pass a function"):
        copy.deepcopy(env)
    with pytest.raises(OptionError, match=r"\['options'\].*create_env_kwargs"):
        env.reset(options={})


def test_a_value_of_another_type_than_the_library_takes_is_told():
    with pytest.raises(
        ArgumentTypeError, match=r"max_episode_steps of CartPole-v1 is 'long'.*int: 500"
    ):
        cartpole(create_env_kwargs={"max_episode_steps": "long"})


def test_a_missing_library_is_told_when_an_env_is_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)

    with pytest.raises(MissingLibraryError, match=r"pip install -e '\.\[envpool\]'"):
        cartpole()

    assert MultiThreadedEnv.available_envs == []


def test_the_librarys_names_are_listed():
    assert {"CartPole-v1", "Pong-v5", "HalfCheetah-v4"} <= set(MultiThreadedEnv.available_envs)


@pytest.mark.slow
def test_the_library_leaves_the_variables_of_matplotlib_as_they_are():
    script = """
        import os
        from envkit import MultiThreadedEnv
        os.environ["MPLBACKEND"] = "svg"
        MultiThreadedEnv(1, "CartPole-v1").close()
        print(os.environ.get("MPLBACKEND"), os.environ.get("MPLCONFIGDIR"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MPL")},
        timeout=60,
    )

    assert done.stdout.split() == ["svg", "None"], done.stderr
