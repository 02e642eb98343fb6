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

NOT_RUNNABLE = {  # they use names that they do not make: complete them, and take them off
    "envkit.collectors.collector.Collector.call",
    "envkit.collectors.collector.Collector.cascade_execute",
    "envkit.collectors.collector.Collector.enable_profile",
    "envkit.collectors.collector.Collector.get_attr",
    "envkit.collectors.collector.Collector.get_distant_attr",
    "envkit.collectors.collector.Collector.pause",
    "envkit.collectors.collector.Collector.start",
    "envkit.evaluation.outcome.Evaluation.scalars",
}


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_print_what_they_show(module, opened):
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
    for test in (test for test in found if test.name not in NOT_RUNNABLE):
        test.globs = shared | test.globs  # those of its module
        runner.run(test, out=report.append)

    assert found
    assert not runner.failures, "".join(report)


def without_example() -> set[str]:
    return {name for name in envkit._HOME_OF if ">>> " not in (getattr(envkit, name).__doc__ or "")}


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
    "ActionChunkTransform",
    "ActionDiscretizer",
    "ActionMask",
    "ActionScaling",
    "AsyncEnvPool",
    "AutoResetEnv",
    "AutoResetTransform",
    "BatchSizeTransform",
    "BinarizeReward",
    "Binary",
    "BinaryBox",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Box",
    "BoxList",
    "BraxEnv",
    "BraxWrapper",
    "BurnInTransform",
    "CatFrames",
    "CatTensors",
    "CategoricalBox",
    "CenterCrop",
    "ChessEnv",
    "Choice",
    "ClipTransform",
    "Comparison",
    "ConditionalPolicySwitch",
    "ConditionalSkip",
    "ContinuousBox",
    "CoupledTransform",
    "CraftaxEnv",
    "CraftaxWrapper",
    "Crop",
    "DMControlEnv",
    "DMControlWrapper",
    "DTypeCastTransform",
    "DeviceCastTransform",
    "Difference",
    "Discrete",
    "DiscreteActionProjection",
    "DiscreteBox",
    "DoubleToFloat",
    "DreamerDecoder",
    "DreamerEnv",
    "EndOfLifeTransform",
    "EnvBase",
    "EnvCreator",
    "EnvMetaData",
    "EnvSpecWarning",
    "EpisodeStats",
    "Evaluation",
    "ExcludeTransform",
    "ExpandAs",
    "ExplorationType",
    "FinancialRegimeEnv",
    "FiniteTensorDictCheck",
    "FlattenAction",
    "FlattenObservation",
    "FrameSkip",
    "FrameSkipTransform",
    "FusableTransform",
    "GrayScale",
    "GymLikeEnv",
    "GymnaxEnv",
    "GymnaxWrapper",
    "Hash",
    "ImaginedEnv",
    "InitTracker",
    "JaxEnv",
    "JaxMARLEnv",
    "JaxMARLWrapper",
    "JaxPolicy",
    "JumanjiEnv",
    "JumanjiWrapper",
    "LLMHashingEnv",
    "LineariseRewards",
    "MarlGroupMapType",
    "MeanActionSelector",
    "MixedEnv",
    "ModelBasedEnvBase",
    "ModuleTransform",
    "MomentTransform",
    "MujocoPlaygroundEnv",
    "MujocoPlaygroundWrapper",
    "MultiAction",
    "MultiAsyncCollector",
    "MultiCategorical",
    "MultiCollector",
    "MultiDiscrete",
    "MultiOneHot",
    "MultiStep",
    "MultiStepTransform",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiThreadedEnv",
    "MultiThreadedEnvWrapper",
    "MultiaSyncDataCollector",
    "NonTensor",
    "NoopResetEnv",
    "ObservationNorm",
    "ObservationTransform",
    "PendulumEnv",
    "PermuteTransform",
    "PettingZooEnv",
    "PettingZooWrapper",
    "PinMemoryTransform",
    "PixelRenderTransform",
    "PlaygroundEnv",
    "PlaygroundWrapper",
    "ProcessorAsyncEnvPool",
    "RandomCropTensorDict",
    "RandomPolicy",
    "RandomTruncationTransform",
    "RayAsyncEnvPool",
    "RemoveEmptySpecs",
    "RenameTransform",
    "Resize",
    "Reward2GoTransform",
    "RewardClipping",
    "SelectTransform",
    "ShownRollout",
    "SignTransform",
    "SqueezeTransform",
    "Stack",
    "Stacked",
    "StackedComposite",
    "StatelessEnv",
    "SuccessReward",
    "SyncDataCollector",
    "TargetReturn",
    "TensorDictPrimer",
    "TensorSpec",
    "TerminateTransform",
    "ThreadingAsyncEnvPool",
    "TicTacToeEnv",
    "TimeLimit",
    "TimeMaxPool",
    "Timer",
    "Timestep",
    "ToTensorImage",
    "TorchRLWrapper",
    "TrajCounter",
    "Transform",
    "UnaryTransform",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "UnsqueezeTransform",
    "VecGymEnvTransform",
    "VecNorm",
    "VecNormV2",
    "Video",
    "VideoFolder",
    "VideoRecorder",
    "WorldModelEnv",
    "XMiniGridEnv",
    "XMiniGridWrapper",
    "apply_to_composite",
    "apply_to_composite_inv",
    "cache_dir",
    "cat_frames",
    "check_marl_grouping",
    "check_no_exclusive_keys",
    "configure_gpu",
    "consolidate_spec",
    "contains_lazy_spec",
    "default_info_dict_reader",
    "env_creator",
    "episode_stats",
    "exploration_type",
    "for_replay_buffer",
    "from_hdf5",
    "from_minari",
    "from_parquet",
    "from_torchrl_spec",
    "gSDENoise",
    "get_available_libraries",
    "get_env_metadata",
    "get_env_transforms_from_module",
    "gym_backend",
    "load_ipython_extension",
    "make_composite_from_td",
    "make_tensordict",
    "plot_returns",
    "plot_rollout",
    "record",
    "register",
    "set_exploration_type",
    "set_gym_backend",
    "show_rollout",
    "split_trajectories",
    "terminated_or_truncated",
    "to_gym_vector",
    "to_hdf5",
    "to_minari",
    "to_parquet",
    "to_sb3",
    "to_torchrl",
    "to_torchrl_spec",
    "unload_ipython_extension",
    "video",
    "world_names",
    "worlds",
]
WITH_UNDESCRIBED = [
    "AsyncCollector",
    "AsyncEnvPool",
    "AutoResetEnv",
    "BaseCollector",
    "BinaryBox",
    "Box",
    "BoxList",
    "BraxEnv",
    "BraxWrapper",
    "CategoricalBox",
    "ChessEnv",
    "Collector",
    "Comparison",
    "Compose",
    "CraftaxEnv",
    "CraftaxWrapper",
    "DMControlEnv",
    "DMControlWrapper",
    "Discrete",
    "DiscreteBox",
    "DreamerEnv",
    "EnvBase",
    "ExplorationType",
    "FinancialRegimeEnv",
    "FrameSkip",
    "GymEnv",
    "GymLikeEnv",
    "GymWrapper",
    "GymnaxEnv",
    "GymnaxWrapper",
    "ImaginedEnv",
    "JaxEnv",
    "JaxMARLEnv",
    "JaxMARLWrapper",
    "JumanjiEnv",
    "JumanjiWrapper",
    "LLMHashingEnv",
    "MarlGroupMapType",
    "MixedEnv",
    "ModelBasedEnvBase",
    "MujocoPlaygroundEnv",
    "MujocoPlaygroundWrapper",
    "NavixEnv",
    "NavixWrapper",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiDiscrete",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiThreadedEnv",
    "MultiThreadedEnvWrapper",
    "MultiaSyncDataCollector",
    "ParallelEnv",
    "PendulumEnv",
    "PendulumJaxEnv",
    "PettingZooEnv",
    "PettingZooWrapper",
    "PgxEnv",
    "PgxWrapper",
    "PlaygroundEnv",
    "PlaygroundWrapper",
    "ProcessorAsyncEnvPool",
    "RayAsyncEnvPool",
    "SerialEnv",
    "SyncDataCollector",
    "ThreadingAsyncEnvPool",
    "TicTacToeEnv",
    "TimeLimit",
    "TorchRLWrapper",
    "TransformedEnv",
    "WorldModelEnv",
    "XMiniGridEnv",
    "XMiniGridWrapper",
    "apply_to_composite",
    "apply_to_composite_inv",
    "check_marl_grouping",
    "contains_lazy_spec",
    "env_creator",
    "from_hdf5",
    "from_minari",
    "from_parquet",
    "from_torchrl_spec",
    "gym_backend",
    "set_exploration_type",
    "to_torchrl",
    "to_torchrl_spec",
]


def test_new_public_names_have_an_example():
    missing = without_example()

    assert not missing - set(WITHOUT_EXAMPLE), "give the docstring a section `Example:`"
    assert not set(WITHOUT_EXAMPLE) - missing, "these have one now: take them off the list"


def test_new_public_names_describe_their_arguments():
    missing = {name for name in envkit._HOME_OF if undescribed(name)}

    assert not missing - set(WITH_UNDESCRIBED), {
        name: undescribed(name) for name in missing - set(WITH_UNDESCRIBED)
    }
    assert not set(WITH_UNDESCRIBED) - missing, "these describe all: take them off the list"
