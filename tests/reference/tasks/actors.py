"""Actors that the programs of several files build alike."""

from __future__ import annotations

import warnings
from typing import Any

from tensordict.nn import TensorDictModule
from torch import nn

from envkit import TensorSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.modules import ProbabilisticActor, TanhNormal

__all__ = ["tanh_actor"]


def tanh_actor(net: nn.Module, spec: TensorSpec, **options: Any) -> ProbabilisticActor:
    """Give an actor that draws within the bounds of a spec.

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
