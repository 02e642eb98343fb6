"""How one seed becomes a chain of seeds, one for each environment of a batch.

Conventions
    seed  Python int in [0, 2**64 - 1], what generators of torch and keys of JAX can tell apart; in
          [0, 2**32 - 2] after the first of a chain.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from envkit.errors import ArgumentError
from envkit.process_wide import alone


def next_seed(seed: int | None) -> int:
    """Derive the seed that follows ``seed``: 0 gives 795726461, then 2841183792, 2309840538.

    The protocol is TorchRL's: eight bytes of ``numpy.random.default_rng(seed)``, read
    big-endian, modulo ``2**32 - 1``. None draws from the operating system.
    """
    drawn = np.random.default_rng(None if seed is None else checked_seed(seed)).bytes(8)
    return int.from_bytes(drawn, byteorder="big") % (2**32 - 1)


def seed_chain(seed: int | None, count: int, *, static: bool = False) -> tuple[list[int], int]:
    """Return ``count`` seeds that start with ``seed``, and the one that follows them.

    With ``static`` all of them, the follower included, are ``seed`` itself.
    """
    first = next_seed(None) if seed is None else checked_seed(seed)
    if static:
        return [first] * count, first
    seeds = [first]
    while len(seeds) <= count:
        seeds.append(next_seed(seeds[-1]))
    return seeds[:-1], seeds[-1]


def seeds_of_parts(
    seed: int | None, links: Sequence[int], *, static: bool = False
) -> tuple[list[int], int]:
    """Return a seed for each part of a batch, and the one that follows them.

    Args:
        seed: with which the chain begins.
        links: how many seeds of the chain each part takes for its own rows.
        static: see `seed_chain`.
    """
    seeds, following = seed_chain(seed, sum(links), static=static)
    return [
        seeds[end - taken] for taken, end in zip(links, accumulate(links), strict=True)
    ], following


def reset_keywords(keywords: Mapping[str, Any], first_rows: Iterable[int]) -> list[dict[str, Any]]:
    """Return the keywords with which each part of a batch is reset.

    With ``seed=s``, row i gets ``s + i``, as in Gymnasium's vector envs.

    Args:
        keywords: those of the reset of all.
        first_rows: where each part begins, as a number of rows.
    """
    if keywords.get("seed") is None:
        return [dict(keywords) for _ in first_rows]
    seed = checked_seed(keywords["seed"])
    return [{**keywords, "seed": seed + row} for row in first_rows]


def seed_of_reset(seed: Any) -> int | list[int | None] | None:
    """Return the seed of a reset as a Python int, None, or a list of these: vector envs take one for each row."""
    if isinstance(seed, list | tuple):
        return [None if one is None else checked_seed(one) for one in seed]
    return None if seed is None else checked_seed(seed)


def checked_seed(seed: Any) -> int:
    """Return a seed as a Python int.

    Raises:
        ArgumentError: it is no integer, negative, or too large.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if number < 0:
        raise ArgumentError(
            f"seed is {seed!r}, but must be an integer of 0 or more, or None. Pass seed=0, for example."
        )
    if number > _LARGEST:
        raise ArgumentError(
            f"seed is {seed!r}, but must be at most 2**64 - 1: generators cannot tell larger ones "
            f"apart. Pass a smaller one, e.g. {number % (_LARGEST + 1)}."
        )
    return number


_LARGEST = 2**64 - 1


def drawn_seed() -> int:
    """Draw a seed from torch's global generator, as what was not seeded begins with one."""
    with alone():  # a simulator of another thread may have set the generator for a while
        return int(torch.randint(2**63 - 1, (), device="cpu"))


def seed_of_32_bits(seed: int) -> int:
    """Return a seed for a library that takes those below ``2**32``: these as they are, of others the first word of their
    `numpy.random.SeedSequence`.
    """
    return seed if seed < 2**32 else int(np.random.SeedSequence(seed).generate_state(1)[0])


def restart_seed(seed: int, row: int, count: int) -> int:
    """Return the seed of row ``row`` of a batch seeded with ``seed`` after its ``count``-th restart.

    The first word of ``numpy.random.SeedSequence([seed, row, count])``.
    """
    return int(np.random.SeedSequence([seed, row, count]).generate_state(1)[0]) % (2**32 - 1)
