"""`JaxEnv`: batches of any size, masks, resets, packed state, ownership, compiled rollouts."""

from __future__ import annotations

import gc
import io
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch
from tensordict import TensorDict

from envkit import (
    Compose,
    ObservationNorm,
    ParallelEnv,
    RewardScaling,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from envkit.env.checks import check_env_specs
from envkit.errors import (
    ArgumentError,
    DataTypeError,
    DeviceNameError,
    FusionError,
    InputError,
    KeyCollisionError,
    MissingKeyError,
    PolicyError,
    StateStructureError,
)
from envkit.functional import BatchedEnv, Box, Timestep
from envkit.specs import Categorical, OneHot
from envkit_bridges.dlpack import to_jit
from envkit_bridges.jax.fused_transforms import NamedRows
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.options import padded_size
from tests.bridges.compare import (
    assert_close,
    assert_same,
    replay,
    replaying,
    shared_memory,
    write_into_all,
)
from tests.zoo.half import TORCH_HALF
from tests.zoo.jax_envs import Countdown
from tests.zoo.walkers import Chooser, Pendulum, Shifting, Steered, Walker, unlike_any

STEPS = 15  # of every compiled rollout here: each length is a program of its own
FAR = 1.0  # an action that leads out of the walker's disc within three steps
NEAR = 0.0  # one that stays in it


def seeded(env, seed=0):
    env.set_seed(seed)
    return env


def act(td, value):
    """Write one constant action."""
    return td.set("action", torch.full((*td.batch_size, 2), value))


def steps_of(env, td, count, value=NEAR):
    """Step with a constant action and give the root after the last step."""
    for _ in range(count):
        td = env.step_mdp(env.step(act(td, value)))
    return td


# ------------------------------------------------------------------------------- programs and sizes


def test_masks_never_make_a_new_program():
    env = seeded(JaxEnv(unlike_any(Walker), batch_size=[4], device="cpu"))
    root = env.reset()

    for number in range(1, 15):  # every mask but none and all
        mask = torch.tensor([bool(number >> row & 1) for row in range(4)])
        env.step(act(root.copy(), NEAR).set("_step", mask))
        env.reset(root.copy().set("_reset", mask))

    env.step(act(root.copy(), NEAR))
    assert env.traces == {"restart": 1, "step": 1}


@pytest.mark.parametrize(
    ("rows", "multiple", "size"),
    [(6, 4, 6), (0, 1, 1), (1, 1, 1), (2, 1, 2), (5, 1, 8), (8, 1, 8), (9, 1, 16), (5, 3, 9)],
)
def test_rows_are_padded_to_a_power_of_two_that_devices_can_share(rows, multiple, size):
    assert padded_size(rows, 6, multiple) == size


def test_sizes_one_to_nine_take_one_program_for_each_power_of_two():
    env = seeded(JaxEnv(unlike_any(Pendulum), batch_size=[6], device="cpu"))
    root = env.reset(TensorDict(batch_size=[9]))

    for size in range(1, 10):
        out = env.rand_step(root[:size])
        assert out["next", "observation"].shape == (size, 3)

    assert env.traces["step"] == 6  # 1, 2, 4, 8, 16, and 6 itself, which is not padded


@pytest.mark.parametrize(
    ("call", "programs"),
    [
        (lambda env: env.reset(), {"restart"}),
        (lambda env: env.rand_step(env.reset()), {"restart", "step"}),
        (lambda env: env.rollout(3, break_when_any_done=False), {"unroll"}),
        (lambda env: env.rollout(3), {"restart", "until"}),
        (
            lambda env: env.rollout(3, lambda place, *rest: place, break_when_any_done=False),
            {"advance"},
        ),
        (lambda env: env.rollout(3, lambda place, *rest: place), {"restart", "step"}),
    ],
    ids=["reset", "step", "random", "random until", "policy", "policy until"],
)
def test_at_most_two_programs_compile_before_a_first_call_returns(call, programs):
    env = JaxEnv(unlike_any(Walker), batch_size=[4], device="cpu")
    events = []

    def heard(event, duration, **about):
        events.append(event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        call(seeded(env))
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)

    assert env.traces == dict.fromkeys(programs, 1)
    assert sum(events) == len(programs) <= 2


def test_the_program_of_a_run_gives_out_the_state_that_its_loop_carries(walker, monkeypatch):
    """Nobody reads it; without it the same run takes a tenth longer on a CPU, see docs/performance.md."""
    programs, results = walker._engine.programs, []
    unroll = programs.unroll
    monkeypatch.setattr(
        programs, "unroll", lambda *args: results.append(unroll(*args)) or results[-1]
    )

    walker.unroll(seeded(walker).reset(), 3)

    ((_, last, carried),) = results
    expected = programs.read_state(last["state"])
    assert jax.tree.structure(carried) == jax.tree.structure(expected)
    for ours, theirs in zip(*map(jax.tree.leaves, (carried, expected)), strict=True):
        assert (ours == theirs).all()


def test_where_nothing_ends_nothing_of_what_transforms_show_of_a_reset_is_computed():
    """All of a restart stands in one branch, so that other steps do not pay for it."""
    norm = ObservationNorm(loc=0.5, scale=3.0, in_keys=["place"])
    constants = [to_jit(norm.constants(), copy=True)]
    rows = NamedRows(BatchedEnv(Walker()), [norm], constants)

    def begun(key):
        state, _ = rows.env.init(key, 40)
        return rows.unstepped(rows.begin(state, {}), 40)

    def restarted(mask, moment):
        return rows.restart_where(mask, *moment)

    moment = jax.eval_shape(begun, jax.random.PRNGKey(0))
    traced = jax.make_jaxpr(restarted)(jax.ShapeDtypeStruct((40,), bool), moment)

    (branch,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "cond")
    outside = {eqn.primitive.name for eqn in traced.eqns if eqn is not branch}
    assert "mul" in str(branch) and not outside & {"mul", "add", "select_n", "while", "scatter"}


def test_a_second_rollout_compiles_nothing(walker):
    seeded(walker).rollout(3)
    before = walker.traces

    seeded(walker, 1).rollout(3)

    assert walker.traces == before


@pytest.mark.rounding
@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TransformedEnv(env, StepCounter())])
def test_all_steps_of_a_rollout_from_python_are_one_program(wrap):
    env = wrap(JaxEnv(unlike_any(Walker), batch_size=[4], device="cpu", episode_length=3))
    env.set_seed(0)

    data = env.rollout(6, lambda place, *rest: place / 9, break_when_any_done=False)

    assert env.traces == {"advance": 1}
    env.set_seed(0)
    looped, _ = replay(env, env.reset(), data["action"])
    assert data["next", "done"][:, -1].all()
    assert_same(data, looped)


