"""Transforms of TorchRL's, where envkit's are asked for.

The primers that TorchRL's recurrent modules make of themselves are built anew as ours. All others are refused
with the name of ours: they ask their env for what only TorchRL's have.
"""

from __future__ import annotations

from typing import Any

from envkit.errors import ArgumentTypeError
from envkit.lazy_imports import is_public
from envkit.transforms.core.base import Transform
from envkit.transforms.primer import TensorDictPrimer
from envkit_bridges.exports.torchrl_specs import from_torchrl_spec

__all__ = ["from_torchrl_transform"]


def from_torchrl_transform(theirs: Any) -> Transform:
    """Give a primer of TorchRL's as one of envkit's.

    Raises:
        ArgumentTypeError: (a TypeError) it is another transform.
    """
    kinds = [kind for kind in type(theirs).__mro__ if kind.__module__.startswith("torchrl.envs.")]
    if kinds[0] is type(theirs) and kinds[0].__name__ == "TensorDictPrimer":
        return _primer(theirs)
    ours = next(kind for kind in kinds if is_public(kind.__name__))
    fix = f"Write it as a subclass of envkit.{ours.__name__}, with the same hooks."
    if ours is type(theirs):
        fix = f"Take envkit.{ours.__name__}, which takes the same arguments."
    raise ArgumentTypeError(
        f"{type(theirs).__name__} is a transform of TorchRL's, and envkit's envs take envkit's. {fix}"
    )


def _primer(theirs: Any) -> TensorDictPrimer:
    return TensorDictPrimer(
        from_torchrl_spec(theirs.primers),
        random=theirs.random,
        default_value=None if theirs.random else theirs.default_value,
        reset_key=theirs._reset_key,
        expand_specs=theirs.expand_specs,
        single_default_value=theirs.single_default_value,
        call_before_env_reset=theirs.call_before_env_reset,
    )
