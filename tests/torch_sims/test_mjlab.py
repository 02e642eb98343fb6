"""mjlab against its bare env object: rollouts with resets, masks, seeds, and memory. `make torch-sims` runs this."""

from __future__ import annotations

import doctest
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envkit_bridges.libraries import require_quietly

pytest.importorskip("mjlab", reason="make torch-sims has an environment with mjlab")
require_quietly("mjlab.envs")  # it gives warnings

from mjlab.envs import ManagerBasedRlEnv  # noqa: E402
from mjlab.managers.termination_manager import TerminationTermCfg  # noqa: E402
from mjlab.tasks.cartpole.cartpole_env_cfg import cartpole_balance_env_cfg  # noqa: E402

from envkit import (  # noqa: E402
    Collector,
    GymWrapper,
    MJLabEnv,
    MJLabWrapper,
    RewardSum,
    TransformedEnv,
    check_env_specs,
    evaluate,
    gae,
    list_envs,
    make,
)
from envkit.errors import (  # noqa: E402
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    ClosedEnvError,
    EnvkitError,
    InputError,
    OptionError,
    StepMaskError,
    UnknownEnvError,
)
from envkit_bridges.worlds import mjlab  # noqa: E402

ROWS, STEPS = 4, 16


def is_far(env: Any) -> torch.Tensor:
    return env.scene["cartpole"].data.joint_pos[:, 0].abs() > 0.15


def settings() -> Any:
    """Return the cartpole's settings with ends of both kinds: far from the middle, and after 3 steps."""
    cfg = cartpole_balance_env_cfg()
    cfg.terminations["far"] = TerminationTermCfg(func=is_far)
    cfg.episode_length_s = 2.5 * 0.05
    return cfg


def bare(seed: int, **changes: Any) -> Any:
    cfg = settings()
    cfg.scene.num_envs, cfg.auto_reset, cfg.seed = ROWS, False, seed
    for name, value in changes.items():
        setattr(cfg, name, value)
    return ManagerBasedRlEnv(cfg, "cpu")


def push(actor: torch.Tensor) -> torch.Tensor:
    return actor[..., :1].sign()


def by_actor(td: Any) -> Any:
    return td.set("action", push(td["actor"]))


@pytest.fixture
def env(opened: Callable) -> MJLabEnv:
    return opened(MJLabEnv(settings(), ROWS, seed=3))


def assert_same(left: Any, right: Any) -> None:
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        torch.testing.assert_close(left[key], right[key], rtol=0, atol=0, equal_nan=True)


def bare_run(seed: int) -> dict[str, torch.Tensor]:
    """Step the bare env object by hand, and reset by their numbers the rows that have ended."""
    simulator = bare(seed)
    seen: dict[str, list[torch.Tensor]] = {}
    observed = {name: value.clone() for name, value in simulator.reset(seed=seed)[0].items()}
    for _ in range(STEPS):
        action = push(observed["actor"])
        after, reward, terminated, time_outs, _ = simulator.step(action)
        moment = {"actor": observed["actor"], "critic": observed["critic"], "action": action}
        moment |= {"last": after["actor"], "last critic": after["critic"]}
        moment |= {"reward": reward[:, None], "terminated": terminated[:, None]}
        moment |= {"truncated": time_outs[:, None]}
        for name, value in moment.items():
            seen.setdefault(name, []).append(value.clone())
        observed = {name: value.clone() for name, value in after.items()}
        over = (terminated | time_outs).clone()
        if over.any():
            fresh = simulator.reset(env_ids=over.nonzero().squeeze(-1))[0]
            for name, value in fresh.items():
                observed[name] = torch.where(over[:, None], value, observed[name])
    simulator.close()
    return {name: torch.stack(values, 1) for name, values in seen.items()}


