"""What programs of several files share: an actor, a step of learning, whether anything was learnt, and a mark."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

from envkit import TensorSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.modules import ProbabilisticActor, TanhNormal

__all__ = ["descend", "learned", "sweep", "tanh_actor"]


def sweep(test: Any) -> Any:
    """Mark a program that only ``make slow`` runs."""
    return pytest.mark.slow(pytest.mark.sweep(test))


def tanh_actor(net: nn.Module, spec: TensorSpec, **options: Any) -> ProbabilisticActor:
    """Return an actor that draws within the bounds of a spec.

    Args:
        net: from observations to ``loc`` and ``scale``.
        spec: of the action.
        options: of `ProbabilisticActor`.
    """
    bounds: Any = spec.space
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        spec=spec,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": bounds.low, "high": bounds.high},
        **options,
    )


def descend(optimiser: Any, losses: TensorDictBase, *names: str) -> float:
    """Compute the sum of losses of these names, step down its gradient, and return it."""
    total = sum(losses[name] for name in names)
    optimiser.zero_grad()
    total.backward()
    optimiser.step()
    return total.item()


def learned(values: list[float], by: float = 0.9) -> bool:
    """Check whether losses are finite and came down."""
    told = np.array(values)
    return bool(np.isfinite(told).all() and told[-5:].mean() < by * told[:5].mean())
