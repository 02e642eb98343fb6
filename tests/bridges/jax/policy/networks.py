"""Networks an actor may be made of, small; `NETWORKS` lists them with what they are called with.

Conventions
    inputs  shapes without the rows; a shape preceded by a number n holds integers below n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.half import TORCH_HALF

__all__ = ["NETWORKS", "Calls", "Network"]


@dataclass(frozen=True)
class Network:
    """How to make a module, and what it is called with."""

    make: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...]
    below: int | None = None  # inputs are integers from 0 to here

    def example(self, rows: int) -> list[torch.Tensor]:
        """Draw inputs for some rows."""
        generator = torch.Generator().manual_seed(rows)
        if self.below is not None:
            return [
                torch.randint(0, self.below, (rows, *s), generator=generator) for s in self.inputs
            ]
        return [torch.randn(rows, *shape, generator=generator) for shape in self.inputs]


class Calls(nn.Module):
    """A function of inputs and of modules that hold parameters."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module):
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, *self.parts)


def _seen(norm: nn.Module, *shape: int) -> nn.Module:
    """Let a batch norm see data, so that its statistics are not those it begins with."""
    for _ in range(3):
        norm(torch.randn(16, *shape) * 2 + 1)
    return norm


def _residual(x, one, two, norm):
    return x + two(F.relu(one(norm(x))))


def _dueling(x, trunk, value, advantage):
    hidden = trunk(x).relu()
    advantages = advantage(hidden)
    return value(hidden) + advantages - advantages.mean(-1, keepdim=True)


def _experts(x, gate, *experts):
    weights, chosen = gate(x).softmax(-1).topk(2, -1)
    every = torch.stack([expert(x) for expert in experts], 1)
    picked = every.gather(1, chosen.unsqueeze(-1).expand(-1, -1, every.shape[-1]))
    return (picked * (weights / weights.sum(-1, keepdim=True)).unsqueeze(-1)).sum(1)


def _attention(x, qkv, causal=True, mask=None):
    rows, length, _ = x.shape
    query, key, value = (
        part.reshape(rows, length, 2, -1).transpose(1, 2) for part in qkv(x).chunk(3, -1)
    )
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    return out.transpose(1, 2).flatten(2)


def _masked_attention(x, qkv):
    return _attention(
        x, qkv, causal=False, mask=torch.eye(3, dtype=torch.bool) | (torch.arange(3) < 2)
    )


def _shapes(x):
    return torch.cat(
        [
            x[:, 1:5:2],
            x[..., -3:].flip(-1),
            *x.chunk(2, -1),
            x.split([2, 6], -1)[1],
            torch.stack([x[:, 0], x[:, -1]], -1),
            x.view(-1, 2, 4).permute(0, 2, 1).flatten(1),
            x.unsqueeze(1).expand(-1, 2, -1).reshape(x.shape[0], -1),
            x.reshape(-1, 4, 2).transpose(1, 2)[:, 0].squeeze(1),
            x.roll(1, -1),
            F.pad(x, (1, 2)),
            x.unfold(-1, 3, 2).flatten(1),
            x[:, [0, 3, -1]],
            x.index_select(-1, torch.tensor([1, 1])),
            x.repeat(1, 2).diff(dim=-1),
        ],
        -1,
    )


def _scattered(x):
    order = x.argsort(-1)
    one = torch.zeros_like(x).scatter(-1, order[:, :1], 1.0)
    hot = F.one_hot(x.argmax(-1), x.shape[-1])
    filled = x.masked_fill(x < 0, 0.0)
    return torch.cat([one, hot.to(x.dtype), filled, x.gather(-1, order), x.sort(-1)[0]], -1)


def _arithmetic(x):
    small = x.clamp(-0.9, 0.9)
    size = x.abs() + 0.1
    return torch.stack(
        [
            x.exp().clamp_max(5) - x.clamp_min(0).expm1(),
            size.log() * size.sqrt() / size.rsqrt(),
            x**2 + x**3 - 2.0**small + size**0.3,
            torch.where(x > 0, x.sin(), x.cos()),
            torch.minimum(x, -x) + torch.maximum(x, small).square(),
            small.atanh() + small.asin() + torch.atan2(x, size),
            x.fmod(0.7) + x.remainder(0.7) + x.div(0.7, rounding_mode="floor"),
            x.erf() + x.sign() + x.floor() + x.round() + x.frac(),
            torch.addcmul(x, x, small, value=0.5).lerp(x, 0.25) + torch.hypot(x, size),
            torch.logaddexp(x, small) + size.lgamma() + x.nan_to_num(),
        ],
        -1,
    )


def _reductions(x):
    return torch.stack(
        [
            x.mean(-1),
            x.sum(-1) + x.sum(),
            x.amax(-1) - x.min(-1)[0],
            x.std(-1) + x.var(-1, unbiased=False),
            x.norm(dim=-1) + F.normalize(x, dim=-1).sum(-1),
            x.logsumexp(-1) + x.prod(-1),
            (x > 0).any(-1).float() + (x > -9).all(-1).float(),
            x.argmax(-1).float() + x.cumsum(-1)[:, 2],
            x.median(-1)[0],
        ],
        -1,
    )


def _numbers_built(x):
    index = torch.arange(8)
    grid = torch.linspace(0, 1, 8) + torch.full((8,), 2.0) + torch.tensor(3.0)
    new = x.new_zeros(x.shape[0], 8) + torch.ones_like(x) + torch.zeros(8)
    return x * grid + new + index / 8 + torch.eye(8)[3] + x.new_tensor([1.0] * 8)


def _casts(x):
    return (
        x.to(TORCH_HALF).float()
        + x.bfloat16().relu()
        + (x * 3).int().float()
        + (x * 3).long() / 2
        + x.bool()
        + x.double().to(torch.float32)
    )


