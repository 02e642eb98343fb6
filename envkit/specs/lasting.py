"""Tensors that outlive the call that makes them: a spec, an env or a transform keeps them for later calls.

Its first use may be inside of ``torch.inference_mode()``, ``torch.compile`` or ``torch.export``, and the next one outside.
Tensors of inference mode can never be written to in place, nor be saved for a backward pass, outside of it: what is kept is
made in `lasting`. In a trace tensors stand for others: what is made where `is_traced` is not kept at all.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch.compiler import is_compiling


@contextmanager
def lasting() -> Generator[None]:
    """Leave inference mode for a while, still without gradients; a context or a decorator."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_traced() -> bool:
    """Check whether tensors that are made now stand for others, as in ``torch.export`` and in fake modes.

    Example:
        >>> from envkit.specs.lasting import is_traced
        >>> is_traced()
        False
    """
    return is_compiling() or type(torch.empty(0, device="cpu")) is not torch.Tensor
