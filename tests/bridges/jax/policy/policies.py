"""Policies of the tests, for the `Walker` and its fellows of `tests.zoo.walkers`."""

from __future__ import annotations

import jax
import torch
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

FAR = 2.0  # a gain that leads the walker out of its disc now and then


def steering(seed: int = 0) -> TensorDictModule:
    """Give a deterministic policy that reads one of several observations."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        net[2].weight.mul_(FAR)
    return TensorDictModule(net, in_keys=["place"], out_keys=["action"])


def drawing(
    distribution=torch.distributions.Normal, **options
) -> ProbabilisticTensorDictSequential:
    """Give a policy that draws, and says from what and how probable it was."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), NormalParamExtractor())
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["place"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=distribution,
            return_log_prob=True,
            default_interaction_type=InteractionType.RANDOM,
            **options,
        ),
    )


def choosing(distribution) -> ProbabilisticTensorDictSequential:
    """Give a policy over three choices that are shown as "observation"."""
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(3, 3), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=distribution,
            default_interaction_type=InteractionType.RANDOM,
        ),
    )


class Remembering(nn.Module):
    """A recurrent core that forgets where an episode begins."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, place, hidden, is_init):
        hidden = self.cell(place, torch.where(is_init, 0.0, hidden))
        return self.head(hidden), hidden


def remembering() -> TensorDictModule:
    """Give a recurrent policy: it reads ``hidden`` at the root and writes it into ``next``."""
    torch.manual_seed(0)
    return TensorDictModule(
        Remembering(),
        in_keys=["place", "hidden", "is_init"],
        out_keys=["action", ("next", "hidden")],
    )


class Counting(nn.Module):
    """Remembers how often it has acted, and walks the farther the more that is; it never forgets."""

    def forward(self, place, memory):
        memory = memory + torch.tensor([1.0, 0.5])
        return 0.2 * place.sign() * memory, memory


def counting(out_key=("next", "memory")) -> TensorDictModule:
    """Give a policy whose memory begins anew only if somebody else sees to it."""
    return TensorDictModule(Counting(), in_keys=["place", "memory"], out_keys=["action", out_key])


def uniform_noise(params, observation, key):
    """A policy in JAX for the walker: go towards a point, with noise."""
    place = observation["place"]
    return params["gain"] * (1.0 - place) + jax.random.uniform(key, place.shape)
