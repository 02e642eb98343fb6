"""Our own envs beside TorchRL's of the same names: the same seeds, actions and data."""

from __future__ import annotations

import pytest
import torch

from envkit import PendulumEnv
from tests.reference.compare import check_same, check_works_alike, differs

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRL's own


def pendulum(lib, **options):
    return lib.PendulumEnv(seed=0, **options)


def test_pendulums_declare_and_draw_the_same():
    check_works_alike(lambda lib: pendulum(lib).observation_spec)
    check_works_alike(lambda lib: pendulum(lib).full_state_spec)
    check_works_alike(lambda lib: pendulum(lib).full_action_spec)
    check_works_alike(lambda lib: pendulum(lib).full_done_spec)
    check_works_alike(lambda lib: lib.PendulumEnv.gen_params(g=3.0, batch_size=[2]))
    check_works_alike(
        lambda lib: pendulum(lib).reset(lib.PendulumEnv.gen_params(batch_size=[2, 3]))
    )


def test_pendulums_swing_alike_to_the_bit():
    def swing(lib):
        actions = (torch.randn(40, 3, 1) * 3).unbind(0)
        start = lib.PendulumEnv.gen_params(g=9.0, batch_size=[3])
        return pendulum(lib).rollout(40, actions=actions, tensordict=start)

    check_works_alike(swing)


@pytest.mark.parametrize("set_state", [None, True, False])
@pytest.mark.parametrize("mask", [None, [True, False]], ids=["all", "part"])
def test_pendulums_begin_at_a_given_state_alike(set_state, mask):
    def begin(lib):
        env = pendulum(lib)
        td = env.reset(env.gen_params(batch_size=[2]))
        if mask is not None:
            td["_reset"] = torch.tensor(mask)[:, None]
        return env.reset(td, **({} if set_state is None else {"set_state": set_state}))

    check_works_alike(begin)


def test_parameters_of_the_constructor_are_the_defaults_here():
    differs(
        "native-envs",
        lambda lib: pendulum(lib, td_params=lib.PendulumEnv.gen_params(g=1.0)).reset()[
            "params", "g"
        ],
    )
    assert PendulumEnv(PendulumEnv.gen_params(g=1.0)).reset()["params", "g"] == 1
    check_same(lambda lib: lib.PendulumEnv(td_params=lib.PendulumEnv.gen_params(batch_size=[3])))