def test_a_rollout_with_resets_has_the_bits_of_the_bare_env(env):
    data = env.rollout(STEPS, by_actor, break_when_any_done=False)

    by_hand = bare_run(3)
    for name in ("actor", "critic", "action"):
        assert torch.equal(data[name], by_hand[name]), name
    assert torch.equal(data["next", "actor"], by_hand["last"])
    assert torch.equal(data["next", "critic"], by_hand["last critic"])
    for name in ("reward", "terminated", "truncated"):
        assert torch.equal(data["next", name], by_hand[name]), name
    assert data["next", "terminated"].any() and data["next", "truncated"].any()


def test_where_an_episode_ends_next_is_the_last_observation_and_the_root_after_it_the_first(env):
    data = env.rollout(STEPS, by_actor, break_when_any_done=False)

    over = data["next", "done"][:, :-1, 0]
    follows = (data["next", "actor"][:, :-1] == data["actor"][:, 1:]).all(-1)
    assert over.any() and torch.equal(follows, ~over)


def test_specs_and_data_agree(env):
    check_env_specs(env)


def test_a_group_that_is_not_concatenated_is_a_node(opened):
    cfg = settings()
    cfg.observations["critic"].concatenate_terms = False

    env = opened(MJLabEnv(cfg, 2, seed=0))

    check_env_specs(env)
    assert env.rollout(2)["next", "critic", "pole_angle"].shape == (2, 2, 2)
    assert cfg.auto_reset and cfg.scene.num_envs == 1  # the settings of the caller


def test_a_seed_repeats_an_env_and_set_seed_repeats_a_rollout(env, opened):
    first = env.rollout(STEPS, by_actor, break_when_any_done=False)
    again = opened(MJLabEnv(settings(), ROWS, seed=3))
    env.set_seed(2**63)  # more than the library takes
    env.set_seed(3)

    assert_same(first, again.rollout(STEPS, by_actor, break_when_any_done=False))
    assert_same(first, env.rollout(STEPS, by_actor, break_when_any_done=False))
    later = env.rollout(STEPS, by_actor, break_when_any_done=False)
    assert not torch.equal(first["actor"], later["actor"])


def test_envs_that_are_stepped_in_turns_give_what_each_gives_alone(opened):
    alone = [opened(MJLabEnv(settings(), ROWS, seed=seed)) for seed in (1, 2)]
    turns = [opened(MJLabEnv(settings(), ROWS, seed=seed)) for seed in (1, 2)]
    expected = [env.rollout(STEPS, by_actor, break_when_any_done=False) for env in alone]

    roots = [env.reset() for env in turns]
    steps: list[list[Any]] = [[], []]
    for _ in range(STEPS):
        for number, env in enumerate(turns):
            torch.rand(3)
            step, roots[number] = env.step_and_maybe_reset(by_actor(roots[number]))
            steps[number].append(step)

    for whole, parts in zip(expected, steps, strict=True):
        assert torch.equal(
            whole["next", "actor"], torch.stack([p["next", "actor"] for p in parts], 1)
        )


def test_the_generators_of_the_process_stay_where_they_are(opened):
    def drawn() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before = drawn()
    env = opened(MJLabEnv(settings(), ROWS, seed=0))
    env.rollout(STEPS, by_actor, break_when_any_done=False)
    env.set_seed(5)

    assert drawn() == before


def test_a_state_dict_holds_the_random_numbers(env, opened):
    env.rollout(STEPS, by_actor, break_when_any_done=False)
    saved = env.state_dict()
    expected = env.rollout(STEPS, by_actor, break_when_any_done=False)

    other = opened(MJLabEnv(settings(), ROWS, seed=9))
    with pytest.warns(UserWarning, match="new ones begin"):
        other.load_state_dict(saved)

    assert_same(expected, other.rollout(STEPS, by_actor, break_when_any_done=False))


def test_recorded_data_does_not_change_in_later_steps(env):
    step, root = env.step_and_maybe_reset(by_actor(env.reset()))
    copies = step.clone(), root.clone()

    for _ in range(9):
        step_after, root_after = env.step_and_maybe_reset(by_actor(root.clone()))
        root = copies[1].clone() if root_after is None else root_after

    assert_same(step, copies[0])
    assert step_after["next", "actor"].data_ptr() != step["next", "actor"].data_ptr()