@pytest.mark.rounding
@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(Compose, marks=pytest.mark.slow),
        lambda: Compose(StepCounter(), VecNorm(in_keys=["place"])),
    ],
)
def test_episodes_begin_alike_in_the_program_that_steps_and_in_the_one_that_resets(transform):
    def make():
        env = JaxEnv(unlike_any(Walker), batch_size=[20], device="cpu")
        return seeded(TransformedEnv(env, transform()))

    resetting, stepping = make(), make()
    root = resetting.reset()
    data = stepping.rollout(2, lambda place, *rest: place / 9, break_when_any_done=False)

    assert resetting.traces == {"restart": 1}
    assert stepping.traces == {"advance": 1}
    assert_same(data[:, 0].select(*root.keys()), root)


class Filling:
    """Fills up at the speed that an episode begins with; at none it would never end."""

    action_space = Box(0.0, 1.0, (1,))

    def reset(self, key):
        speed = jax.random.uniform(key, (), minval=0.5)
        return speed, Timestep(speed)

    def step(self, state, action):
        full = jax.lax.while_loop(lambda level: level < 1, lambda level: level + state, 0.0)
        return state, Timestep(state, full)


def test_no_step_is_made_of_a_state_that_no_episode_has_begun():
    env = seeded(JaxEnv(Filling(), batch_size=[2], device="cpu"))

    data = env.rollout(2, lambda speed: speed.unsqueeze(-1), break_when_any_done=False)

    assert env.traces == {"advance": 1}
    assert (data["observation"] >= 0.5).all() and (data["next", "reward"] >= 1).all()


def test_a_mask_that_is_all_true_is_no_mask(walker):
    root = act(seeded(walker).reset(), FAR)

    masked = walker.step(root.copy().set("_step", torch.ones(4, dtype=torch.bool)))

    assert_same(masked, walker.step(root.copy()))


@pytest.mark.parametrize("batch", [[], [1], [2, 3], [0], [2, 0], [1, 1, 5]])
def test_any_batch_size_is_accepted(walker, batch):
    root = seeded(walker).reset(TensorDict(batch_size=batch))

    data, following = walker.step_and_maybe_reset(walker.rand_action(root))

    assert root.batch_size == data.batch_size == following.batch_size == torch.Size(batch)
    assert data["action"].shape == (*batch, 2)
    assert data["next", "reward"].shape == data["next", "done"].shape == (*batch, 1)
    assert data["next", "sight", "lamps"].shape == following["sight", "lamps"].shape == (*batch, 3)
    assert following["state", "floats"].shape[:-1] == torch.Size(batch)


@pytest.mark.rounding
def test_a_batch_of_two_axes_computes_what_its_flat_rows_do(walker):
    flat = act(seeded(walker).reset(TensorDict(batch_size=[6])), 0.5)
    square = flat.clone().reshape(2, 3)

    assert_same(walker.step(square).reshape(6), walker.step(flat))


def test_specs_and_reset_follow_the_envs_own_batch_size(walker, single_walker):
    for env, batch in ((walker, (4,)), (single_walker, ())):
        root = seeded(env).reset()

        assert root.batch_size == env.observation_spec.shape == torch.Size(batch)
        assert env.action_spec.shape == (*batch, 2)
        assert env.full_reward_spec["reward"].shape == (*batch, 1)
        assert set(env.done_keys) == {"done", "terminated", "truncated"}
        assert not env.batch_locked


@pytest.mark.rounding
def test_a_masked_subset_steps_like_the_same_rows_of_the_whole(walker):
    root = act(seeded(walker).reset(), 0.3)
    mask = torch.tensor([True, False, True, True])
    whole = walker.step(root.clone())

    part = walker.step(root[mask])

    assert_close(part, whole[mask])


@pytest.mark.rounding
def test_rows_from_different_times_are_stepped_together(walker):
    start = seeded(walker).reset()
    later = steps_of(walker, start.copy(), 3, 0.1)
    apart = [walker.step(act(td[row].clone(), 0.2)) for td, row in ((start, 0), (later, 1))]

    together = walker.step(act(torch.stack([start[0], later[1]]), 0.2))

    assert_close(together, torch.stack(apart))
    assert walker.unpack(together["next", "state"])["elapsed"].tolist() == [1, 4]


# ---------------------------------------------------------------------------- ends and new episodes


