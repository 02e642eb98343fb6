"""A graph that is written as a function of NumPy arrays: what it reads, and what it computes ahead."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from envkit_bridges.policy.exporting import Graph
from envkit_bridges.policy.numpy_policy import NUMPY, straightened, table_for

# What torch 2.13 says of its own export.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


class Linear(torch.nn.Module):
    """One layer; it looks at the size of its second input, and not at the numbers."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x, other):
        return self.layer(x) / other.shape[1]


class Held(torch.nn.Module):
    """Holds a policy as exported programs do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return (self.module(*args),)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return Linear()


def written(module):
    x, other = torch.randn(4, 3), torch.randn(4, 5)
    exported = torch.export.export(Held(module), (x, other)).run_decompositions()
    graph = Graph(exported, ["x", "other"], table_for(exported.graph.nodes), NUMPY)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: named[own].detach().numpy() for name, own in graph.tensors.items()}
    return straightened(graph, tensors, [x.numpy(), other.numpy()]), x, other


def test_a_written_graph_gives_what_the_module_gives(layer):
    program, x, other = written(layer)

    (got,) = program.evaluate(x.numpy())

    np.testing.assert_allclose(got, layer(x, other).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert program.outputs == (((4, 2), np.dtype("float32")),)


def test_inputs_whose_numbers_do_not_matter_are_not_read(layer):
    program, _, _ = written(layer)

    assert program.reads == (0,)


def test_what_is_written_into_a_parameter_is_seen(layer):
    program, x, other = written(layer)

    with torch.no_grad():
        layer.layer.weight.mul_(2.0)
    (got,) = program.evaluate(x.numpy())

    np.testing.assert_allclose(got, layer(x, other).detach().numpy(), rtol=1e-5, atol=1e-6)
