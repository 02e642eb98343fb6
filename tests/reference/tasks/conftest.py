"""Programs for TorchRL draw the same numbers each time they are run."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