def test_the_task_terminates_and_the_time_limit_truncates(walker):
    root = seeded(walker).reset()
    actions = torch.zeros(4, 6, 2)
    actions[0] = FAR

    data, _ = replay(walker, root, actions)

    terminated, truncated = data["next", "terminated"], data["next", "truncated"]
    ended = int(data["next", "done"][0].squeeze(-1).nonzero()[0])
    assert ended < 5 and terminated[0, ended] and not truncated[0, ended]
    assert truncated[1:, 5].all() and not terminated[1:].any()
    assert (data["next", "done"] == (terminated | truncated)).all()


def test_an_episode_that_ends_by_itself_at_the_limit_is_not_truncated():
    env = seeded(JaxEnv(Walker(push=0.0), device="cpu", episode_length=3))
    root = env.reset()
    root = steps_of(env, root, 2, NEAR)

    last = env.step(act(root, 5.0))["next"]

    assert last["terminated"] and not last["truncated"]


def test_next_keeps_the_last_observation_and_the_following_root_is_fresh(walker):
    data, _ = replay(walker, seeded(walker).reset(), torch.full((4, 4, 2), FAR))

    ended = data["next", "done"][:, :-1, 0]
    last, fresh = data["next", "place"][:, :-1][ended], data["place"][:, 1:][ended]

    assert ended.any()
    assert (last.norm(dim=-1) > 3).all()
    assert ((fresh >= 0) & (fresh <= 1)).all()
    assert (data["info", "steps"][:, 1:][ended] == 0).all()
    assert not data["done"].any()


@pytest.mark.rounding
def test_a_python_policy_repeats_a_compiled_rollout_bit_for_bit(walker):
    compiled = seeded(walker, 3).rollout(STEPS, break_when_any_done=False)

    policy = replaying(compiled["action"])
    stepped = seeded(walker, 3).rollout(STEPS, policy, break_when_any_done=False)

    assert compiled["next", "done"].any()
    assert_same(compiled, stepped)


def test_the_second_episode_of_a_row_differs_from_its_first_and_from_other_rows(walker):
    data = seeded(walker).rollout(STEPS, break_when_any_done=False)

    starts = data["place"][data["info", "steps"] == 0]

    assert len(starts) >= 8
    assert len(torch.unique(starts, dim=0)) == len(starts)


@pytest.mark.rounding
def test_a_reset_row_draws_the_same_whatever_the_others_do(walker):
    root = steps_of(walker, seeded(walker).reset(), 2)

    alone = walker.reset(root.copy().set("_reset", torch.tensor([False, True, False, False])))
    all_of_them = walker.reset(root.copy().set("_reset", torch.ones(4, dtype=torch.bool)))
    outside = walker.reset(root[1].clone())

    assert_same(alone[1], all_of_them[1])
    assert_close(alone[1], outside)


@pytest.mark.rounding
def test_first_draws_of_a_row_do_not_depend_on_the_batch_size(walker):
    own = seeded(walker, 5).reset()
    larger = seeded(walker, 5).reset(TensorDict(batch_size=[9]))

    assert_close(own, larger[:4])


@pytest.mark.rounding
def test_a_partial_reset_leaves_the_other_rows_bit_for_bit(walker):
    root = steps_of(walker, seeded(walker).reset(), 2, 0.1)
    before = root.clone()
    mask = torch.tensor([[True], [False], [False], [True]])

    out = walker.reset(root.set("_reset", mask))

    assert out is root and "_reset" not in out.keys()
    assert_same(out[1:3], before[1:3])
    assert (out["info", "steps"][[0, 3]] == 0).all()
    assert (
        (walker.unpack(out["state"])["key"] != walker.unpack(before["state"])["key"])[[0, 3]]
        .any(-1)
        .all()
    )


def test_a_reset_without_mask_restarts_every_row_from_its_own_key(walker):
    root = seeded(walker).reset()
    before = root.clone()

    out = walker.reset(root)

    assert not (out["place"] == before["place"]).any()
    assert_same(walker.reset(before), out)


# --------------------------------------------------------------------------------------- step masks


def test_skipped_rows_keep_their_values_and_get_no_reward(walker):
    root = act(steps_of(walker, seeded(walker).reset(), 1, 0.1), 0.2)
    full = walker.step(root.clone())
    mask = torch.tensor([True, False, True, False])

    out = walker.step(root.clone().set("_step", mask))

    assert "_step" not in out.keys()
    assert_same(out[mask], full[mask])
    skipped = out["next"][~mask]
    assert (skipped["reward"] == 0).all()
    assert_same(skipped.exclude("reward"), root[~mask].exclude("action"))
    assert_same(out.exclude("next"), root)


def test_skipped_rows_show_zeros_where_the_root_has_nothing(walker):
    root = act(seeded(walker).reset(), 0.2).exclude("place", "done")
    mask = torch.tensor([True, False, True, True])

    out = walker.step(root.set("_step", mask))

    assert (out["next", "place"][1] == 0).all() and not out["next", "done"][1]


def test_a_mask_that_selects_nothing_runs_no_program():
    env = seeded(JaxEnv(unlike_any(Walker), batch_size=[4], device="cpu"))
    root = act(env.reset(), 0.2)
    before = root.clone()

    out = env.step(root.set("_step", torch.zeros(4, 1, dtype=torch.bool)))

    assert env.traces == {"restart": 1}
    assert_same(out["next"].exclude("reward"), before.exclude("action"))
    assert (out["next", "reward"] == 0).all()
    assert not shared_memory(out)


def test_done_rows_stay_as_they_were_until_all_are_done(walker):
    actions = torch.zeros(4, 6, 2)
    actions[1] = FAR

    data = seeded(walker).rollout(10, replaying(actions), break_when_all_done=True)

    assert data.shape == (4, 6)
    assert_same(*(data[1, step].exclude(("next", "reward")) for step in (2, 5)))
    assert (data["next", "reward"][1, 2:] == 0).all() and (data["next", "reward"][0] != 0).any()
    assert data["next", "done"][:, -1].all()


