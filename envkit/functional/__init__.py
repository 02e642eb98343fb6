"""Stateless environments in pure JAX: protocol, wrappers, batches, packing and scans."""

from envkit.functional.autoreset import EpisodeState, Episodic, bucket_sizes, choose, restart_where
from envkit.functional.batch import BatchedEnv
from envkit.functional.core import Space, StatelessEnv, Timestep, normalized
from envkit.functional.packing import PackedField, StatePacking, conform, path_of
from envkit.functional.rollout import random_policy, unroll
from envkit.functional.spaces import Box, Discrete, sample
from envkit.functional.wrappers import FrameSkip, TimeLimit, TimeLimitState

__all__ = [
    "BatchedEnv",
    "Box",
    "Discrete",
    "EpisodeState",
    "Episodic",
    "FrameSkip",
    "PackedField",
    "Space",
    "StatePacking",
    "StatelessEnv",
    "TimeLimit",
    "TimeLimitState",
    "Timestep",
    "bucket_sizes",
    "choose",
    "conform",
    "normalized",
    "path_of",
    "random_policy",
    "restart_where",
    "sample",
    "unroll",
]
