"""Environments as single, opaque calls for `torch.compile`.

What an env does (programs of JAX, simulators, processes, TensorDicts by name) is none of what torch
compiles, and its compiler fails or warns where it looks inside. So it is told not to look: a compiled
function that steps an env is compiled before and after that call, and the env runs as always. What is
compiled by itself, such as a policy, stays so when an env calls it.
"""

from __future__ import annotations

from inspect import isfunction
from typing import Any

import torch

from envkit.env.exclusive import CALLS

__all__ = ["Opaque"]


class Opaque:
    """The part of an environment that hides its public calls, those of subclasses too."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in CALLS & vars(cls).keys():
            if isfunction(call := vars(cls)[name]):
                setattr(cls, name, torch.compiler.disable(call, reason="an env is opaque"))
