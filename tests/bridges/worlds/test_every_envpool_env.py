"""Every env of EnvPool that builds here does what its specs say."""

import envpool
import pytest
from envpool.registration import registry

from envkit import MultiThreadedEnv, check_env_specs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*precision lowered")]

FAILS = {
    "procgen": "needs the Qt 5 libraries of the system",
    "Sudoku": "its puzzles are not among the library's files",
    **dict.fromkeys(
        ("Cig-v1", "MultiDuel-v1"), "the bare library ends the process at its first reset"
    ),
    "VizdoomCustom": "needs a scenario of the user's",
}
"""What fails in the library itself, by family or part of a name."""


def players(name: str) -> int:
    return getattr(envpool.make_spec(name).config, "max_num_players", 1)


@pytest.mark.parametrize("name", sorted(envpool.list_all_envs()))
def test_an_env_does_what_its_specs_say(name):
    family = registry.specs[name][0]
    for part, reason in FAILS.items():
        if part in name or family.endswith(part):
            pytest.skip(f"{name}: {reason}")
    if players(name) > 1:
        pytest.skip(f"{name}: several players an env, which are refused")

    with MultiThreadedEnv(2, name, create_env_kwargs={"num_threads": 1}) as env:
        env.set_seed(0)

        check_env_specs(env)
        data = env.rollout(20, break_when_any_done=False)

    assert data.shape == (2, 20)
