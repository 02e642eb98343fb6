"""Torch's generators of this process, from which policies draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["generator_states", "set_generators"]


def generator_states() -> dict[str, Any]:
    """Give the states of torch's generators, of the CPU and of each CUDA device that was used."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if used else [],
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Set torch's generators to what `generator_states` gave; devices that are not there are left out."""
    torch.set_rng_state(states["cpu"].cpu())
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])
