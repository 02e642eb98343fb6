"""One environment interface, TensorDict in and TensorDict out, over JAX and Gymnasium envs.

This module is the front door: it knows where each public name lives and imports that place when
the name is first used. Importing it loads neither torch nor JAX.
"""

import sys as _sys
from importlib import import_module as _import_module

_HOMES = {
    "envkit_bridges.catalogue.ids": ("list_envs", "register", "world_names", "worlds"),
    "envkit_bridges.catalogue.making": ("make",),
    "envkit_bridges.worlds.brax": ("BraxEnv", "BraxWrapper"),
    "envkit_bridges.worlds.gymnax": ("GymnaxEnv", "GymnaxWrapper"),
    "envkit_bridges.worlds.jumanji": ("JumanjiEnv", "JumanjiWrapper"),
    "envkit_bridges.worlds.native.chess": ("ChessEnv",),
    "envkit_bridges.worlds.playground": (
        "MujocoPlaygroundEnv",
        "MujocoPlaygroundWrapper",
        "PlaygroundEnv",
        "PlaygroundWrapper",
    ),
    "envkit_bridges.worlds.dm_control": ("DMControlEnv", "DMControlWrapper"),
    "envkit_bridges.worlds.native.pendulum": ("PendulumJaxEnv",),
    "envkit_bridges.worlds.envpool.env": ("MultiThreadedEnv", "MultiThreadedEnvWrapper"),
    "envkit_bridges.worlds.pettingzoo.env": ("PettingZooEnv",),
    "envkit_bridges.worlds.pettingzoo.wrapper": ("PettingZooWrapper",),
    "envkit_bridges.jax.compilation": ("cache_dir",),
    "envkit_bridges.jax.memory": ("configure_gpu",),
    "envkit_bridges.gym.backend": ("gym_backend", "set_gym_backend"),
    "envkit_bridges.gym.info": ("default_info_dict_reader",),
    "envkit_bridges.gym.env": ("GymEnv",),
    "envkit_bridges.gym.like": ("GymLikeEnv",),
    "envkit_bridges.gym.wrapper": ("GymWrapper",),
    "envkit_bridges.jax.env": ("JaxEnv",),
    "envkit_bridges.libraries": ("get_available_libraries",),
    "envkit_bridges.exports.torchrl": ("TorchRLWrapper", "for_replay_buffer", "to_torchrl"),
    "envkit_bridges.exports.torchrl_specs": ("from_torchrl_spec", "to_torchrl_spec"),
    "envkit_bridges.exports.gym_vector": ("to_gym_vector",),
    "envkit_bridges.exports.sb3": ("to_sb3",),
    "envkit_bridges.exports.hdf5": ("from_hdf5", "to_hdf5"),
    "envkit_bridges.exports.minari": ("from_minari", "to_minari"),
    "envkit_bridges.exports.parquet": ("from_parquet", "to_parquet"),
    "envkit_bridges.policy.compiled": ("compile_policy",),
    "envkit_bridges.jax.policy.jax_policy": ("JaxPolicy",),
    "envkit_bridges.exports.plots": ("plot_returns", "plot_rollout"),
    "envkit_bridges.exports.video": ("Video", "VideoFolder", "record", "video"),
    "envkit.collectors.collector": ("BaseCollector", "Collector"),
    "envkit.collectors.multi_async": (
        "AsyncCollector",
        "MultiAsyncCollector",
        "MultiaSyncDataCollector",
    ),
    "envkit.collectors.multi_sync": ("MultiSyncCollector", "MultiSyncDataCollector"),
    "envkit.collectors.profiling": ("ProfileConfig",),
    "envkit.collectors.sync": ("SyncDataCollector",),
    "envkit.collectors.multi": ("MultiCollector",),
    "envkit.env.base": ("EnvBase",),
    "envkit.evaluation.evaluate": ("evaluate",),
    "envkit.evaluation.outcome": ("Comparison", "Difference", "Evaluation"),
    "envkit.evaluation.shown": (
        "ShownRollout",
        "load_ipython_extension",
        "show_rollout",
        "unload_ipython_extension",
    ),
    "envkit.evaluation.stats": ("EpisodeStats", "episode_stats"),
    "envkit.batched.creator": ("EnvCreator", "env_creator", "get_env_metadata"),
    "envkit.batched.metadata": ("EnvMetaData",),
    "envkit.batched.mixed": ("MixedEnv",),
    "envkit.batched.async_pool": (
        "AsyncEnvPool",
        "ProcessorAsyncEnvPool",
        "RayAsyncEnvPool",
        "ThreadingAsyncEnvPool",
    ),
    "envkit.batched.parallel": ("ParallelEnv",),
    "envkit.batched.serial": ("SerialEnv",),
    "envkit.checkpoint": ("load", "save"),
    "envkit.envs.llm_hashing": ("LLMHashingEnv",),
    "envkit.envs.model_based": (
        "DreamerDecoder",
        "DreamerEnv",
        "ImaginedEnv",
        "ModelBasedEnvBase",
        "WorldModelEnv",
    ),
    "envkit.envs.pendulum": ("PendulumEnv",),
    "envkit.envs.trading": ("FinancialRegimeEnv",),
    "envkit.envs.tictactoe": ("TicTacToeEnv",),
    "envkit.env.checks": ("check_env_specs",),
    "envkit.errors": ("EnvSpecWarning",),
    "envkit.env.drawing": ("make_tensordict",),
    "envkit.env.groups": ("MarlGroupMapType", "check_marl_grouping"),
    "envkit.functional": (
        "Box",
        "Discrete",
        "FrameSkip",
        "MultiDiscrete",
        "StatelessEnv",
        "TimeLimit",
        "Timestep",
    ),
    "envkit.env.policy": (
        "ExplorationType",
        "RandomPolicy",
        "exploration_type",
        "set_exploration_type",
    ),
    "envkit.specs": (
        "Binary",
        "BinaryBox",
        "Bounded",
        "BoundedContinuous",
        "BoundedDiscrete",
        "BoxList",
        "Categorical",
        "CategoricalBox",
        "Choice",
        "Composite",
        "ContinuousBox",
        "DiscreteBox",
        "MultiCategorical",
        "MultiOneHot",
        "NonTensor",
        "OneHot",
        "Stacked",
        "StackedComposite",
        "TensorSpec",
        "Unbounded",
        "UnboundedContinuous",
        "UnboundedDiscrete",
        "check_no_exclusive_keys",
        "consolidate_spec",
        "contains_lazy_spec",
        "make_composite_from_td",
    ),
    "envkit.transforms.action_forms": ("ActionScaling", "FlattenAction", "MeanActionSelector"),
    "envkit.transforms.actions": ("ActionDiscretizer", "ActionMask", "DiscreteActionProjection"),
    "envkit.data.episodes": ("split_trajectories",),
    "envkit.transforms.autoreset": ("AutoResetEnv", "AutoResetTransform", "VecGymEnvTransform"),
    "envkit.transforms.running": ("VecNorm", "VecNormV2"),
    "envkit.transforms.batch": ("BatchSizeTransform",),
    "envkit.transforms.core.base": ("Transform",),
    "envkit.transforms.core.compose": ("Compose",),
    "envkit.transforms.core.coupled": ("CoupledTransform",),
    "envkit.transforms.core.env": ("TransformedEnv",),
    "envkit.transforms.diagnostics": ("FiniteTensorDictCheck", "Timer"),
    "envkit.transforms.devices": ("DeviceCastTransform", "PinMemoryTransform"),
    "envkit.transforms.ends": (
        "EndOfLifeTransform",
        "RandomTruncationTransform",
        "TerminateTransform",
    ),
    "envkit.transforms.episodes": ("InitTracker", "StepCounter", "TrajCounter"),
    "envkit.transforms.flow": (
        "ConditionalPolicySwitch",
        "ConditionalSkip",
        "FrameSkipTransform",
        "NoopResetEnv",
        "RemoveEmptySpecs",
    ),
    "envkit.transforms.functions": ("Hash", "UnaryTransform"),
    "envkit.transforms.frames": ("CatFrames", "TimeMaxPool", "cat_frames"),
    "envkit.transforms.core.fusable": ("FusableTransform", "MomentTransform"),
    "envkit.transforms.pixels": (
        "CenterCrop",
        "Crop",
        "GrayScale",
        "PixelRenderTransform",
        "Resize",
        "ToTensorImage",
        "VideoRecorder",
    ),
    "envkit.transforms.join": ("CatTensors", "Stack"),
    "envkit.transforms.keys": ("ExcludeTransform", "RenameTransform", "SelectTransform"),
    "envkit.transforms.macro": ("ActionChunkTransform", "MultiAction"),
    "envkit.transforms.normalise": ("ObservationNorm", "RewardScaling"),
    "envkit.transforms.module": ("ModuleTransform",),
    "envkit.transforms.postprocess": (
        "BurnInTransform",
        "MultiStep",
        "MultiStepTransform",
        "RandomCropTensorDict",
        "Reward2GoTransform",
    ),
    "envkit.transforms.primer": ("TensorDictPrimer", "gSDENoise", "get_env_transforms_from_module"),
    "envkit.transforms.returns": ("RewardSum", "TargetReturn"),
    "envkit.transforms.shapes": (
        "ExpandAs",
        "FlattenObservation",
        "PermuteTransform",
        "SqueezeTransform",
        "UnsqueezeTransform",
    ),
    "envkit.transforms.core.leafwise": ("ObservationTransform",),
    "envkit.transforms.core.spec_hooks": ("apply_to_composite", "apply_to_composite_inv"),
    "envkit.transforms.values": (
        "BinarizeReward",
        "ClipTransform",
        "DTypeCastTransform",
        "DoubleToFloat",
        "LineariseRewards",
        "RewardClipping",
        "SignTransform",
        "SuccessReward",
    ),
    "envkit.data.resets": ("terminated_or_truncated",),
    "envkit.data.transition": ("step_mdp",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.2.0"

filter_warnings_subprocess = True
"""Worker processes hide Python warnings; set to False (before they start) to see them."""


_OTHER_NAMES = {f"_{name}": name for name in ("apply_to_composite", "apply_to_composite_inv")}
"""Names that transforms written for TorchRL import, and ours."""


class _NameOfBefore:
    """Explain the error of whoever loads a pickle of version 0.1.0: `envkit_bridges` was called `bridges`, and modules have moved.

    Python asks here last, so the modules of another project's `bridges` are found first.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("bridges", "envkit"):
            raise ModuleNotFoundError(
                f"there is no module {name!r}. If a pickle names it: envkit 0.1.0 wrote that, and modules have moved and "
                "been renamed since (`bridges` is `envkit_bridges`). Load the pickle with envkit 0.1.0, or make what it "
                "holds anew; files of envkit.save are read by all versions.",
                name=name,
            )


_sys.meta_path.append(_NameOfBefore)


def __getattr__(name: str):
    if name == "__all__":
        return _importable()
    name = _OTHER_NAMES.get(name, name)
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'envkit' has no attribute {name!r}.{_nearest(name)}")
    try:
        value = getattr(_import_module(home), name)
    except ModuleNotFoundError as error:
        raise _import_module("envkit_bridges.libraries").explained(error) from None
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOME_OF})


def _importable() -> list[str]:
    """List what a star import brings: the public names whose libraries are installed."""
    found = []
    for home, names in _HOMES.items():
        try:
            _import_module(home)
        except ModuleNotFoundError as error:
            told = _import_module("envkit_bridges.libraries").explained(error)
            if told is error:  # not a library that may be missing
                raise
        else:
            found.extend(names)
    return sorted(found)


def _nearest(name: str) -> str:
    close = _import_module("difflib").get_close_matches(name, _HOME_OF, 1)
    return f" Did you mean {close[0]!r}?" if close else ""
