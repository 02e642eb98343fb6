"""Isaac Lab's two workflows, by envs of their form: groups, time-outs, and last observations that are missing."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
import torch
from gymnasium import spaces

from envkit import Collector, IsaacLabWrapper, check_env_specs, gae
from envkit.errors import ArgumentTypeError, EncodingError, ResetMaskError

ROWS = 3


class Direct(gymnasium.Env):
    """Carts that end where they are far, or by time; it resets rows in the same step and writes into its tensors."""

    metadata = {"render_modes": [None]}  # noqa: RUF012

    def __init__(self, *, keeps_last: bool = False):
        self.num_envs, self.device, self.keeps_last = ROWS, "cpu", keeps_last
        self.single_observation_space = spaces.Dict(
            policy=spaces.Box(-torch.inf, torch.inf, (2,)),
            critic=spaces.Dict(place=spaces.Box(-torch.inf, torch.inf, (1,))),
        )
        self.single_action_space = spaces.Box(-torch.inf, torch.inf, (1,))
        self.place, self.elapsed = torch.zeros(ROWS), torch.zeros(ROWS, dtype=torch.int64)
        self.observed = {"policy": torch.zeros(ROWS, 2), "critic": {"place": torch.zeros(ROWS, 1)}}
        self.extras: dict[str, Any] = {"log": {}}

    def begin(self, rows: Any) -> None:
        self.place[rows] = 0.1 * torch.arange(ROWS)[rows] - 0.1
        self.elapsed[rows] = 0

    def observe(self) -> dict[str, Any]:
        self.observed["policy"].copy_(torch.stack((self.place, self.elapsed), -1))
        self.observed["critic"]["place"].copy_(self.place[:, None])
        return self.observed

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.begin(slice(None))
        return self.observe(), self.extras

    def step(self, action: torch.Tensor) -> Any:
        self.place += action[:, 0]
        self.elapsed += 1
        terminated, time_outs = self.place.abs() > 0.35, self.elapsed >= 3
        reward = -self.place.abs()
        if self.keeps_last:
            last = self.observe()
            self.extras["final_obs"] = {
                "policy": last["policy"].clone(),
                "critic": {"place": last["critic"]["place"].clone()},
            }
        self.begin(terminated | time_outs)
        return self.observe(), reward, terminated, time_outs, self.extras


class ManagerBased(Direct):
    """The same, whose rows can be reset by their numbers."""

    def reset(self, seed: int | None = None, env_ids: Any = None, options: Any = None) -> Any:
        self.begin(slice(None) if env_ids is None else env_ids)
        return self.observe(), self.extras


workflows = pytest.mark.parametrize("workflow", [Direct, ManagerBased])


def push(td: Any) -> Any:
    return td.set("action", torch.full((ROWS, 1), 0.1))


@workflows
def test_a_rollout_holds_the_groups_and_marks_the_last_observations_that_are_missing(workflow):
    env = IsaacLabWrapper(workflow())

    data = env.rollout(8, push, break_when_any_done=False)

    # from -0.1, 0 and 0.1 in steps of 0.1: three steps by time, and the last row is far with the third
    ends = torch.tensor([False, False, True, False, False, True, False, False])
    assert torch.equal(data["next", "truncated"][..., 0], ends.expand(ROWS, -1))
    assert torch.equal(data["next", "terminated"][2, :, 0], ends)
    assert not data["next", "terminated"][:2].any()
    missing = data["next", "final_missing"]
    assert torch.equal(missing, data["next", "done"])
    assert torch.equal(data["next", "policy"].isnan().all(-1, keepdim=True), missing)
    assert torch.equal(data["next", "critic", "place"].isnan(), missing)
    elapsed = torch.tensor([0.0, 1, 2] * 2 + [0, 1])
    assert torch.equal(data["policy"][..., 1], elapsed.expand(ROWS, -1))
    torch.testing.assert_close(data["critic", "place"][0, :3, 0], torch.tensor([-0.1, 0, 0.1]))


@workflows
def test_specs_and_data_agree(workflow):
    check_env_specs(IsaacLabWrapper(workflow()))


def test_the_wrappers_of_gymnasium_make_are_taken_off():
    checked = gymnasium.wrappers.OrderEnforcing(ManagerBased())

    env = IsaacLabWrapper(checked)

    assert env.partial_reset == "env_ids"
    assert env.rollout(4, push, break_when_any_done=False).shape == (ROWS, 4)


def test_a_row_is_reset_by_its_number_where_the_workflow_can():
    mask = torch.tensor([[True], [False], [False]])
    env, direct = IsaacLabWrapper(ManagerBased()), IsaacLabWrapper(Direct())
    root = env.step_mdp(env.step(push(env.reset())))

    again = env.reset(root.set("_reset", mask))

    assert again["policy"][:, 1].tolist() == [0, 1, 1]
    stepped = direct.step_mdp(direct.step(push(direct.reset())))
    with pytest.raises(ResetMaskError, match="can reset only all of its rows"):
        direct.reset(stepped.set("_reset", mask))


def test_gae_leaves_out_a_time_out_whose_last_observation_is_missing():
    env = IsaacLabWrapper(Direct())
    data = env.rollout(8, push, break_when_any_done=False)

    def value(td: Any) -> torch.Tensor:
        return td["critic", "place"]

    advantage = gae(data, value, gamma=0.9, lmbda=0.9)["advantage"]

    cut = data["next", "truncated"] & ~data["next", "terminated"]
    assert cut.any() and (advantage[cut] == 0).all()
    assert not advantage.isnan().any() and (advantage[~cut] != 0).all()


def test_last_observations_that_the_extras_hold_are_shown():
    env = IsaacLabWrapper(Direct(keeps_last=True), final=None)

    data = env.rollout(8, push, break_when_any_done=False)

    assert data["next", "policy"][..., 1].tolist() == [[1, 2, 3] * 2 + [1, 2]] * ROWS
    with pytest.raises(EncodingError, match="final='missing'"):
        IsaacLabWrapper(Direct(), final=None).rollout(8, push, break_when_any_done=False)


def test_a_collector_takes_it_and_its_batches_do_not_change():
    env = IsaacLabWrapper(ManagerBased())
    collector = Collector(env, push, frames_per_batch=12, total_frames=36)

    batches = list(collector)

    assert [batch["policy"][0, :, 1].tolist() for batch in batches] == [
        [0, 1, 2, 0],
        [1, 2, 0, 1],
        [2, 0, 1, 2],
    ]


@pytest.mark.parametrize(("env", "words"), [(3, "expected an env object"), (Direct, "of type")])
def test_something_else_is_refused(env, words):
    with pytest.raises(ArgumentTypeError, match=words):
        IsaacLabWrapper(env)