@pytest.mark.parametrize("paid", [1, 3], ids=["bare", "fused"])
def test_a_row_that_waits_is_paid_nothing_in_a_compiled_run(paid):
    """It ends with the last step of one program, and waits in the next one."""
    env = JaxEnv(Countdown(70), batch_size=[2])
    run = env if paid == 1 else TransformedEnv(env, RewardScaling(2.0, 1.0))
    root = run.reset()
    for _ in range(6):
        ahead = run.rand_action(root).set("_step", torch.tensor([False, True]))
        root = run.step_mdp(run.step(ahead))

    data = run.rollout(90, auto_reset=False, tensordict=root, break_when_all_done=True)

    assert data.shape == (2, 70)
    assert data["next", "reward"].sum((1, 2)).tolist() == [70 * paid, 64 * paid]
    assert data["next", "done"].sum((1, 2)).tolist() == [1, 7]


# ---------------------------------------------------------------------------------------- the state


def test_data_and_state_dict_go_on_as_if_a_run_had_not_been_cut():  # A1
    first, second = (JaxEnv(Walker(), batch_size=[2], episode_length=3) for _ in range(2))
    first.set_seed(5)
    last = first.rollout(4, break_when_any_done=False)[:, -1]
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)

    second.load_state_dict(torch.load(saved, weights_only=True))

    runs = [
        [
            env.rollout(
                4, auto_reset=False, tensordict=env.step_mdp(last), break_when_any_done=False
            ),
            env.rand_action(),
            env.reset(),
        ]
        for env in (first, second)
    ]
    for left, right in zip(*runs, strict=True):
        assert_same(left, right)


def test_unpacked_state_has_the_fields_by_name_and_their_values(walker):
    state = steps_of(walker, seeded(walker).reset(), 2)["state"]

    named = walker.unpack(state)

    assert named["place"].shape == (4, 2) and named["place"].dtype == torch.float32
    assert named["steps"].tolist() == named["elapsed"].tolist() == [2] * 4
    assert named["lamps"].tolist() == [[0, 1, 1]] * 4  # as it is stored: int32
    assert named["level"].tolist() == [202] * 4
    assert named["key"].dtype == named["noise"].dtype == torch.int32
    assert named["parts", "half"].unique().tolist() == [0.25]
    assert named["parts", "empty"].shape == (4, 0)


@pytest.mark.parametrize("batch", [[], [2, 3]])
def test_packing_undoes_unpacking(walker, batch):
    state = seeded(walker).reset(TensorDict(batch_size=batch))["state"]

    packed = walker.pack(walker.unpack(state))

    assert_same(packed, state)
    assert not shared_memory(packed, state)


def test_writing_a_view_changes_what_the_next_step_computes(walker):
    root = act(seeded(walker).reset(), NEAR)

    walker.unpack(root["state"])["place"][1] = 50.0
    out = walker.step(root)

    assert out["next", "terminated"].squeeze(-1).tolist() == [False, True, False, False]


def test_the_nested_layout_has_one_entry_for_each_leaf(nested_walker):
    root = seeded(nested_walker).reset()

    assert set(nested_walker.state_keys) == {
        *(("state", name) for name in ("place", "steps", "lamps", "level", "noise")),
        *(("state", "parts", name) for name in ("half", "empty")),
        ("state", "elapsed"),
        ("state", "key"),
    }
    assert root["state", "lamps"].dtype == torch.bool
    assert root["state", "level"].dtype == torch.uint8
    assert root["state", "parts", "half"].dtype == TORCH_HALF


@pytest.mark.rounding
def test_the_layouts_compute_the_same(walker, nested_walker):
    packed = seeded(walker, 2).rollout(STEPS, break_when_any_done=False)

    nested = seeded(nested_walker, 2).rollout(STEPS, break_when_any_done=False)

    assert_same(packed, nested, without=("state",))
    views = walker.unpack(packed["next", "state"])
    for key, leaf in nested["next", "state"].items(True, True):
        assert torch.equal(leaf.to(views[key].dtype), views[key]), key


@pytest.mark.parametrize(
    "way",
    [
        "step",
        "masked",
        "skipped",
        "advance",
        "reset",
        pytest.param("unroll", marks=pytest.mark.slow),
    ],
)
def test_each_layout_accepts_the_others_state(walker, nested_walker, way):
    mask = torch.tensor([True, False, True, False])

    def do(env, td):
        if way == "unroll":
            return seeded(env).unroll(td, STEPS)
        if way == "reset":
            return [env.reset(td.set("_reset", mask))]
        if way in ("masked", "skipped"):
            td.set("_step", mask & (way == "masked"))
        return env.step_and_maybe_reset(td) if way == "advance" else [env.step(td)]

    for env, other in ((walker, nested_walker), (nested_walker, walker)):
        own, foreign = (
            act(steps_of(one, seeded(one).reset(), 5, 0.1), 0.2) for one in (env, other)
        )
        wanted = do(env, own)
        given = do(env, foreign)

        for got, want in zip(given, wanted, strict=True):
            assert_same(got, want)


def test_a_python_rollout_starts_from_the_other_layout(walker, nested_walker):
    start = seeded(nested_walker).reset()

    data = walker.rollout(9, auto_reset=False, tensordict=start, break_when_any_done=True)

    assert set(data["state"].keys()) == {"floats", "words"}


