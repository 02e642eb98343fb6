"""One contract for every kind of env: what users may rely on without knowing what is inside."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from importlib.util import find_spec

import cloudpickle
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envkit import (
    BraxEnv,
    Compose,
    DMControlEnv,
    GymEnv,
    GymnaxEnv,
    GymWrapper,
    InitTracker,
    JaxMARLEnv,
    JumanjiEnv,
    MixedEnv,
    MultiThreadedEnv,
    NavixEnv,
    ParallelEnv,
    PettingZooEnv,
    PgxEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TorchVectorWrapper,
    TransformedEnv,
    VmasEnv,
    XMiniGridEnv,
    check_env_specs,
)
from envkit.env.base import EnvBase
from envkit.env.policy import observation_inputs
from envkit.errors import (
    ClosedEnvError,
    DoneError,
    NotEnumerableError,
    ResetMaskError,
    ResumeError,
    StaleDataError,
    StepMaskError,
)
from envkit_bridges.gym.like import GymLikeEnv
from envkit_bridges.gym.torch_rows import TorchRowsEnv
from tests.zoo.drift import gym_rows
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.frozen import stays_frozen
from tests.zoo.jax_drift import jax_rows
from tests.zoo.ray_cluster import on_ray
from tests.zoo.shaped_envs import Groups, Several
from tests.zoo.torch_envs import AutoresetMode, TorchPendulum

make_count = partial(Count, 5)
make_cartpole = partial(GymEnv, "CartPole-v1", max_episode_steps=7)
make_brax = partial(BraxEnv, "fast", device="cpu", batch_size=[3], episode_length=5)
make_control = partial(DMControlEnv, "cartpole", "swingup", task_kwargs={"time_limit": 0.06})
make_games = partial(PettingZooEnv, "mpe/simple_spread_v3", N=2, max_cycles=5)


def make_mixed() -> MixedEnv:
    return MixedEnv([jax_rows(limit=5), gym_rows(limit=6)])


def make_transformed() -> TransformedEnv:
    transforms = Compose(StepCounter(4), RewardSum(), InitTracker())
    return TransformedEnv(SerialEnv(3, make_count), transforms)


# Rollouts of the tests below have few lengths, 3, 12 and 60 steps: a JAX env compiles a program for each.
KINDS = {
    "count": make_count,
    "stateless count": partial(StatelessCount, 5, batch_size=[3]),
    "cartpole": make_cartpole,
    "pendulum": partial(GymEnv, "Pendulum-v1", max_episode_steps=5),
    "control": make_control,
    "serial control": partial(SerialEnv, 2, make_control),
    "serial count": partial(SerialEnv, 3, make_count),
    "serial cartpole": partial(SerialEnv, 3, make_cartpole),
    "serial cartpole without buffers": partial(SerialEnv, 3, make_cartpole, use_buffers=False),
    "serial of stateless": partial(SerialEnv, 2, partial(StatelessCount, 5, batch_size=[2])),
    "parallel count": partial(ParallelEnv, 3, make_count, num_processes=2),
    "parallel cartpole": partial(ParallelEnv, 3, make_cartpole, num_processes=2),
    "ray count": partial(on_ray, 3, make_count, num_processes=2),
    "ray cartpole": partial(on_ray, 3, make_cartpole, num_processes=2),
    "brax": make_brax,
    "brax nested": partial(make_brax, state_layout="nested"),
    "gymnax": partial(
        GymnaxEnv, "CartPole-v1", batch_size=[3], episode_length=5, params_per_row=True
    ),
    "jumanji": partial(
        JumanjiEnv, "SlidingTilePuzzle-v0", batch_size=[3], episode_length=5, metrics=True
    ),
    "navix": partial(NavixEnv, "Navix-Empty-5x5-v0", batch_size=[3], episode_length=5),
    "jaxmarl": partial(JaxMARLEnv, "MPE_simple_adversary_v3", batch_size=[3], episode_length=5),
    "xminigrid": partial(
        XMiniGridEnv, "XLand-MiniGrid-R1-9x9", batch_size=[3], episode_length=5, params_per_row=True
    ),
    "pgx": partial(PgxEnv, "minatar-breakout", batch_size=[3], episode_length=5),
    "torch rows": lambda: GymWrapper(TorchPendulum()),
    "torch rows that reset themselves": lambda: GymWrapper(
        TorchPendulum(mode=AutoresetMode.SAME_STEP, as_dict=True)
    ),
    "vmas": partial(VmasEnv, "simple_tag", 3, max_steps=5, seed=0),
    "threads of a library": partial(
        MultiThreadedEnv, 3, "CartPole-v1", create_env_kwargs={"max_episode_steps": 7}
    ),
    "games": make_games,
    "games in turns": partial(
        PettingZooEnv, "mpe/simple_tag_v3", False, use_mask=True, max_cycles=2
    ),
    "serial games": partial(SerialEnv, 3, make_games),
    "parallel games": partial(ParallelEnv, 3, make_games, num_processes=2),
    "mixed": make_mixed,
    "transformed": make_transformed,
    "groups": Groups,
    "several": Several,
}


SLOW = (
    *(
        "brax nested",
        "gymnax",
        "jumanji",
        "pgx",
        "jaxmarl",
        "navix",
        "xminigrid",
        "vmas",
        "ray count",
        "ray cartpole",
    ),
    *("games in turns", "serial games", "parallel games", "serial control"),
)


def marks(kind: str) -> list[pytest.MarkDecorator]:
    """Marks of a kind of env: Ray takes seconds to start, each time."""
    more = [pytest.mark.sweep] if kind.startswith("ray") else []
    if kind == "navix":  # which brings so much that the development extras leave it out
        more = [pytest.mark.skipif(find_spec("navix") is None, reason="needs the extra navix")]
    return [pytest.mark.slow, *more] if kind in SLOW else []


kinds = [pytest.param(kind, marks=marks(kind)) for kind in KINDS]


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


class Recorded:
    """Plays recorded actions, batch size ``(*batch, time)``, one a call."""

    def __init__(self, actions: TensorDictBase):
        self.steps = iter(actions.unbind(-1))

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.update(next(self.steps).clone())


def first_root(env: EnvBase) -> TensorDictBase:
    env.set_seed(3)
    return env.reset()


def play(env: EnvBase, actions: TensorDictBase, **stop) -> TensorDictBase:
    env.set_seed(3)
    return env.rollout(actions.shape[-1], Recorded(actions), **stop)


def recorded_actions(env: EnvBase, steps: int) -> TensorDictBase:
    spec = env.full_action_spec
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
    assert not any(root[key].any() for key in env.done_keys)
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
    fake = env.fake_tensordict()["next"]
    following = env.rand_step(env.reset())["next"]

    assert set(following.keys(True, True)) == {
        *env.full_observation_spec.keys(True, True),
        *env.full_reward_spec.keys(True, True),
        *env.full_done_spec.keys(True, True),
    }
    for key in (*env.reward_keys, *env.done_keys):
        assert following[key].shape == fake[key].shape
        assert following[key].shape[-1] == 1


def test_the_next_root_has_neither_reward_nor_action(env):
    data = env.rand_step(env.reset()).set("mine", torch.zeros(env.batch_size))

    root = env.step_mdp(data)

    assert set(root.keys(True, True)) == {
        "mine",
        *env.full_observation_spec.keys(True, True),
        *env.full_done_spec.keys(True, True),
    }
    assert is_equal(root.exclude("mine"), data["next"].exclude(*env.reward_keys))


def test_a_fake_step_has_the_layout_of_a_real_one(env):
    fake = env.fake_tensordict()

    real = env.rollout(3)

    dims = len(env.batch_size)
    assert layout(fake, dims) == layout(real, dims + 1)
    assert fake.batch_size == env.batch_size


def test_preset_next_entries_win_over_computed_ones(env):
    td = env.rand_action(env.reset())
    rewards = env.full_reward_spec.zero().apply(lambda reward: reward + 77)
    td["next"] = rewards.clone()

    out = env.step(td)

    assert is_equal(out["next"].select(*env.reward_keys), rewards)
    assert "done" in out["next"]


@pytest.mark.parametrize("advance", [False, True], ids=["step", "step and maybe reset"])
@pytest.mark.parametrize("handed", [lambda td: td, lambda td: td.copy()], ids=["same", "copy"])
@pytest.mark.filterwarnings("ignore::envkit.StaleNextWarning")
def test_what_an_earlier_step_wrote_under_next_is_no_preset(env, handed, advance):
    step = (lambda td: env.step_and_maybe_reset(td)[0]) if advance else env.step
    td = step(env.rand_action(first_root(env)))
    old = td["next"].copy()
    rewards = env.full_reward_spec.zero().apply(lambda reward: reward + 77)
    td = env.rand_action(handed(td))
    for key in env.reward_keys:
        td["next", key] = rewards[key]

    if isinstance(env, MixedEnv):  # which sees that its simulators have moved on
        with pytest.raises(StaleDataError, match="step_mdp"):
            step(td)
        return
    out = step(td)

    assert is_equal(out["next"].select(*env.reward_keys), rewards)
    for key in (*env.observation_keys, *env.done_keys):
        assert out["next"].get(key) is not old.get(key), key


def test_data_that_was_given_out_is_safe_from_later_steps(env):
    results = [env.reset()]
    for _ in range(6):
        data, root = env.step_and_maybe_reset(env.rand_action(results[-1].clone()))
        results += [data, root]
    copies = [td.clone() for td in results]

    _, root = env.step_and_maybe_reset(env.rand_action(results[-1].clone()))
    env.reset()
    env.rollout(12, break_when_any_done=False)
    root.apply_(torch.zeros_like)

    assert all(map(is_equal, results, copies))


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
    assert stays_frozen(data, env.reward_keys, is_equal)


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

    td, steps, act = first_root(env), [], Recorded(actions)
    for _ in range(12):
        done, td = env.step_and_maybe_reset(act(td))
        steps.append(done)

    assert is_equal(torch.stack(steps, len(env.batch_size)), data)


def test_step_and_maybe_reset_is_a_step_and_a_reset(env):
    actions = recorded_actions(env, 8)
    runs = []

    for together in (True, False):
        td, act, seen = first_root(env), Recorded(actions), []
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

    data = env.rollout(4, callback=lambda _, td: seen.append(td["next"].clone()), **stop)

    assert len(seen) == data.shape[-1] - 1
    assert all(is_equal(td, data["next"][..., step]) for step, td in enumerate(seen))


def test_a_rollout_can_go_on_where_another_ended(env):
    actions = recorded_actions(env, 6)
    whole = play(env, actions, break_when_any_done=False)

    first = play(env, actions[..., :3])
    assert not first["next", "done"].any()
    rest = env.rollout(
        3,
        Recorded(actions[..., 3:]),
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
        env.rollout(12, break_when_any_done=False),
        env.rollout(60, break_when_all_done=True),
    ]

    assert [private_keys(td) for td in outputs] == [[]] * len(outputs)


# --------------------------------------------------------------------- the options of a rollout


@pytest.mark.parametrize("stop", ["break_when_any_done", "break_when_all_done"])
def test_all_entries_of_a_rollout_lie_in_contiguous_memory(env, stop):
    options = {"return_contiguous": True} if env._runs().is_program(None) else {}
    data = env.rollout(60, **{stop: stop == "break_when_all_done"}, **options)

    tensors = {key: leaf for key, leaf in data.items(True, True) if isinstance(leaf, torch.Tensor)}
    assert [key for key, leaf in tensors.items() if not leaf.is_contiguous()] == []


def test_a_lazy_rollout_holds_the_same(env):
    actions = recorded_actions(env, 3)

    dense, lazy = (play(env, actions, return_contiguous=dense) for dense in (True, False))

    assert isinstance(lazy, LazyStackedTensorDict)
    assert is_equal(lazy.contiguous(), dense)


def test_a_rollout_is_written_where_it_is_asked_to(env):
    actions = recorded_actions(env, 2)
    data = play(env, actions)
    out = torch.stack([data[..., 0].clone().apply_(torch.zeros_like)] * 3, len(env.batch_size))

    given = play(env, actions, out=out)

    assert is_equal(given, data)
    assert is_equal(out[..., :2], data)


def test_a_rollout_can_be_cut_short(env):
    """The last step is truncated and done at each level that can tell; elsewhere the advice is given."""
    levels = [level for level, names in env.done_levels.items() if "truncated" in names]
    if not levels:
        with pytest.raises(DoneError, match="add_truncated_keys"):
            env.rollout(3, set_truncated=True)
        return

    last = env.rollout(3, set_truncated=True)["next"][..., -1]

    for level in levels:
        assert last[(*level, "truncated")].all() and last[(*level, "done")].all()
        assert not last[(*level, "terminated")].any()


def test_a_plain_function_gets_the_observations_and_gives_the_actions(env):
    actions, seen = recorded_actions(env, 2), []
    steps = iter(actions.unbind(-1))

    def act(*observations):
        seen.append(observations)
        step = next(steps)
        return tuple(step[key] for key in env.action_keys)

    env.set_seed(3)
    data = env.rollout(2, act)

    assert is_equal(data, play(env, actions))
    for key, first in zip(observation_inputs(env), seen[0], strict=True):
        assert data[..., 0][key].equal(first)


def test_all_actions_are_those_that_the_spec_has(env):
    if env.cardinality() == float("inf"):
        with pytest.raises(NotEnumerableError, match="discrete"):
            env.all_actions()
        return

    actions = env.all_actions()

    assert actions.batch_size == (env.cardinality(), *env.batch_size)
    assert all(env.full_action_spec.is_in(action) for action in actions[:: len(actions) // 2])


def test_types_that_are_as_declared_pass_the_checks(env):
    assert not env.run_type_checks

    env.run_type_checks = True
    data = env.rollout(3)
    env.run_type_checks = False

    assert data.shape[:-1] == env.batch_size


# ------------------------------------------------------------------------------------------ masks


def half(env: EnvBase) -> torch.Tensor:
    """Select every second row; of an env without rows nothing."""
    return (torch.arange(env.batch_size.numel()) % 2 == 1).reshape(env.batch_size)


def test_rows_that_are_not_stepped_repeat_their_root(env):
    root = env.step_mdp(env.rand_step(env.reset()))
    mask = half(env)
    if isinstance(env, TorchRowsEnv):
        with pytest.raises(StepMaskError, match="steps all its rows"):
            env.step(env.rand_action(root.clone()).set("_step", mask))
        return

    out = env.step(env.rand_action(root.clone()).set("_step", mask))

    kept = [*env.done_keys, *env.observation_keys]
    assert is_equal(out["next"][~mask].select(*kept), root[~mask].select(*kept))
    assert is_equal(out.exclude("next", *env.action_keys), root)
    assert not any(out["next"][~mask][key].any() for key in env.reward_keys)


def test_rows_that_were_not_stepped_go_on_from_where_they_were(env):
    actions = recorded_actions(env, 2)
    act = Recorded(actions)
    root = first_root(env)
    skipped = env.step(act(root).set("_step", torch.zeros(env.batch_size, dtype=torch.bool)))
    stepped = env.step(act(env.step_mdp(skipped)))

    direct = env.step(first_root(env).update(stepped.select(*env.action_keys).clone()))

    assert is_equal(stepped["next"], direct["next"])


def test_rows_that_are_not_reset_keep_all_they_had(env):
    """Of an env without rows none is selected: nothing happens to it, or it says why it refuses."""
    td = env.rand_step(env.step_mdp(env.rand_step(env.reset())))
    root = env.rand_action(env.step_mdp(td))
    mask = half(env)
    asked = root.clone().set("_reset", mask[..., None])
    if isinstance(env, GymLikeEnv) and not env.batch_size:
        with pytest.raises(ResetMaskError, match="one simulator cannot be reset in part"):
            env.reset(asked)
        return
    if isinstance(env, TorchVectorWrapper) and not env.partial_reset:
        with pytest.raises(ResetMaskError, match="can reset only all of its rows"):
            env.reset(asked)
        return

    fresh = env.reset(asked)
    # and inside: the next step is the one that the data leads to
    follows = env.step(fresh.clone())["next"] if env.batch_locked else None

    assert is_equal(fresh[~mask], root[~mask])
    assert is_equal(fresh.select(*env.action_keys), root.select(*env.action_keys))
    assert not fresh["done"][mask].any()
    for key in {"count", ("deep", "twice"), ("agent0", "position")} & set(env.observation_keys):
        if follows is not None:
            moved = (follows[key] - fresh[key]).unique().tolist()
            assert moved == [2.0 if key == ("deep", "twice") else 1]


# ------------------------------------------------------------------- a module with specs and an end


@pytest.fixture(scope="module", params=kinds)
def spare(request):
    """An env that tests may change; the last of them closes it."""
    env = KINDS[request.param]()
    yield env
    env.close(raise_if_closed=False)


def inner_envs(env: EnvBase) -> list[EnvBase]:
    """The envs inside a transformed or mixed one; those of a batch are no part of it."""
    return [child for child in env.children() if isinstance(child, EnvBase)]


def test_locks_and_modes_reach_inside(spare):
    opened, evaluated = spare.set_spec_lock_(False), spare.eval()

    inside = [spare, *inner_envs(spare)]
    assert opened is evaluated is spare
    assert not any(part.is_spec_locked or part.training for part in inside)
    spare.set_spec_lock_(True)
    spare.train()
    assert all(part.is_spec_locked and part.training for part in inside)


def test_an_assigned_spec_is_the_one_that_is_read(spare):
    for name in ("observation", "reward", "done", "action"):
        wanted = getattr(spare, f"full_{name}_spec").clone()
        setattr(spare, f"full_{name}_spec", wanted)

        assert getattr(spare, f"full_{name}_spec") == wanted
        assert getattr(spare, f"full_{name}_spec") is not wanted
    assert spare.is_spec_locked
    check_env_specs(spare)


def test_a_state_dict_goes_back_in(spare, request):  # A1
    spare.record_for_resume().reset()
    refusals = {
        "threads of a library": r"EnvPool keeps.*env.transform.state_dict",
        "torch rows": "offers no state",
        "vmas": "offers no state",
        "torch rows that reset themselves": "offers no state",
    }
    if refusal := refusals.get(request.node.callspec.params["spare"]):
        with pytest.raises(ResumeError, match=refusal):
            spare.state_dict()
        return
    state = spare.state_dict()

    spare.load_state_dict(state)

    assert str(spare.state_dict()) == str(state)


def test_moving_returns_the_env_and_decides_where_data_goes(spare):
    assert spare.to("cpu") is spare

    assert spare.device == spare.action_spec.device == torch.device("cpu")
    assert spare.rollout(3).device == torch.device("cpu")


def test_truncated_keys_are_added_where_the_env_decides_on_them(spare):
    within = spare.base_env if isinstance(spare, TransformedEnv) else spare
    if isinstance(within, SerialEnv | ParallelEnv | MixedEnv):
        with pytest.raises(RuntimeError, match="Add them to"):
            spare.add_truncated_keys()
        return

    assert spare.add_truncated_keys() is spare

    assert all("truncated" in names for names in spare.done_levels.values())
    check_env_specs(spare)


def test_a_transform_goes_on_any_env(spare):
    env = spare.append_transform(StepCounter(step_count_key="steps"))

    data = env.rollout(3)

    assert data["next", "steps"][..., -1, 0].eq(data.shape[-1]).all()
    check_env_specs(env)


def test_a_closed_env_says_so(spare):
    spare.reset()
    was_closed = spare.is_closed

    spare.close()

    assert not was_closed
    assert spare.is_closed
    spare.close()
    with pytest.raises(ClosedEnvError):
        spare.close(raise_if_closed=True)


@pytest.mark.parametrize("kind", ["count", "stateless count", "groups", "several", "transformed"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda env: pickle.loads(cloudpickle.dumps(env))]
)
def test_a_copy_goes_on_by_itself(kind, copied):
    env = KINDS[kind]()
    root = env.reset()

    other = copied(env)
    acted = env.rand_action(root)
    first = env.step(acted.clone())
    env.rollout(3)
    same = other.step(acted.clone())

    assert other.specs == env.specs
    assert is_equal(same, first)
