"""Strings of a batch: read from data, written into it, and found again by their hashes.

Conventions
    row   one element of a batch, of any number of axes, counted with the last axis fastest.
    hash  SipHash of the UTF-8 bytes, int64, shape (*batch,).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase, lazy_stack

from envkit.errors import MissingKeyError
from envkit_bridges.worlds.native.siphash import siphash, words_of


def strings_in(td: TensorDictBase, key: str) -> list[str] | None:
    """Read the strings of all rows; None where there is no such entry."""
    entry = td.get(key, None)
    if entry is None:
        return None
    if isinstance(entry, str):
        return [entry] * td.numel()
    if isinstance(entry, NonTensorData):
        return [str(entry.data)] * td.numel()
    flat: list[Any] = entry.tolist()
    for _ in range(td.batch_dims - 1):
        flat = [one for part in flat for one in part]
    return flat


def written(strings: Sequence[str], shape: torch.Size) -> Any:
    """Return strings as an entry of data of batch size ``shape``."""
    if not shape:
        return NonTensorData(strings[0])
    size = prod(shape[1:])
    parts = [written(strings[at * size : (at + 1) * size], shape[1:]) for at in range(shape[0])]
    return lazy_stack(parts)


class Repertoire:
    """Hashes of strings, and, where they are remembered, the strings they were made of.

    Args:
        remembers: keep every string, for `found`.
    """

    def __init__(self, remembers: bool):
        self.remembers = remembers
        self.strings: dict[int, str] = {}

    def hashed(self, strings: Sequence[str], shape: torch.Size) -> torch.Tensor:
        """Hash strings."""
        numbers = []
        for string in strings:
            words, tail = words_of(string.encode())
            numbers.append(siphash(torch.tensor(words, dtype=torch.int64), tail))
            if self.remembers:
                self.strings[int(numbers[-1])] = string
        return torch.stack(numbers).reshape(shape)

    def strings_of(self, hashes: torch.Tensor) -> list[str]:
        """Return the strings that hashes were made of.

        Raises:
            MissingKeyError: (a KeyError) one was not made here.
        """
        numbers = hashes.flatten().tolist()
        unknown = [number for number in numbers if number not in self.strings]
        if unknown:
            raise MissingKeyError(
                f"no string with the hash {unknown[0]} was hashed by this env, which knows {len(self.strings)}. "
                "Pass the string itself, or use the env that made the hash."
            )
        return [self.strings[number] for number in numbers]