def _compared(x):
    flags = (x > 0) & (x < 1) | ~(x <= -1) ^ (x != 0)
    return torch.logical_and(flags, x >= -2).to(x.dtype) + (x == 0).float() * torch.isnan(x)


_ACTIVATIONS = (
    *(nn.ReLU(), nn.ReLU6(), nn.ELU(), nn.SELU(), nn.CELU(0.5), nn.GELU(), nn.GELU("tanh")),
    *(nn.SiLU(), nn.Mish(), nn.Tanh(), nn.Sigmoid(), nn.LogSigmoid(), nn.Softplus(2.0)),
    *(nn.LeakyReLU(0.2), nn.PReLU(), nn.Hardtanh(-0.5, 0.7), nn.Hardswish(), nn.Hardsigmoid()),
    *(nn.Softsign(), nn.Tanhshrink(), nn.Softshrink(), nn.Hardshrink(), nn.Threshold(0.1, 2.0)),
    *(nn.Softmax(-1), nn.LogSoftmax(-1), nn.Softmin(-1), nn.GLU()),
)

NETWORKS: dict[str, Network] = {
    "mlp": Network(
        lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3), nn.Tanh()), ((5,),)
    ),
    "every activation": Network(
        lambda: Calls(lambda x, *parts: torch.cat([part(x) for part in parts], -1), *_ACTIVATIONS),
        ((8,),),
    ),
    "layer norm, dropout": Network(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ELU(), nn.Dropout(0.5)), ((5,),)
    ),
    "batch norm": Network(
        lambda: nn.Sequential(_seen(nn.BatchNorm1d(5), 5), nn.Linear(5, 4), nn.BatchNorm1d(4)),
        ((5,),),
    ),
    "rms norm": Network(lambda: nn.Sequential(nn.RMSNorm(6), nn.Linear(6, 2, bias=False)), ((6,),)),
    "residual": Network(
        lambda: Calls(_residual, nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)), ((8,),)
    ),
    "dueling": Network(
        lambda: Calls(_dueling, nn.Linear(5, 8), nn.Linear(8, 1), nn.Linear(8, 4)), ((5,),)
    ),
    "two inputs": Network(
        lambda: Calls(lambda x, y, net: net(torch.cat([x, y], -1)), nn.Linear(7, 3)), ((4,), (3,))
    ),
    "bilinear": Network(
        lambda: Calls(lambda x, y, net: net(x, y), nn.Bilinear(4, 3, 2)), ((4,), (3,))
    ),
    "experts": Network(
        lambda: Calls(_experts, nn.Linear(5, 3), *(nn.Linear(5, 2) for _ in range(3))), ((5,),)
    ),
    "weight norm, spectral norm": Network(
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
        ),
        ((5,),),
    ),
    "nature": Network(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 4, 2), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(96, 3)),
        ),
        ((2, 10, 10),),
    ),
    "conv, group norm, pools": Network(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 4, 3, dilation=2), nn.GroupNorm(2, 4), nn.MaxPool2d(2)),
            *(_seen(nn.BatchNorm2d(4), 4, 3, 3), nn.InstanceNorm2d(4), nn.AvgPool2d(2, 1)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        ),
        ((3, 10, 11),),
    ),
    "conv transposed": Network(
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2), ((4, 3, 4),)
    ),
    "conv 1d": Network(
        lambda: nn.Sequential(
            *(nn.Conv1d(3, 4, 3, padding="same"), nn.SiLU()),
            *(nn.Conv1d(4, 2, 2, stride=2, padding=1, padding_mode="circular"), nn.MaxPool1d(2)),
        ),
        ((3, 8),),
    ),
    "embedding": Network(
        lambda: nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 2)),
        ((3,),),
        below=10,
    ),
    "gru cell": Network(
        lambda: Calls(lambda x, h, cell: cell(x, h), nn.GRUCell(4, 5)), ((4,), (5,))
    ),
    "lstm cell": Network(
        lambda: Calls(lambda x, h, c, cell: torch.cat(cell(x, (h, c)), -1), nn.LSTMCell(4, 5)),
        ((4,), (5,), (5,)),
    ),
    "rnn cell": Network(
        lambda: Calls(lambda x, h, cell: cell(x, h), nn.RNNCell(4, 5)), ((4,), (5,))
    ),
    "lstm": Network(
        lambda: Calls(lambda x, net: net(x)[0][:, -1], nn.LSTM(4, 3, 2, batch_first=True)),
        ((3, 4),),
    ),
    "gru": Network(
        lambda: Calls(
            lambda x, net: net(x)[0].mean(1), nn.GRU(4, 3, batch_first=True, bidirectional=True)
        ),
        ((2, 4),),
    ),
    "attention": Network(
        lambda: Calls(
            lambda x, net: net(x, x, x)[0], nn.MultiheadAttention(4, 2, batch_first=True)
        ),
        ((3, 4),),
    ),
    "transformer": Network(
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True), ((3, 4),)
    ),
    "causal attention": Network(lambda: Calls(_attention, nn.Linear(4, 12)), ((3, 4),)),
    "masked attention": Network(lambda: Calls(_masked_attention, nn.Linear(4, 12)), ((3, 4),)),
    "shapes": Network(lambda: Calls(_shapes), ((8,),)),
    "scatters": Network(lambda: Calls(_scattered), ((8,),)),
    "arithmetic": Network(lambda: Calls(_arithmetic), ((8,),)),
    "reductions": Network(lambda: Calls(_reductions), ((8,),)),
    "made of numbers": Network(lambda: Calls(_numbers_built), ((8,),)),
    "casts": Network(lambda: Calls(_casts), ((8,),)),
    "comparisons": Network(lambda: Calls(_compared), ((8,),)),
}