def ended(env: MJLabEnv) -> tuple[Any, torch.Tensor]:
    """Step until some rows have ended and others have not."""
    root = env.reset()
    while True:
        step = env.step(by_actor(root))
        over = step["next", "done"][:, 0]
        if over.any():
            assert not over.all()
            return step, over
        root = env.step_mdp(step)


def test_rows_that_have_ended_may_be_left_out_and_begin_when_they_are_reset(env):
    step, over = ended(env)
    root = by_actor(env.step_mdp(step)).set("_step", ~over)

    after = env.step(root)

    assert torch.equal(after["next", "actor"][over], step["next", "actor"][over])
    assert (after["next", "actor"][~over] != step["next", "actor"][~over]).any()
    mask = after["next", "done"].clone()
    again = env.reset(env.step_mdp(after).set("_reset", mask))
    assert torch.equal(again["actor"][~mask[:, 0]], after["next", "actor"][~mask[:, 0]])
    moved = env.step(by_actor(again))
    assert (moved["next", "actor"] != again["actor"]).any(-1).all()


def test_other_rows_go_on_as_if_none_had_been_left_out(env, opened):
    """A row that is left out does not change the physics of the others: it counts as one that was reset."""
    other = opened(MJLabEnv(settings(), ROWS, seed=3))
    step, over = ended(env)
    root = by_actor(env.step_mdp(step))
    beside, _ = ended(other)
    fresh = other.reset(other.step_mdp(beside).set("_reset", over[:, None]))

    masked = env.step(root.clone().set("_step", ~over))
    whole = other.step(by_actor(fresh))

    assert torch.equal(masked["next", "actor"][~over], whole["next", "actor"][~over])


def test_a_row_that_has_ended_is_not_stepped_before_its_reset(env):
    step, over = ended(env)

    with pytest.raises(StepMaskError, match=r"have ended.*Reset them first"):
        env.step(by_actor(env.step_mdp(step)))

    root = env.reset(env.step_mdp(step).set("_reset", over[:, None]))
    env.step(by_actor(root))


def test_a_row_in_the_middle_of_its_episode_is_reset_alone(env):
    root = env.step_mdp(env.step(by_actor(env.reset())))
    mask = torch.tensor([[True], [False], [False], [True]])

    again = env.reset(root.clone().set("_reset", mask))

    kept = ~mask[:, 0]
    assert torch.equal(again["actor"][kept], root["actor"][kept])
    assert (again["actor"][~kept] != root["actor"][~kept]).any(-1).all()


def test_gae_bootstraps_at_a_time_out_and_not_at_a_termination(env):
    data = env.rollout(STEPS, by_actor, break_when_any_done=False)

    def value(td: Any) -> torch.Tensor:
        return td["critic"].sum(-1, keepdim=True)

    target = gae(data, value, gamma=0.9, lmbda=0.0)["value_target"]

    following = data["next", "critic"].sum(-1, keepdim=True) * ~data["next", "terminated"]
    torch.testing.assert_close(target, data["next", "reward"] + 0.9 * following)


def test_an_env_that_resets_by_itself_is_refused_or_its_last_observations_are_missing(opened):
    simulator = bare(0, auto_reset=True)
    with pytest.raises(ArgumentError, match=r"resets rows by itself.*auto_reset = False"):
        MJLabWrapper(simulator)

    env = opened(MJLabWrapper(simulator, final="missing", seed=0))
    data = env.rollout(STEPS, by_actor, break_when_any_done=False)

    missing = data["next", "final_missing"]
    assert missing.any() and torch.equal(missing, data["next", "done"])
    assert torch.equal(data["next", "actor"].isnan().all(-1, keepdim=True), missing)
    assert not data["actor"].isnan().any()
    check_env_specs(env)


