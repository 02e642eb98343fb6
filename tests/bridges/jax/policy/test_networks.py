"""A translated module gives the numbers of the torch module.

Tolerance: 1e-5, absolute and relative, in float32. XLA and torch sum in another order and approximate
`exp`, `tanh` and the like to within a few units in the last place.
"""

from __future__ import annotations

from itertools import pairwise

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from envkit_bridges.jax.policy.translated import in_jax
from envkit_bridges.policy.compiled import compile_policy
from envkit_bridges.policy.exporting import Signature
from tests.bridges.jax.policy.networks import NETWORKS, Calls

pytestmark = pytest.mark.rounding

TOLERANCE = 1e-5
CPU = torch.device("cpu")


def signature_of(inputs, writes=(("action",),)):
    reads = tuple(((f"in_{n}",), x.shape[1:], x.dtype) for n, x in enumerate(inputs))
    return Signature(reads, writes)


def translated(policy, inputs, key=0, writes=(("action",),)):
    """Translate for these inputs, run compiled, and give what is written by path."""
    found = policy.translation(signature_of(inputs, writes), inputs[0].shape[0], in_jax)
    entries = {(f"in_{n}",): x.numpy().astype(narrow(x)) for n, x in enumerate(inputs)}
    return jax.jit(found)(found.tensors(policy, CPU), entries, jax.random.PRNGKey(key))


def narrow(tensor):
    return np.int32 if tensor.dtype == torch.int64 else tensor.numpy().dtype


class Together(nn.Module):
    """Several networks side by side: exporting and compiling is what such tests cost."""

    def __init__(self, networks, counts):
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.counts = counts

    def forward(self, *inputs):
        inputs = iter(inputs)
        return tuple(
            network(*[next(inputs) for _ in range(count)])
            for network, count in zip(self.networks, self.counts, strict=True)
        )


def assert_agree(networks, inputs):
    """Compare networks, by name, with what torch gives for ``inputs``, one list each."""
    together = Together(networks.values(), [len(given) for given in inputs])
    flat = [value for given in inputs for value in given]
    paths = tuple((name,) for name in networks)
    with torch.no_grad():
        wanted = together(*flat)

    got = translated(compile_policy(together), flat, writes=paths)

    for path, want in zip(paths, wanted, strict=True):
        assert got[path].shape == want.shape, path
        assert got[path].dtype == want.numpy().dtype, path
        np.testing.assert_allclose(
            got[path], want.numpy(), rtol=TOLERANCE, atol=TOLERANCE, err_msg=str(path)
        )


GROUPS = [list(NETWORKS)[start : start + 4] for start in range(0, len(NETWORKS), 4)]


SLOWER = {"gru", "gru cell", "masked attention", "bilinear", "reductions"}  # take long to export


@pytest.mark.parametrize(
    "names",
    [pytest.param(g, marks=pytest.mark.slow) if SLOWER & set(g) else g for g in GROUPS],
    ids=", ".join,
)
def test_translated_networks_give_what_torch_gives(names):
    torch.manual_seed(0)
    networks = {name: NETWORKS[name].make().eval() for name in names}

    assert_agree(networks, [NETWORKS[name].example(5) for name in names])


@pytest.mark.slow
@settings(max_examples=3)
@given(
    rows=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=3),
    activation=st.sampled_from([nn.Tanh, nn.SiLU, nn.GELU, nn.ELU]),
    side=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 2),
    length=st.integers(1, 4),
    heads=st.integers(1, 3),
)
def test_networks_of_any_shape_agree(
    rows, sizes, activation, side, kernel, stride, padding, dilation, groups, length, heads
):
    linear = [nn.Sequential(nn.Linear(*pair), activation()) for pair in pairwise(sizes)]
    conv = nn.Conv2d(2 * groups, 2 * groups, kernel, stride, padding, dilation, groups)
    attention = nn.MultiheadAttention(heads * 2, heads, batch_first=True).eval()
    networks = {
        "perceptron": nn.Sequential(*linear),
        "convolution": conv,
        "attention": Calls(lambda x, net: net(x, x, x)[0], attention),
    }
    shapes = [(sizes[0],), (2 * groups, *side), (length, heads * 2)]

    assert_agree(networks, [[torch.randn(rows, *shape)] for shape in shapes])


@pytest.mark.slow
def test_one_translation_serves_all_numbers_of_rows_above_one():
    policy = compile_policy(NETWORKS["nature"].make())

    for rows in (2, 3, 8, 5, 1, 7):
        inputs = NETWORKS["nature"].example(rows)
        got = translated(policy, inputs)[("action",)]
        np.testing.assert_allclose(got, policy(*inputs).detach(), rtol=TOLERANCE, atol=TOLERANCE)

    assert policy.translations == 2  # one row is a case of its own


def test_a_module_that_must_know_the_number_of_rows_is_translated_for_each():
    policy = compile_policy(Calls(lambda x: x * (2.0 if x.shape[0] == 3 else 5.0)))

    for rows in (3, 4, 3):
        got = translated(policy, [torch.ones(rows, 2)])[("action",)]
        assert (np.asarray(got) == (2.0 if rows == 3 else 5.0)).all()

    assert policy.translations == 2


def test_a_value_that_is_used_twice_and_one_that_is_not_used_are_no_matter():
    module = Calls(lambda x, y, net: (net(x), net(x) * 2), nn.Linear(3, 2))
    inputs = [torch.randn(4, 3), torch.randn(4, 5)]

    got = translated(compile_policy(module), inputs, writes=(("one",), ("two",)))

    np.testing.assert_allclose(got["two",], 2 * np.asarray(got["one",]), rtol=1e-6)
