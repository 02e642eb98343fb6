"""ManiSkill3 through `GymWrapper`, against its bare env object: rollouts with resets, seeds, masks. `make torch-sims` runs this.

Its simulator on the CPU has one row. PickCube needs a renderer for the colour of the cube, so the tests pick a cube of the same
task that has none; the block of the page is run where there is a renderer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

from envkit_bridges.libraries import require_quietly

pytest.importorskip("mani_skill", reason="make torch-sims has an environment with ManiSkill3")
require_quietly("mani_skill.envs")  # it gives warnings

import sapien  # noqa: E402
from mani_skill.envs.tasks.tabletop.pick_cube import PickCubeEnv  # noqa: E402
from mani_skill.utils.registration import register_env  # noqa: E402
from mani_skill.utils.scene_builder.table import TableSceneBuilder  # noqa: E402
from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv  # noqa: E402

from envkit import (  # noqa: E402
    Collector,
    GymWrapper,
    RewardSum,
    TransformedEnv,
    check_env_specs,
    evaluate,
    gae,
)
from envkit.errors import ArgumentError, EncodingError, EnvSpecWarning  # noqa: E402

# of the library, which hands tensors to NumPy
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LIMIT, STEPS = 6, 16


@register_env("PickUncoloured-v1", max_episode_steps=LIMIT)
class PickUncoloured(PickCubeEnv):
    """PickCube, whose cube and goal have no looks."""

    def _load_scene(self, options: dict[str, Any]) -> None:
        self.table_scene = TableSceneBuilder(self, robot_init_qpos_noise=self.robot_init_qpos_noise)
        self.table_scene.build()
        cube = self.scene.create_actor_builder()
        cube.add_box_collision(half_size=[self.cube_half_size] * 3)
        cube.initial_pose = sapien.Pose(p=[0, 0, self.cube_half_size])
        self.cube = cube.build(name="cube")
        goal = self.scene.create_actor_builder()
        goal.initial_pose = sapien.Pose()
        self.goal_site = goal.build_kinematic(name="goal_site")
        self._hidden_objects.append(self.goal_site)


def bare(**options: Any) -> Any:
    return gymnasium.make(
        "PickUncoloured-v1",
        num_envs=1,
        obs_mode="state",
        render_backend="none",
        enhanced_determinism=True,
        **options,
    )


def resets_by_numbers() -> Any:
    return GymWrapper(bare(), autoreset_mode="Disabled", partial_reset="env_idx")


def resets_by_itself() -> Any:
    return GymWrapper(ManiSkillVectorEnv(bare()))


KINDS = {"BaseEnv": resets_by_numbers, "ManiSkillVectorEnv": resets_by_itself}


@pytest.fixture(params=KINDS)
def env(request: pytest.FixtureRequest, opened: Callable) -> Any:
    return opened(KINDS[request.param]())


def push(observation: torch.Tensor) -> torch.Tensor:
    return observation[..., 9:17].clamp(-1, 1)  # a velocity for each joint that is moved


def by_velocity(td: Any) -> Any:
    return td.set("action", push(td["observation"]))


def rolled(env: Any) -> Any:
    return env.rollout(STEPS, by_velocity, break_when_any_done=False)


def assert_same(left: Any, right: Any) -> None:
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        assert torch.equal(left[key], right[key]), key


def bare_run(seed: int) -> dict[str, torch.Tensor]:
    """Step the bare env object by hand, and reset it where an episode has ended; the first reset is one more, as in a rollout."""
    simulator = bare()
    simulator.reset(seed=seed)
    seen: dict[str, list[torch.Tensor]] = {}
    observation, _ = simulator.reset()
    for _ in range(STEPS):
        moment = {"observation": observation}
        after, reward, terminated, truncated, _ = simulator.step(push(observation))
        moment |= {"last": after, "reward": reward[:, None]}
        moment |= {"terminated": terminated[:, None], "truncated": truncated[:, None]}
        for name, value in moment.items():
            seen.setdefault(name, []).append(value.clone())
        over = bool(terminated | truncated)
        observation = simulator.reset(options={"env_idx": [0]})[0] if over else after
    simulator.close()
    return {name: torch.stack(values, 1) for name, values in seen.items()}


def test_a_rollout_with_resets_has_the_bits_of_the_bare_env(env):
    env.set_seed(3)

    data = rolled(env)

    by_hand = bare_run(3)
    assert torch.equal(data["observation"], by_hand["observation"])
    assert torch.equal(data["next", "observation"], by_hand["last"])
    for name in ("reward", "terminated", "truncated"):
        assert torch.equal(data["next", name], by_hand[name]), name
    assert data["next", "truncated"].sum() == STEPS // LIMIT


def test_where_an_episode_ends_next_is_the_last_observation_and_the_root_after_it_the_first(env):
    data = rolled(env)

    over = data["next", "done"][:, :-1, 0]
    follows = (data["next", "observation"][:, :-1] == data["observation"][:, 1:]).all(-1)
    assert over.any() and torch.equal(follows, ~over)


def test_specs_and_data_agree_and_a_seed_repeats_a_rollout(env):
    check_env_specs(env, strict=True)

    env.set_seed(3)
    first = rolled(env)
    env.set_seed(3)

    assert_same(first, rolled(env))
    assert not torch.equal(first["observation"], rolled(env)["observation"])


def test_resets_draw_from_the_process_without_enhanced_determinism(opened):
    simulator = gymnasium.make(
        "PickUncoloured-v1", num_envs=1, obs_mode="state", render_backend="none"
    )
    env = opened(GymWrapper(simulator, autoreset_mode="Disabled", partial_reset="env_idx"))

    with pytest.warns(EnvSpecWarning, match="global generator of torch"):
        check_env_specs(env)


def test_a_row_in_the_middle_of_its_episode_is_reset(opened):
    env = opened(resets_by_numbers())
    root = env.step_mdp(env.step(by_velocity(env.reset())))

    again = env.reset(root.clone().set("_reset", torch.ones(1, 1, dtype=torch.bool)))

    assert not torch.equal(again["observation"], root["observation"])
    ends = rolled(env)["next", "truncated"].flatten().nonzero()[0]
    assert ends.item() == LIMIT - 1


def test_infos_are_recorded_on_request(opened):
    env = opened(GymWrapper(bare(), autoreset_mode="Disabled", partial_reset="env_idx", info=True))

    data = env.rollout(3, by_velocity)

    assert data["next", "success"].dtype == torch.bool
    assert data["next", "elapsed_steps"].flatten().tolist() == [1, 2, 3]


def test_collectors_evaluation_and_gae_take_it(env, opened):
    counted = TransformedEnv(env, RewardSum())
    collector = Collector(counted, by_velocity, frames_per_batch=8, total_frames=16)
    batches = [batch.clone() for batch in collector]

    def value(td: Any) -> torch.Tensor:
        return td["observation"].sum(-1, keepdim=True)

    target = gae(batches[0], value, gamma=0.9, lmbda=0.0)["value_target"]

    following = value(batches[0]["next"]) * ~batches[0]["next", "terminated"]
    torch.testing.assert_close(target, batches[0]["next", "reward"] + 0.9 * following)
    assert (batches[1]["next", "episode_reward"] > 0).all()
    tested = evaluate(opened(resets_by_numbers()), by_velocity, 2)
    assert (tested.lengths <= LIMIT).all() and len(tested.returns) == 2


def test_what_happens_at_an_end_must_be_said(monkeypatch, opened):
    monkeypatch.delitem(PickUncoloured.metadata, "autoreset_mode", raising=False)
    with pytest.raises(ArgumentError, match=r"does not say what it does with rows.*'Disabled'"):
        GymWrapper(bare())

    opened(resets_by_itself())  # which writes into the metadata of all
    env = opened(GymWrapper(bare()))

    with pytest.raises(EncodingError, match="infos hold no 'final_obs'"):
        rolled(env)


@pytest.mark.skipif(not sapien.Device("cpu").can_render(), reason="PickCube needs a renderer")
def test_the_block_of_the_page_runs_as_printed():
    page = Path(__file__).parents[2] / "docs" / "torch_simulators.md"
    (section,) = re.findall(r"\n## ManiSkill3\n(.*?)\n## ", page.read_text(), re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)

    exec(compile(code, "printed", "exec"), {"__name__": "__main__"})
