"""What `dir` of an env lists, and what completion offers after `env.` and inside a constructor."""

from __future__ import annotations

import re
from pathlib import Path

import jedi
import pytest
from torch import nn

from envkit import (
    Collector,
    EnvBase,
    GymEnv,
    JaxEnv,
    MultiSyncDataCollector,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TransformedEnv,
)
from tests.zoo.envs import Count
from tests.zoo.jax_envs import Countdown

ROOT = Path(__file__).parents[2]

COMPLETED = [
    *(EnvBase, GymEnv, JaxEnv, SerialEnv),
    *(Collector, SyncDataCollector, MultiSyncDataCollector),
]

OF_MODULES_ALONE = [
    *("T_destination", "call_super_init", "dump_patches", "ipu", "xpu", "mtia", "bfloat16", "half"),
    *("register_forward_hook", "register_full_backward_hook", "register_state_dict_pre_hook"),
    *("get_submodule", "set_submodule", "get_extra_state", "to_empty", "share_memory", "compile"),
    *("forward", "extra_repr", "type", "float", "double"),
    *("_parameters", "_modules", "_buffers", "_backward_hooks", "_is_full_backward_hook"),
    *("_load_from_state_dict", "_get_backward_hooks", "_apply", "_call_impl"),
]

KINDS = {
    "gym": lambda: GymEnv("CartPole-v1"),
    "jax": lambda: JaxEnv(Countdown(3), batch_size=[2]),
    "transformed": lambda: TransformedEnv(Count(), StepCounter()),
    "serial": lambda: SerialEnv(2, Count),
}


@pytest.fixture(scope="module", params=KINDS)
def env(request):
    env = KINDS[request.param]()
    yield env
    env.close(raise_if_closed=False)


def named_in_docs() -> set[str]:
    """List what the pages call on something they name ``env``."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return {name for page in pages for name in re.findall(r"\benv\.(\w+)", page.read_text())}


def test_dir_lists_all_that_the_docs_name_of_an_env(env):
    known = {name for name in named_in_docs() if hasattr(type(env), name)}

    assert len(known) > 12
    assert sorted(known - set(dir(env))) == []


def test_dir_lists_each_name_once(env):
    assert dir(env) == sorted({*dir(env)})


def test_dir_lists_what_writers_of_an_env_write(env):
    assert {"_reset", "_step", "_set_seed", "observation_spec", "reward_spec"} <= set(dir(env))


def test_dir_lists_nothing_that_only_torch_modules_need(env):
    listed = dir(env)

    assert [name for name in OF_MODULES_ALONE if not hasattr(env, name)] == []
    assert [name for name in OF_MODULES_ALONE if name in listed] == []


def test_an_env_is_a_module_and_lists_how_modules_move_are_saved_and_walked(env):
    used = {"to", "cpu", "cuda", "train", "eval", "training", "state_dict", "load_state_dict"}
    walked = {"parameters", "children", "modules", "named_parameters", "buffers"}

    assert isinstance(env, nn.Module)
    assert used | walked <= set(dir(env))


def test_dir_lists_what_a_users_class_defines_whatever_torch_means_by_the_name():
    class Typed(Count):
        type = "a kind of count"

        def forward(self):
            return None

    env = Typed()
    env.note = "mine"

    assert {"type", "forward", "note"} <= set(dir(env))
    assert "half" not in dir(env)


@pytest.mark.parametrize(
    ("code", "offered", "not_offered"),
    [
        ("env.roll", ["rollout"], []),
        ("env.regis", ["register_gym"], ["register_forward_hook"]),
        ("env.rollout(3, break_when", ["break_when_any_done="], []),
        ("GymEnv('CartPole-v1', fr", ["frame_skip=", "from_pixels="], []),
        ("JaxEnv(core, batch", ["batch_size="], []),
        ("SerialEnv(2, make, num_p", ["num_processes="], []),
        ("Collector(make, frames", ["frames_per_batch="], []),
        ("MultiSyncDataCollector([make], pre", ["preemptive_threshold=", "prefetch="], []),
        ("SyncDataCollector(make, num_", [], ["num_threads="]),
        ("EnvBase.regis", ["register_gym"], []),
    ],
)
def test_completion_offers_methods_and_keywords(code, offered, not_offered):
    names = {"env": Count(), **{kind.__name__: kind for kind in COMPLETED}}

    found = [one.name for one in jedi.Interpreter(code, [names]).complete()]

    assert set(offered) <= set(found)
    assert not set(not_offered) & set(found)