def test_a_wrapper_around_an_env_object_gives_what_the_class_gives(env, opened):
    wrapped = opened(MJLabWrapper(bare(3), seed=3))

    assert_same(
        wrapped.rollout(STEPS, by_actor, break_when_any_done=False),
        env.rollout(STEPS, by_actor, break_when_any_done=False),
    )


def test_collectors_transforms_evaluation_and_make_take_it(env, opened):
    counted = TransformedEnv(env, RewardSum())
    collector = Collector(counted, by_actor, frames_per_batch=40, total_frames=80)
    batches = [batch.clone() for batch in collector]
    assert [batch.shape for batch in batches] == [(ROWS, 10)] * 2
    assert (batches[1]["next", "episode_reward"] > 0).all()

    tested = evaluate(opened(MJLabEnv(settings(), ROWS, seed=0)), by_actor, 8)
    assert (tested.lengths <= 3).all() and len(tested.returns) == 8

    short = opened(make("mjlab/Mjlab-Cartpole-Swingup", 2, max_episode_steps=3, seed=0))
    truncated = short.rollout(7, break_when_any_done=False)["next", "truncated"]
    assert truncated[..., 0].tolist() == [[False, False, True] * 2 + [False]] * 2
    assert "mjlab/Mjlab-Cartpole-Balance" in list_envs(world="mjlab")


def test_a_limit_is_added_to_a_task_that_has_none(opened):
    cfg = settings()
    cfg.terminations.clear()

    env = opened(MJLabEnv(cfg, 2, max_steps=3, seed=0))

    assert env.rollout(9)["next", "truncated"][..., 0].tolist() == [[False, False, True]] * 2
    assert not cfg.terminations


REFUSALS: dict[str, tuple[Callable[[], Any], type[EnvkitError], str]] = {
    "task": (
        lambda: MJLabEnv("Mjlab-Cartpole-Balanse", 2),
        UnknownEnvError,
        "Did you mean 'Mjlab-Cartpole-Balance'",
    ),
    "object": (lambda: MJLabEnv(3, 2), ArgumentTypeError, "ManagerBasedRlEnvCfg"),
    "wrapper": (lambda: MJLabWrapper(3), ArgumentTypeError, "MJLabEnv with the name"),
    "rows": (lambda: MJLabEnv("Mjlab-Cartpole-Balance", 0), ArgumentError, "num_envs"),
    "limit": (
        lambda: MJLabEnv("Mjlab-Cartpole-Balance", 2, max_steps=0),
        ArgumentError,
        "max_steps",
    ),
    "play": (lambda: MJLabEnv(settings(), 2, play=True), ArgumentError, "name of a task"),
    "batch": (lambda: MJLabEnv(settings(), 2, batch_size=[3]), BatchSizeError, "2 rows"),
    "option": (lambda: MJLabEnv(settings(), 2, colour=1), OptionError, "colour"),
}


@pytest.mark.row
@pytest.mark.parametrize("case", REFUSALS)
def test_it_refuses(case):
    call, error, words = REFUSALS[case]

    with pytest.raises(error, match=words):
        call()


def test_actions_that_do_not_fit_and_a_closed_env_are_refused(env):
    root = env.reset()
    for action in (torch.zeros(ROWS, 2), torch.full((ROWS, 1), torch.nan)):
        with pytest.raises(InputError):
            env.step(root.clone().set("action", action))

    env.close()

    with pytest.raises(ClosedEnvError):
        env.reset()


def test_gym_wrapper_names_the_class_for_it(opened):
    simulator = bare(0)

    with pytest.raises(EnvkitError, match="MJLabWrapper"):
        GymWrapper(simulator)


def test_the_block_of_the_page_and_the_examples_run_as_printed():
    page = Path(__file__).parents[2] / "docs" / "torch_simulators.md"
    (section,) = re.findall(r"\n## mjlab\n(.*?)\n## ", page.read_text(), re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)

    exec(compile(code, "printed", "exec"), {"__name__": "__main__"})
    result = doctest.testmod(mjlab, optionflags=doctest.ELLIPSIS)

    assert result.attempted and not result.failed
