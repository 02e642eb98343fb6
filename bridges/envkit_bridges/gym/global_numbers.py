"""States of the random generators of a process that simulators in torch draw from.

An env reads and sets them around each call of a simulator that draws from them, so that each env has separate random numbers.
It does so within `process_wide.alone`, since they belong to the whole process: simulators of several threads wait for each
other. A thread that draws from them otherwise, e.g. by ``torch.rand``, does not wait.

Conventions
    numbers  states of torch's generator of the CPU, NumPy's and Python's, and of torch's of a device, None for the CPU.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from envkit.process_wide import alone

Numbers = list[Any]


def numbers_now(device: torch.device) -> Numbers:
    """Read the states of the generators."""
    with alone():
        state = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
        return [*state, device_numbers(device)]


def set_numbers(numbers: Numbers, device: torch.device) -> None:
    """Set the states of the generators."""
    torch.random.set_rng_state(numbers[0])
    np.random.set_state(numbers[1])
    random.setstate(numbers[2])
    set_device_numbers(device, numbers[3])


def device_numbers(device: torch.device) -> torch.Tensor | None:
    """Read the state of the generator of a device."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).get_rng_state(device)


def set_device_numbers(device: torch.device, numbers: torch.Tensor | None) -> None:
    """Set the state of the generator of a device."""
    if numbers is not None:
        torch.get_device_module(device).set_rng_state(numbers, device)
