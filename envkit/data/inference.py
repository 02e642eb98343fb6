"""Tensors that outlive the call that makes them, made in a way that leaves them usable.

Tensors made under ``torch.inference_mode()`` can never be written to in place, nor be saved for a
backward pass, outside of it. An env's first use may well be inside, and its next one outside: so
whatever an env or a transform keeps (rows in memory, running statistics) is made in `lasting`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

__all__ = ["lasting"]


@contextmanager
def lasting() -> Generator[None]:
    """Leave inference mode for a while, still without gradients; a context or a decorator."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
