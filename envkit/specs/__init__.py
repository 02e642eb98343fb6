"""Specs: what a tensor, or a tree of tensors, may look like, and how to make, test and convert it.

This package knows torch and TensorDict only.
"""

import torch

from envkit.specs.composite import Composite
from envkit.specs.consolidation import (
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
    draws_in_order,
    exclusive_paths,
    make_composite_from_td,
)
from envkit.specs.in_torchrl import offer_to_torchrl
from envkit.specs.leaves.boxes import (
    Binary,
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)
from envkit.specs.leaves.choices import Categorical, MultiCategorical, MultiOneHot, OneHot
from envkit.specs.leaves.leaf import BinaryBox, BoxList, CategoricalBox, ContinuousBox, DiscreteBox
from envkit.specs.leaves.objects import NonTensor
from envkit.specs.leaves.unions import Choice
from envkit.specs.stacks import Stacked, StackedComposite, stack
from envkit.specs.tensor_spec import TensorSpec, index_select, on_torch_function

on_torch_function(torch.stack, stack)
on_torch_function(torch.index_select, index_select)
on_torch_function(torch.squeeze, TensorSpec.squeeze)
on_torch_function(torch.unsqueeze, TensorSpec.unsqueeze)
offer_to_torchrl(
    *(TensorSpec, Composite, Stacked, StackedComposite, NonTensor, Choice, Binary),
    *(Bounded, BoundedContinuous, Unbounded, UnboundedContinuous, UnboundedDiscrete),
    *(Categorical, OneHot, MultiCategorical, MultiOneHot),
)

__all__ = [
    "Binary",
    "BinaryBox",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "BoxList",
    "Categorical",
    "CategoricalBox",
    "Choice",
    "Composite",
    "ContinuousBox",
    "DiscreteBox",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "check_no_exclusive_keys",
    "consolidate_spec",
    "contains_lazy_spec",
    "draws_in_order",
    "exclusive_paths",
    "make_composite_from_td",
]
