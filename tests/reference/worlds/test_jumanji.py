"""Envs of Jumanji have the same entries, sizes and actions in both libraries, but where the page says otherwise."""

from __future__ import annotations

import pytest
import torch

from tests.reference.compare import OURS, check_same, differs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHOWN = ("grid", "step_count", "action_mask", "reward", "done", "terminated")


def forms(td, *keys):
    """List shape and dtype of entries."""
    return {key: (tuple(td[key].shape), td[key].dtype) for key in keys}


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_rollout_of_snake_has_the_same_entries(batch):
    def entries(lib):
        env = lib.JumanjiEnv("Snake-v1", batch_size=batch)
        env.set_seed(0)
        data = env.rollout(3, break_when_any_done=False)
        return tuple(data.shape), forms(data["next"], *SHOWN), data["action"].shape

    check_same(entries)


@pytest.mark.parametrize("as_integers", [True, False])
@pytest.mark.parametrize("name", ["Snake-v1", "Sudoku-v0"])
def test_actions_have_the_same_options(name, as_integers):
    def options(lib):
        spec = lib.JumanjiEnv(name, categorical_action_encoding=as_integers).action_spec
        choices = torch.as_tensor(spec.nvec).tolist() if "Multi" in type(spec).__name__ else spec.n
        return type(spec).__name__, tuple(spec.shape), choices

    check_same(options)


def test_an_end_of_time_that_the_library_does_not_count_as_an_end_is_truncation():
    from jumanji.environments import Connector
    from jumanji.environments.routing.connector.generator import UniformRandomGenerator

    def ends(lib):
        bare = Connector(UniformRandomGenerator(grid_size=4, num_agents=2), time_limit=1)
        env = lib.JumanjiWrapper(bare)
        env.set_seed(0)
        td = env.reset()
        following = env.step(td.set("action", torch.zeros(2, dtype=torch.int32)))["next"]
        return {name: following[name] for name in ("done", "terminated")}

    differs("simulators-in-jax", ends)
    assert {name: bool(flag) for name, flag in ends(OURS).items()} == {
        "done": True,
        "terminated": False,
    }
