"""The reference: examples in docstrings print what they show, and public names have an example and describe their arguments."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import envkit

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(file.relative_to(root).with_suffix("").parts): file.read_text()
    for root, package in ((ROOT, "envkit"), (ROOT / "bridges", "envkit_bridges"))
    for file in sorted((root / package).rglob("*.py"))
}
WITH_EXAMPLES = [name for name, source in MODULES.items() if ">>> " in source]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_print_what_they_show(module, opened, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for those that write files
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    for library in re.findall(r">>> (?:import|from) (\w+)", MODULES[module]):
        pytest.importorskip(library)
    pool = opened(envkit.SerialEnv(2, lambda: envkit.GymEnv("CartPole-v1")))
    shared = {"GymEnv": envkit.GymEnv, "SerialEnv": envkit.SerialEnv, "pool": pool}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    found = [
        test
        for test in doctest.DocTestFinder().find(importlib.import_module(module), module)
        if test.examples
    ]

    report: list[str] = []
    for test in found:
        test.globs = shared | test.globs  # those of its module
        runner.run(test, out=report.append)

    assert found
    assert not runner.failures, "".join(report)


def named() -> list[str]:
    """List the public names but those that tensordict defines, and describes."""
    return [
        name for name in envkit._HOME_OF if getattr(envkit, name).__module__.startswith("envkit")
    ]


def without_example() -> set[str]:
    return {name for name in named() if ">>> " not in (getattr(envkit, name).__doc__ or "")}


def undescribed(name: str) -> list[str]:
    """List the arguments of a public name that its docstring, or one that it inherits, does not describe."""
    value = getattr(envkit, name)
    docs = "\n".join(
        inspect.cleandoc(base.__doc__ or "") for base in getattr(value, "__mro__", [value])
    )
    described = {
        word.strip()
        for words in re.findall(r"^ +([\w ,*]+):", docs, re.M)
        for word in words.split(",")
    }
    if value is envkit.EnvSpecWarning:  # a warning, which has no signature
        return []
    parameters = inspect.signature(value).parameters.values()
    named = [
        one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    return [one for one in named if one not in described]


# Remove a name when its docstring gets what it lacks; add none.
WITHOUT_EXAMPLE = [
    "AsyncEnvPool",
    "Binary",
    "BinaryBox",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Box",
    "BoxList",
    "BraxEnv",
    "BraxWrapper",
    "CategoricalBox",
    "ChessEnv",
    "Choice",
    "ContinuousBox",
    "CraftaxEnv",
    "CraftaxWrapper",
    "DMControlEnv",
    "DMControlWrapper",
    "Discrete",
    "DiscreteBox",
    "DreamerDecoder",
    "DreamerEnv",
    "EnvBase",
    "EnvCreator",
    "EnvMetaData",
    "EnvSpecWarning",
    "FinancialRegimeEnv",
    "FrameSkip",
    "GymLikeEnv",
    "GymnaxEnv",
    "GymnaxWrapper",
    "ImaginedEnv",
    "JaxEnv",
    "JaxMARLEnv",
    "JaxMARLWrapper",
    "JaxPolicy",
    "JumanjiEnv",
    "JumanjiWrapper",
    "LLMHashingEnv",
    "MarlGroupMapType",
    "MixedEnv",
    "ModelBasedEnvBase",
    "MujocoPlaygroundEnv",
    "MujocoPlaygroundWrapper",
    "MultiCategorical",
    "MultiDiscrete",
    "MultiOneHot",
    "MultiThreadedEnv",
    "MultiThreadedEnvWrapper",
    "NonTensor",
    "PendulumEnv",
    "PettingZooEnv",
    "PettingZooWrapper",
    "PlaygroundEnv",
    "PlaygroundWrapper",
    "ProcessorAsyncEnvPool",
    "RayAsyncEnvPool",
    "Stacked",
    "StackedComposite",
    "StatelessEnv",
    "TensorSpec",
    "ThreadingAsyncEnvPool",
    "TicTacToeEnv",
    "TimeLimit",
    "Timestep",
    "TorchRLWrapper",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "WorldModelEnv",
    "XMiniGridEnv",
    "XMiniGridWrapper",
    "cache_dir",
    "check_marl_grouping",
    "check_no_exclusive_keys",
    "configure_gpu",
    "consolidate_spec",
    "contains_lazy_spec",
    "default_info_dict_reader",
    "env_creator",
    "from_torchrl_spec",
    "get_available_libraries",
    "get_env_metadata",
    "gym_backend",
    "make_composite_from_td",
    "register",
    "set_gym_backend",
    "to_gym_vector",
    "to_sb3",
    "to_torchrl",
    "to_torchrl_spec",
    "world_names",
    "worlds",
]
WITH_UNDESCRIBED = [
    "BinaryBox",
    "Box",
    "BoxList",
    "BraxWrapper",
    "CategoricalBox",
    "CraftaxWrapper",
    "DMControlEnv",
    "Discrete",
    "DiscreteBox",
    "FrameSkip",
    "GymnaxWrapper",
    "JaxMARLWrapper",
    "JumanjiWrapper",
    "MarlGroupMapType",
    "MujocoPlaygroundWrapper",
    "NavixWrapper",
    "MultiDiscrete",
    "PgxWrapper",
    "PlaygroundWrapper",
    "SerialEnv",
    "TimeLimit",
    "XMiniGridWrapper",
    "check_marl_grouping",
    "contains_lazy_spec",
    "env_creator",
    "from_torchrl_spec",
    "gym_backend",
    "to_torchrl",
    "to_torchrl_spec",
]


def test_new_public_names_have_an_example():
    missing = without_example()

    assert not missing - set(WITHOUT_EXAMPLE), "give the docstring a section `Example:`"
    assert not set(WITHOUT_EXAMPLE) - missing, "these have one now: take them off the list"


def test_new_public_names_describe_their_arguments():
    missing = {name for name in named() if undescribed(name)}

    assert not missing - set(WITH_UNDESCRIBED), {
        name: undescribed(name) for name in missing - set(WITH_UNDESCRIBED)
    }
    assert not set(WITH_UNDESCRIBED) - missing, "these describe all: take them off the list"
