"""Each operator of the table for all libraries gives in NumPy what torch gives, in torch's dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from envkit_bridges.policy.core_aten import RULES, bound
from envkit_bridges.policy.numpy_policy import NUMPY
from tests.bridges.jax.policy.test_ops import BAD_INDEX, CASES, X, wanted_of

TABLE = bound(RULES, NUMPY)
pytestmark = pytest.mark.rounding


def full(name):
    return name if "." in name else f"{name}.default"


def in_numpy(name, args, kwargs):
    arrays = torch.utils._pytree.tree_map(
        lambda leaf: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
    )
    with np.errstate(all="ignore"):
        return TABLE[full(name)].apply(*arrays, wanted_of(name, args, kwargs))


SHARED = [case for case in CASES if full(case[0]) in TABLE]


@pytest.mark.parametrize("case", range(len(SHARED)), ids=[name for name, *_ in SHARED])
def test_an_operator_gives_in_numpy_what_torch_gives(case):
    name, args, kwargs = SHARED[case]
    wanted = wanted_of(name, args, kwargs)

    got = in_numpy(name, args, kwargs)

    compare(got, wanted)


def compare(got, wanted):
    if isinstance(wanted, list | tuple):
        for one, other in zip(got, wanted, strict=False):  # batch norm gives no statistics
            compare(one, other)
        return
    if isinstance(wanted, int):
        assert got == wanted
        return
    tolerance = 1e-3 if wanted.dtype == torch.float16 else 1e-5
    assert got.dtype == wanted.numpy().dtype
    assert got.shape == tuple(wanted.shape)
    np.testing.assert_allclose(got, wanted.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("place", [-1, 4])
@pytest.mark.parametrize("name", [name for name in BAD_INDEX if full(name) in TABLE])
def test_an_index_out_of_range_raises_in_numpy_as_in_torch(name, place):
    args = BAD_INDEX[name](X, torch.tensor([[0, place]]))

    with pytest.raises(IndexError):
        TABLE[full(name)].compute(*(a.numpy() if torch.is_tensor(a) else a for a in args))