@pytest.mark.rounding
@pytest.mark.parametrize("layout", ["packed", "nested"])
def test_a_saved_state_steps_to_the_same_bits_later(walker, nested_walker, layout, tmp_path):
    env = walker if layout == "packed" else nested_walker
    root = act(steps_of(env, seeded(env).reset(), 2), 0.4)
    torch.save(root, tmp_path / "root.pt")
    on_disk = root.clone().memmap(tmp_path / "root")
    kept = root.clone()
    wanted = env.step(root)
    env.set_seed(9)
    steps_of(env, env.reset(), 3)

    loaded = torch.load(tmp_path / "root.pt", weights_only=False)
    again = [kept, TensorDict.load_memmap(tmp_path / "root").copy(), loaded, on_disk.clone()]

    for td in again:
        assert_same(env.step(td), wanted)


@pytest.mark.rounding
def test_a_saved_state_steps_to_nearly_the_same_at_another_size(walker):
    root = act(steps_of(walker, seeded(walker).reset(), 2), 0.4)
    rows = torch.cat([root, root, root[:1]]).clone()

    assert_close(walker.step(rows)[4:8], walker.step(root))


def test_stepping_an_old_root_again_repeats_the_result(walker):
    root = act(seeded(walker).reset(), 0.5)
    once = walker.step(root.clone())
    steps_of(walker, root.clone(), 3)

    assert_same(walker.step(root.clone()), once)


# -------------------------------------------------------------------------------------------- seeds


@pytest.mark.rounding
def test_the_same_seed_gives_the_same_rollout_on_either_path(walker):
    for nonstop in (True, False):
        rollouts = [
            seeded(walker, seed).rollout(STEPS, break_when_any_done=not nonstop)
            for seed in (4, 4, 5)
        ]

        assert_same(rollouts[0], rollouts[1])
        assert not torch.equal(rollouts[0]["place"][:, 0], rollouts[2]["place"][:, 0])
        assert not torch.equal(rollouts[0]["action"][:, 0], rollouts[2]["action"][:, 0])


def begun_after(torch_seed, *, batched=None):
    """Reset an env that was never seeded."""
    torch.manual_seed(torch_seed)
    make = partial(JaxEnv, Pendulum())
    env = batched(2, make) if batched else JaxEnv(Pendulum(), batch_size=[2])
    first, second = env.reset(), env.reset()
    env.close()
    return first, second


def test_an_env_that_was_never_seeded_begins_with_the_global_generator_of_torch():
    first, again, other = (begun_after(seed)[0] for seed in (3, 3, 4))

    assert_same(first, again)
    assert not torch.equal(first["observation"], other["observation"])


def test_two_envs_that_were_never_seeded_differ():
    torch.manual_seed(0)

    one, two = (JaxEnv(Pendulum()).rollout(2) for _ in range(2))

    assert not torch.equal(one["observation"][0], two["observation"][0])


@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
def test_rows_that_were_never_seeded_differ(batched):
    first, _ = begun_after(0, batched=batched)

    assert not torch.equal(first["observation"][0], first["observation"][1])


def test_a_seed_that_is_set_leaves_the_global_generator_of_torch_alone():
    env, before = JaxEnv(Pendulum()), torch.get_rng_state()

    seeded(env).reset()

    assert torch.equal(before, torch.get_rng_state())


def test_two_resets_differ(walker):
    root = seeded(walker).reset()

    assert not torch.equal(root["place"], walker.reset()["place"])


def test_seeds_that_differ_in_any_bit_give_other_episodes(walker):
    seeds = [5, *(5 + 2**bit for bit in (1, 31, 32, 33, 63))]

    places = torch.stack([seeded(walker, seed).reset()["place"] for seed in seeds])

    assert len(places.flatten(1).unique(dim=0)) == len(seeds)


def test_small_seeds_are_the_keys_of_jax(walker):
    key = jax.random.PRNGKey(2**31 + 3)

    assert (seeded(walker, 2**31 + 3)._next_key() == jax.random.split(key)[1]).all()


def test_copied_rows_share_their_future_until_they_are_reseeded(walker):
    root = act(seeded(walker).reset(), 0.1)
    copies = torch.stack([root[0]] * 4).clone()

    shared = walker.reset(copies.clone())
    parted = walker.reset(walker.reseed(copies))

    assert len(shared["place"].unique(dim=0)) == 1
    assert len(parted["place"].unique(dim=0)) == 4


def test_reseeding_changes_the_keys_and_nothing_else(nested_walker):
    root = seeded(nested_walker).reset(TensorDict(batch_size=[2, 3]))
    before = root.clone()

    out = nested_walker.reseed(root)

    assert out is root
    assert (out["state", "key"] != before["state", "key"]).any(-1).all()
    assert_same(out, before, without=("key",))


def test_no_seed_is_an_error(walker):
    with pytest.raises(ArgumentError, match=r"set_seed\(0\)"):
        walker.set_seed(None)


# ---------------------------------------------------------------------------------------- ownership


def trajectory(env, *, spoil):
    """Go through every kind of call; ``spoil`` overwrites what a call gave once it was cloned."""
    seeded(env)
    seen = []

    def kept(td):
        seen.append(td.clone())
        if spoil:
            copy = seen[-1].clone()
            write_into_all(td)
            return copy
        return td

    td = kept(env.reset())
    td = kept(env.step(act(td, 0.3)))
    td = kept(env.step_mdp(td))
    for value in (0.5, FAR, FAR, FAR):
        data, td = env.step_and_maybe_reset(act(td, value))
        td = td.clone()
        kept(data)
        td = kept(td)
    td = kept(env.reset(td.set("_reset", torch.tensor([True, False, True, False]))))
    kept(env.step(act(td.clone(), 0.2).set("_step", torch.tensor([True, False, True, False]))))
    data, td = env.unroll(td, STEPS, record_state=True)
    td = td.clone()
    kept(data)
    kept(env.reseed(kept(td)))
    return seen


