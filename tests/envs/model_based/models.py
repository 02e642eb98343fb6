"""Small world models, exact and learnt, that tests share."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from envkit import Composite, ModelBasedEnvBase, Unbounded


class Linear(nn.Module):
    """The next hidden state and its reward, linear in the state and the action."""

    def __init__(self):
        super().__init__()
        self.move, self.pay = nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, hidden, action):
        hidden = self.move(torch.cat([hidden, action], -1))
        return hidden, self.pay(hidden)


def linear():
    torch.manual_seed(0)
    return TensorDictModule(Linear(), ["hidden", "action"], ["hidden", "reward"])


class Hidden(ModelBasedEnvBase):
    """An env around `linear`."""

    def __init__(self, world_model, **options):
        super().__init__(world_model, **options)
        self.observation_spec_unbatched = Composite(hidden=Unbounded((4,)))
        self.state_spec_unbatched = Composite(hidden=Unbounded((4,)))
        self.action_spec_unbatched = Unbounded((1,))
        self.reward_spec_unbatched = Unbounded((1,))

    def _reset(self, td):
        shape = self.batch_size if td is None else td.batch_size
        hidden = torch.randn(*shape, 4, generator=self._action_generator)
        return TensorDict({"hidden": hidden}, shape, device=self.device)


def latent():
    """Give a world model of Dreamer's entries, and a decoder of them."""
    model = TensorDictSequential(
        TensorDictModule(
            lambda state, belief, action: (state + action.sum(-1, keepdim=True), belief * 0.5),
            ["state", "belief", "action"],
            ["state", "belief"],
        ),
        TensorDictModule(lambda state: state.sum(-1, keepdim=True), ["state"], ["reward"]),
    )
    decoder = TensorDictModule(
        lambda state, belief: torch.cat([state, belief], -1), ["state", "belief"], ["reco_pixels"]
    )
    return model, decoder


class Moments(nn.Module):
    """The mean moves by 1, the covariance grows by the unit matrix."""

    def forward(self, action, observation):
        mean, var = observation["mean"], observation["var"]
        return mean + 1, var + torch.eye(mean.shape[-1]).expand(var.shape)


def moments(*under):
    under = under or ("next", "observation")
    keys = [(*under, "mean"), (*under, "var")]
    return TensorDictModule(Moments(), ["action", "observation"], keys)
