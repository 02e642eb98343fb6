"""SipHash beside the test vectors of its authors, and on both array libraries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from envkit_bridges.worlds.native.siphash import siphash, words_of

VECTORS = {  # of the reference implementation, for the bytes 0, 1, 2, ...
    0: 0x726FDB47DD0E0E31,
    7: 0xAB0200F58B01D137,
    8: 0x93F5F5799A932462,
    15: 0xA129CA6149BE45E5,
}


@pytest.mark.parametrize("length", VECTORS)
def test_messages_of_bytes_have_the_hashes_of_the_paper(length):
    words, tail = words_of(bytes(range(length)))

    found = siphash(torch.tensor([words], dtype=torch.int64), tail)

    assert int(found[0]) % 2**64 == VECTORS[length]


def test_rows_are_hashed_each_by_itself_on_both_libraries():
    rows = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (3, 2, 5), dtype=np.int64)

    in_numpy, in_torch = siphash(rows), siphash(torch.from_numpy(rows))

    assert in_numpy.shape == (3, 2) and np.array_equal(in_numpy, in_torch)
    assert siphash(rows[1:2, 0])[0] == in_numpy[1, 0]
    assert len(set(in_numpy.flatten().tolist())) == 6