def test_a_step_under_vmap_is_refused_by_the_env_and_not_by_a_look_at_flags():
    env = JaxEnv(Pendulum(), batch_size=[2], device="cpu")
    td = env.rand_action(env.reset())

    with pytest.raises(DataTypeError, match=r"under a transform of torch\.func"):
        torch.vmap(lambda td: env.step(td)["next", "reward"])(torch.stack([td, td]))


def test_a_row_that_is_stepped_beyond_its_end_is_warned_of_once():
    env = JaxEnv(Pendulum(), batch_size=[2], episode_length=1)
    data = env.rand_step(env.reset())
    assert data["next", "truncated"].all()
    ended = env.rand_action(env.step_mdp(data))
    only_first = torch.tensor([True, False])

    with pytest.warns(
        UserWarning, match=r"row \(0,\) of JaxEnv is stepped after.*step_and_maybe_reset"
    ):
        following = env.step(ended.copy().set("_step", only_first))
    env.step(ended)  # no second warning

    assert following["next", "truncated"].all()


def test_an_env_without_rows_that_is_stepped_beyond_its_end_is_named_alone():
    env = JaxEnv(Pendulum(), episode_length=1)
    ended = env.step_mdp(env.rand_step(env.reset()))

    with pytest.warns(UserWarning, match="^JaxEnv is stepped after"):
        env.rand_step(ended)


@pytest.mark.parametrize("layout", ["packed", "nested"])
def test_writing_into_results_changes_nothing_that_follows(walker, nested_walker, layout):
    env = walker if layout == "packed" else nested_walker

    clean, spoiled = (trajectory(env, spoil=spoil) for spoil in (False, True))

    for one, other in zip(clean, spoiled, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("layout", ["packed", "nested"])
def test_no_two_leaves_of_a_result_share_memory(walker, nested_walker, layout):
    env = walker if layout == "packed" else nested_walker
    mask = torch.tensor([True, False, True, False])
    root = seeded(env).reset()
    before = root.clone()

    stepped = env.step(act(root.copy(), 0.1))
    masked = env.step(act(root.copy(), 0.1).set("_step", mask))
    skipped = env.step(act(root.copy(), 0.1).set("_step", mask & False))
    reset = env.reset(root.clone().set("_reset", mask))
    reseeded = env.reseed(root.clone())
    data, following = env.step_and_maybe_reset(act(root.copy(), 9.0))

    for result in (root, stepped, masked, skipped, reset, reseeded):
        assert not shared_memory(result)
    assert not shared_memory(data, following.exclude("action"))
    for record_state in (False, True):
        assert not shared_memory(root, *env.unroll(root, STEPS, record_state=record_state))
    assert_same(root, before)


class Late(Pendulum):
    """Reads its action at the end of a step that takes a while."""

    def step(self, state, action):
        power = jnp.linalg.matrix_power(jnp.full((250, 250), state[0] / 1000), 100)
        return super().step(state, action + power[0, 0])


@pytest.mark.parametrize("size", [8, 4], ids="env of {} rows".format)
def test_refilling_the_action_during_and_after_a_step_changes_nothing(size):
    env = seeded(JaxEnv(Late(), batch_size=[size]))
    root = env.reset(TensorDict(batch_size=[8]))
    wanted = env.step(root.clone().set("action", torch.ones(8, 1)))

    for _ in range(3):
        action = torch.ones(8, 1)
        step = env._send(root.clone().set("action", action))
        action.fill_(77.0)
        out = step.recv()
        action.fill_(-77.0)
        assert_same(out["next"], wanted["next"])


@pytest.mark.parametrize("categorical", [False, True])
def test_refilling_a_discrete_action_changes_nothing(categorical):
    env = JaxEnv(Chooser(), batch_size=[64], categorical_action_encoding=categorical)
    root = env.reset()
    action = env.action_spec.rand().to(torch.int32)
    wanted = env.step(root.clone().set("action", action.clone()))["next"]

    for _ in range(20):
        td = root.clone().set("action", action.clone())
        step = env._send(td)
        td["action"].fill_(0)
        assert_same(step.recv()["next"], wanted)


# ------------------------------------------------------------------------------------------- errors


def test_a_step_without_state_says_where_state_comes_from(walker):
    td = act(TensorDict(batch_size=[4]), 0.0)

    with pytest.raises(MissingKeyError, match=r"start from env\.reset\(\)"):
        walker.step(td)


def test_a_step_with_half_a_state_names_what_is_missing(walker, nested_walker):
    for env in (walker, nested_walker):
        td = act(seeded(env).reset(), 0.0)
        td["state"].pop("floats" if env is walker else "lamps")

        with pytest.raises(MissingKeyError, match=r"lacks .*whole state"):
            env.step(td)


def test_a_step_without_action_says_how_to_make_one(walker):
    with pytest.raises(MissingKeyError, match=r"'action'.*rand_action"):
        walker.step(seeded(walker).reset())


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 1, 2), (2, 2)])
def test_an_action_of_the_wrong_shape_is_refused(walker, shape):
    td = seeded(walker).reset()
    td._set_str("action", torch.zeros(shape), validated=True, inplace=False)

    with pytest.raises(InputError, match=r"'action' has shape .* takes \(4, 2\)"):
        walker.step(td)


def test_an_action_space_that_is_none_is_refused():
    env = Pendulum()
    env.action_space = (Box(-1.0, 1.0), Box(-1.0, 1.0))

    with pytest.raises(TypeError, match="action space is tuple"):
        JaxEnv(env)


