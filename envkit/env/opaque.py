"""Environments as single, opaque calls for `torch.compile`.

What an env does (programs of JAX, simulators, processes, TensorDicts by name) is none of what torch
compiles, and its compiler fails or warns where it looks inside. So it is told not to look: a compiled
function that steps an env is compiled before and after that call, and the env runs as always. What is
compiled by itself, such as a policy, stays so when an env calls it.
"""

from __future__ import annotations

from inspect import isfunction

import torch

from envkit.env.exclusive import CALLS

__all__ = ["hide_calls"]


def hide_calls(cls: type) -> None:
    """Hide the calls that a class defines from torch's compiler."""
    for name in CALLS & vars(cls).keys():
        if isfunction(call := vars(cls)[name]):
            setattr(cls, name, torch.compiler.disable(call, reason="an env is opaque"))
