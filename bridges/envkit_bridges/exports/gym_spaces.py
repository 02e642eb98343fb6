"""Specs as spaces of a gym library, for those who look at an env of ours from there.

A space of what is shown contains exactly what `reset` and `step` give; one of what is asked for is what
users of gym write.

Conventions
    spaces  the ``spaces`` module of a gym library.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from envkit.specs import Binary, Categorical, Composite, MultiOneHot, OneHot, TensorSpec
from envkit_bridges.gym.codecs import space_of

__all__ = ["NO_SPACE", "asked_space", "shown_space"]

NO_SPACE = (torch.bfloat16, torch.complex32, torch.complex64, torch.complex128)
"""Dtypes that no space of a gym library has."""


def shown_space(spec: TensorSpec, spaces: Any) -> Any:
    """Give the space of what is shown: it contains the arrays a spec holds, shape and dtype."""
    if isinstance(spec, Composite):
        members = {name: shown_space(spec[name], spaces) for name in sorted(spec.keys())}
        return spaces.Dict(members)
    if spec.dtype == torch.bool:
        return spaces.MultiBinary(tuple(spec.shape)) if spec.shape else spaces.Discrete(2)
    if isinstance(spec, Categorical) and spec.shape:
        dtype = np.dtype(str(spec.dtype).removeprefix("torch."))
        return spaces.MultiDiscrete(np.full(tuple(spec.shape), spec.n), dtype=dtype)
    return space_of(spec)


def asked_space(spec: TensorSpec, spaces: Any) -> Any:
    """Give the space of what is asked for: indices where a spec holds one-hot codes."""
    if isinstance(spec, Composite):
        members = {name: asked_space(spec[name], spaces) for name in sorted(spec.keys())}
        return spaces.Dict(members)
    batch = tuple(spec.shape[:-1])
    if isinstance(spec, OneHot):
        return spaces.MultiDiscrete(np.full(batch, spec.n)) if batch else spaces.Discrete(spec.n)
    if isinstance(spec, MultiOneHot):
        return spaces.MultiDiscrete(np.broadcast_to(spec.nvec, (*batch, len(spec.nvec))))
    if isinstance(spec, Binary) or spec.dtype == torch.bool:
        return spaces.MultiBinary(tuple(spec.shape))
    return space_of(spec)