def test_a_state_that_grows_between_reset_and_step_names_the_path():
    env = JaxEnv(Shifting())

    with pytest.raises(StateStructureError, match=r"late.*only after step"):
        env.rand_step(env.reset())


@pytest.mark.parametrize("steps", [0, -1, 2.5, "three", None])
def test_unroll_takes_a_number_of_steps_above_zero(walker, steps):
    with pytest.raises(ArgumentError, match=r"steps is .*an int of at least 1"):
        walker.unroll(seeded(walker).reset(), steps)


def test_unroll_begins_at_a_root(walker):
    with pytest.raises(DataTypeError, match=r"td is of type NoneType.*env\.reset\(\)"):
        walker.unroll(None, 3)


def test_unroll_takes_compiled_policies_only(walker):
    with pytest.raises(PolicyError, match=r"rollout\(steps, policy\)"):
        walker.unroll(seeded(walker).reset(), 3, lambda td: td)


# ------------------------------------------------------------------------------------------- unroll


@pytest.mark.rounding
@pytest.mark.parametrize("batch", [[4], [2, 3], []])
def test_unroll_repeats_a_python_loop_with_the_same_actions(walker, batch):
    root = seeded(walker).reset(TensorDict(batch_size=batch))

    data, following = walker.unroll(root.clone(), STEPS)
    looped, last = replay(walker, root.clone(), data["action"])

    assert data.batch_size == torch.Size([*batch, STEPS])
    assert data["next", "done"].any()
    assert_same(data, looped, without=("state",))
    assert_same(data["next"][..., -1], looped["next"][..., -1], without=("state",))
    begun = walker.maybe_reset(following)
    assert_same(begun, last)


@pytest.mark.rounding
def test_unroll_in_chunks_goes_on_where_it_stopped(walker):
    root = seeded(walker).reset()

    first, middle = walker.unroll(root.clone(), STEPS)
    second, last = walker.unroll(middle, STEPS)
    actions = torch.cat([first["action"], second["action"]], 1)
    looped, end = replay(walker, root.clone(), actions)

    assert_same(torch.cat([first, second], 1), looped, without=("state",))
    assert_same(walker.maybe_reset(last), end)


def test_unroll_records_state_only_when_asked(walker):
    root = seeded(walker).reset()

    lean, following = walker.unroll(root, STEPS)
    full, _ = seeded(walker).unroll(root, STEPS, record_state=True)

    assert "state" not in lean.keys() and "state" not in lean["next"].keys()
    assert set(following["state"].keys()) == {"floats", "words"}
    assert torch.equal(full["state", "words"][:, 0], root["state", "words"])
    assert torch.equal(full["state", "floats"][:, 1], full["next", "state", "floats"][:, 0])


def test_unrolled_memory_is_time_major_and_named(walker):
    data, _ = walker.unroll(seeded(walker).reset(), STEPS)

    assert data.names == [None, "time"]
    assert data["place"].stride()[1] > data["place"].stride()[0]
    assert data["place"].transpose(0, 1).is_contiguous()


def test_unroll_begins_a_new_episode_in_rows_that_are_done(walker):
    root = seeded(walker).reset()
    root["done"][2] = root["terminated"][2] = True

    data, _ = walker.unroll(root, STEPS)

    assert not data["done"][:, 0].any()
    assert not torch.equal(data["place"][2, 0], root["place"][2])
    assert torch.equal(data["place"][:2, 0], root["place"][:2])


def test_unroll_shows_the_infos_of_the_root_at_the_root(walker):
    data, _ = walker.unroll(seeded(walker).reset(), STEPS)

    assert (data["info", "steps"][:, 0] == 0).all() and (data["info", "steps"][:, 1] == 1).all()
    assert (data["next", "info", "steps"] == data["info", "steps"] + 1).all()


# --------------------------------------------------------------------------------- kinds of spaces


@pytest.mark.parametrize("which", ["walker", "nested_walker", "single_walker"])
def test_data_agrees_with_the_specs(which, request):
    env = request.getfixturevalue(which)

    check_env_specs(env, seed=0)


def test_data_of_a_single_nested_env_agrees_with_the_specs():
    check_env_specs(JaxEnv(Walker(), device="cpu", state_layout="nested"), seed=0)


def test_data_of_a_compiled_rollout_agrees_with_the_specs(nested_walker):
    check_env_specs(nested_walker, seed=0, break_when_any_done=False)


@pytest.mark.rounding
def test_fifteen_lines_of_jax_are_an_environment():
    env = seeded(JaxEnv(Pendulum(), batch_size=[5], episode_length=4))

    data = env.rollout(10, break_when_any_done=False)

    assert data["observation"].shape == (5, 10, 3)
    assert data["observation"][..., :2].norm(dim=-1).allclose(torch.ones(5, 10))
    assert (data["action"].abs() <= 2).all()
    assert data["next", "truncated"].squeeze(-1)[0].nonzero().squeeze(-1).tolist() == [3, 7]
    assert env.action_spec.space.low.unique() == -2.0


def test_an_observation_called_state_is_shown_as_observation():
    class Named(Pendulum):
        def shown(self, state, reward=0.0):
            timestep = super().shown(state, reward)
            return Timestep({"state": timestep.observation, "other": state}, timestep.reward)

    env = seeded(JaxEnv(Named(), batch_size=[2]))

    data = env.rollout(2)

    assert data["observation"].shape == (2, 2, 3) and data["other"].shape == (2, 2, 2)
    assert set(data["state"].keys()) == {"floats", "words"}


