"""Environments as pure JAX functions: one environment, then many, then whole rollouts.

This package knows JAX and not torch. Write `reset` and `step` for ONE environment; everything
here is traceable and waits for one outer ``jit``.
"""

from envkit.functional.batch import (
    BatchedEnv,
    EpisodeState,
    Episodic,
    Origin,
    ResetMode,
    restart_where,
    row_keys,
)
from envkit.functional.core import (
    EnvWrapper,
    ModelledEnv,
    RewardShape,
    StatelessEnv,
    Timestep,
    WrapperState,
    done_of,
    groups_of,
    normalize,
    reward_shape_of,
)
from envkit.functional.packing import Field, StatePacking
from envkit.functional.randomization import Randomization, RandomizeAt, Randomizer
from envkit.functional.rollout import (
    Policy,
    Stopped,
    StopRule,
    Transition,
    random_policy,
    transition,
    unroll,
    unroll_until,
)
from envkit.functional.spaces import (
    AgentsDiscrete,
    Box,
    Discrete,
    MultiDiscrete,
    require_action_masks,
    sample_space,
)
from envkit.functional.structure import conform, name_of
from envkit.functional.wrappers import (
    FrameSkip,
    GroupEnds,
    Metrics,
    TimeLimit,
    TimeLimitState,
    WithoutInfo,
)

__all__ = [
    "AgentsDiscrete",
    "BatchedEnv",
    "Box",
    "Discrete",
    "EnvWrapper",
    "EpisodeState",
    "Episodic",
    "Field",
    "FrameSkip",
    "GroupEnds",
    "Metrics",
    "ModelledEnv",
    "MultiDiscrete",
    "Origin",
    "Policy",
    "Randomization",
    "RandomizeAt",
    "Randomizer",
    "ResetMode",
    "RewardShape",
    "StatePacking",
    "StatelessEnv",
    "StopRule",
    "Stopped",
    "TimeLimit",
    "TimeLimitState",
    "Timestep",
    "Transition",
    "WithoutInfo",
    "WrapperState",
    "conform",
    "done_of",
    "groups_of",
    "name_of",
    "normalize",
    "random_policy",
    "require_action_masks",
    "restart_where",
    "reward_shape_of",
    "row_keys",
    "sample_space",
    "transition",
    "unroll",
    "unroll_until",
]
