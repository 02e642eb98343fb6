"""Stretches of recorded sequences: a random part of each, or what follows a burn-in.

For replay buffers and modules; an env has no recorded time.

Conventions
    data   TensorDict of batch size (*batch, T); time is the last batch axis unless another is named.
    start  first step of a stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from envkit.data.arguments import as_int
from envkit.data.paths import Key, as_key, as_path
from envkit.errors import ArgumentError, MissingKeyError, PlacementError
from envkit.specs import Composite
from envkit.transforms.core.base import Keys, Transform, as_keys

__all__ = ["BurnInTransform", "RandomCropTensorDict", "RecordedTransform"]


class RecordedTransform(Transform):
    """Base of transforms of recorded sequences, which no env takes."""

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        raise self._misplaced()

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        raise self._misplaced()

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        raise self._misplaced()

    def _misplaced(self) -> PlacementError:
        return PlacementError(
            f"{type(self).__name__} works on recorded sequences, and an env gives single steps. Call it on "
            "data, or give it to a replay buffer."
        )


class RandomCropTensorDict(RecordedTransform):
    """Take a random stretch of each recorded sequence.

    Args:
        sub_seq_len: length of the stretch. All starts that leave room for it are equally likely.
        sample_dim: batch axis that is time.
        mask_key: entry that is set where a step is no padding, which follows the steps; stretches of them
            alone are taken. Ignored where data has no such entry.

    Raises:
        ArgumentError: (a ValueError) ``sub_seq_len`` is below 0.
        PlacementError: (a RuntimeError, from forward) a sequence is shorter than the stretch, or data has
            no batch axis.
    """

    def __init__(self, sub_seq_len: int, sample_dim: int = -1, mask_key: Key | None = None):
        super().__init__()
        meaning = "the steps of a stretch"
        self.sub_seq_len = as_int("sub_seq_len", sub_seq_len, least=0, meaning=meaning)
        self.sample_dim = as_int("sample_dim", sample_dim, least=None, meaning="an axis")
        self.mask_key = mask_key

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Give stretches, batch size ``(*batch, sub_seq_len)``; the input is not written to."""
        shape, axis = tensordict.shape, self.sample_dim
        if not shape:
            raise PlacementError(
                "RandomCropTensorDict takes a stretch of each sequence, but the data has no batch axis. "
                "Give it data of batch size (*batch, T)."
            )
        lengths = torch.full((*shape[:axis], 1, *shape[axis:][1:]), shape[axis])
        mask = None if self.mask_key is None else tensordict.get(self.mask_key, None)
        if mask is not None:
            lengths = mask.reshape(shape).sum(axis, keepdim=True).cpu()
        room = lengths - self.sub_seq_len + 1
        if int(room.min()) < 1:
            raise PlacementError(
                f"sub_seq_len is {self.sub_seq_len}, but the shortest sequence along axis {axis} of data "
                f"of batch size {tuple(shape)} has {int(lengths.min())} steps. Pass a smaller one, or longer "
                "sequences."
            )
        starts = (torch.rand(room.shape, dtype=torch.float64) * room).long()
        steps = torch.arange(self.sub_seq_len)
        steps = steps.reshape(-1, *(1,) * (len(shape) - axis % len(shape) - 1))
        return tensordict.gather(axis, (starts + steps).to(tensordict.device))

    def extra_repr(self) -> str:
        return f"sub_seq_len={self.sub_seq_len}, sample_dim={self.sample_dim}"


class BurnInTransform(RecordedTransform):
    """Run modules over the first steps of recorded sequences, and begin the rest with what they remember.

    For recurrent policies whose recorded hidden states are out of date. No gradient is kept.

    Args:
        modules: modules that take sequences, most often one with a hidden state.
        burn_in: number of steps that are run and left out.
        out_keys: the hidden states; those the modules write below ``next`` by default.

    Raises:
        ArgumentError: (a ValueError) ``burn_in`` is negative, or leaves no step of the data; or a module
            reads and writes no TensorDicts.
        MissingKeyError: (from forward) the data or the modules give no such hidden state.
    """

    def __init__(
        self,
        modules: Sequence[TensorDictModuleBase] | TensorDictModuleBase,
        burn_in: int,
        out_keys: Keys = None,
    ):
        modules = [modules] if isinstance(modules, TensorDictModuleBase) else list(modules)
        for module in modules:
            if not isinstance(module, TensorDictModuleBase):
                raise ArgumentError(
                    f"BurnInTransform was given a {type(module).__name__}, which reads and writes no "
                    "TensorDicts. Wrap it: TensorDictModule(module, in_keys=[...], out_keys=[...])."
                )
        burn_in = as_int("burn_in", burn_in, least=0, meaning="a number of steps")
        written = {as_path(key) for module in modules for key in module.out_keys}
        hidden = sorted(as_key(path[1:]) for path in written if path[0] == "next" and path[1:])
        read = sorted(
            {as_key(as_path(key)) for module in modules for key in module.in_keys}, key=str
        )
        super().__init__(read, hidden if out_keys is None else as_keys(out_keys))
        self.modules_to_run = tuple(modules)  # no submodules: they belong to the policy
        self.burn_in = burn_in

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Give the rest, batch size ``(*batch, T - burn_in)``; the input is not written to."""
        if not self.burn_in:
            return tensordict
        time = tensordict.batch_dims - 1
        if time < 0 or tensordict.shape[time] <= self.burn_in:
            raise ArgumentError(
                f"burn_in is {self.burn_in}, but the data has batch size {tuple(tensordict.shape)}: no step is "
                "left. Record longer sequences."
            )
        steps = slice(None, self.burn_in), slice(self.burn_in, None)
        early, rest = (cast(TensorDictBase, tensordict[..., part]).copy() for part in steps)
        with torch.no_grad():
            for module in self.modules_to_run:
                early = module(early)
        for key in self.out_keys:
            last, begun = early.get(("next", *as_path(key)), None), rest.get(key, None)
            if last is None or begun is None:
                raise MissingKeyError(
                    f"BurnInTransform begins {key!r} with what the modules remember, but "
                    f"{'the data' if begun is None else 'they'} gave no such entry: data has "
                    f"{sorted(map(str, early.keys(True, True)))}. Pass out_keys=."
                )
            begun = begun.clone()
            begun.select(time, 0).copy_(last.select(time, -1))
            rest.set(key, begun)
        return rest

    def extra_repr(self) -> str:
        return f"burn_in={self.burn_in}, in_keys={self.in_keys}, out_keys={self.out_keys}"