def test_observations_called_state_and_observation_collide():
    class Named(Pendulum):
        def shown(self, state, reward=0.0):
            return Timestep({"state": state, "observation": state}, reward)

    with pytest.raises(KeyCollisionError, match="another name"):
        JaxEnv(Named())


def test_an_array_of_bounds_makes_bounds_for_each_component():
    env = Pendulum()
    env.action_space = Box([-1.0], [[3.0]], (1, 1))

    spec = JaxEnv(env, batch_size=[2]).action_spec

    assert spec.shape == (2, 1, 1)
    assert (spec.space.low == -1).all() and (spec.space.high == 3).all()


@pytest.mark.parametrize("categorical", [False, True])
def test_discrete_actions_reach_the_env_as_integers(categorical):
    env = JaxEnv(Chooser(), batch_size=[3], categorical_action_encoding=categorical)
    seeded(env)
    choices = torch.tensor([0, 1, 2])
    action = choices if categorical else torch.nn.functional.one_hot(choices)

    out = env.step(env.reset().set("action", action))
    random = env.rollout(3, break_when_any_done=False)

    assert isinstance(env.action_spec, Categorical if categorical else OneHot)
    assert out["next", "observation"].tolist() == torch.eye(3).tolist()
    assert out["next", "reward"].squeeze(-1).tolist() == [1.0, 0.0, 0.0]
    assert random["action"].shape == ((3, 3) if categorical else (3, 3, 3))
    assert random["action"].dtype == env.action_spec.dtype
    shown = random["next", "observation"].argmax(-1)
    assert torch.equal(shown, random["action"] if categorical else random["action"].argmax(-1))
    check_env_specs(env, break_when_any_done=False)


def test_a_dict_of_actions_is_nested_under_action():
    env = seeded(JaxEnv(Steered(), batch_size=[2], categorical_action_encoding=True))
    td = env.reset()
    td["action"] = TensorDict(
        {"wheel": torch.tensor([[0.25, 0.5], [0.0, 0.0]]), "gear": torch.tensor([1, 3])}, [2]
    )

    out = env.step(td)

    assert set(env.action_keys) == {("action", "wheel"), ("action", "gear")}
    assert out["next", "observation"].tolist() == [[10.75], [30.0]]
    check_env_specs(env, break_when_any_done=False)


# ------------------------------------------------------------------------------------- subclasses


class Shaped(JaxEnv):
    """Doubles the action on its way in and adds 1 to the reward on its way out."""

    def _step(self, td):
        following = super()._step(td.copy().set("action", 2 * td["action"]))
        return following.set("reward", following["reward"] + 1)


class Marked(JaxEnv):
    """Marks each new episode in its observation."""

    def _reset(self, td, **kwargs):
        fresh = super()._reset(td, **kwargs)
        return fresh.set("observation", torch.full_like(fresh["observation"], 9.0))


@pytest.mark.rounding
@pytest.mark.parametrize("way", ["step", "masked", "advance", "random", "replayed", "transformed"])
def test_a_subclass_that_overrides_a_step_is_obeyed_on_every_path(way):
    plain, env = (kind(Pendulum(), batch_size=[3], episode_length=9) for kind in (JaxEnv, Shaped))
    root = env.rand_action(seeded(env).reset())

    if way in ("random", "replayed", "transformed"):
        run = TransformedEnv(env, RewardScaling(0.0, 1.0)) if way == "transformed" else env
        policy = replaying(root["action"][:, None]) if way == "replayed" else None
        data = run.rollout(1, policy, auto_reset=False, tensordict=root.exclude("action"))[:, 0]
    elif way == "advance":
        data, _ = env.step_and_maybe_reset(root.copy())
    else:
        mask = torch.tensor([True, True, way == "step"])
        data = env.step(root.copy().set("_step", mask))[mask]

    wanted = plain.step(data.exclude("next").set("action", 2 * data["action"]))["next"]
    assert_close(data["next"], wanted.set("reward", wanted["reward"] + 1))


def test_a_subclass_that_overrides_a_reset_is_obeyed_on_every_path():
    env = seeded(Marked(Pendulum(), batch_size=[2], episode_length=3))

    data = env.rollout(7, break_when_any_done=False)

    begun = torch.tensor([True, False, False, True, False, False, True]).expand(2, 7)
    assert torch.equal((data["observation"] == 9).all(-1), begun)


def test_unroll_refuses_what_a_subclass_makes_of_a_step():
    env = Shaped(Pendulum(), batch_size=[2])

    with pytest.raises(FusionError, match=r"Shaped makes of _step\. Use rollout"):
        env.unroll(env.reset(), 3)


def test_reset_keywords_are_refused_with_advice(walker):
    with pytest.raises(ArgumentError, match=r"no reset keywords, but got \['options', 'seed'\]"):
        walker.reset(seed=3, options={})


# ------------------------------------------------------------------------------- device and memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_an_env_on_cuda_without_cuda_says_so():
    with pytest.raises(DeviceNameError, match=r"torch sees no 'cuda:0'.*device='cpu'"):
        JaxEnv(Pendulum(), device="cuda")


def test_an_env_moves_only_to_a_device_that_jax_sees(walker):
    before = seeded(walker).reset()

    with pytest.raises(DeviceNameError, match="JAX sees no device for torch's 'meta'"):
        walker.to("meta")

    assert walker.to("cpu") is walker
    assert_same(seeded(walker).reset(), before)


@pytest.mark.slow
def test_many_steps_keep_nothing_alive(walker):
    def play(steps):
        td = seeded(walker).reset()
        for _ in range(steps):
            td = walker.step_and_maybe_reset(act(td, 0.3))[1]
        del td
        gc.collect()
        return len(jax.live_arrays())

    before = play(3)

    assert play(300) <= before
