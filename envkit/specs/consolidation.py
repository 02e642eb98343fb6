"""Whole specs: read off data, asked whether their stacks agree, and made to agree.

This module decides how undeclared data is described, and what stands in for an entry
that a member of a stack lacks. It knows no env.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorDataBase,
    NonTensorStack,
    TensorDictBase,
    is_tensor_collection,
    is_tensorclass,
)
from torch import Tensor

from envkit.errors import SpecTypeError
from envkit.specs.composite import Composite
from envkit.specs.leaves.boxes import Binary, Bounded, Unbounded
from envkit.specs.leaves.choices import Categorical, MultiCategorical, MultiOneHot, OneHot
from envkit.specs.leaves.objects import NonTensor
from envkit.specs.shapes import Index, expand_op
from envkit.specs.stacks import Stack, Stacked, StackedComposite, stack
from envkit.specs.tensor_spec import TensorSpec
from envkit.specs.trees import as_path

S = TypeVar("S", bound=TensorSpec)

_DRAWN_IN_ORDER = (Binary, Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot)


def draws_in_order(spec: TensorSpec) -> bool:
    """Check whether ``rand((n,))`` gives the very numbers that ``rand()`` gives in n calls.

    Not so for normal values, which torch draws in blocks, nor for several leaves, whose draws take
    turns.
    """
    return isinstance(spec, _DRAWN_IN_ORDER) and not getattr(spec, "has_tails", False)


def make_composite_from_td(
    data: TensorDictBase, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False
) -> Composite:
    """Describe a TensorDict by its shapes, dtypes and devices, without bounds.

    Args:
        data: a TensorDict or tensorclass; a lazy stack gives a stack of specs.
        unsqueeze_null_shapes: give tensors of shape ``()`` specs of shape ``(1,)``.
        dynamic_shape: mark the first axis after the batch axes as of unknown size (-1).

    Returns:
        A `Composite` of the batch size and device of ``data``; it makes data of a tensorclass again.

    Raises:
        SpecTypeError: ``data`` is no TensorDict.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import make_composite_from_td
        >>> count = torch.zeros(5, 1, dtype=torch.int64)
        >>> td = TensorDict(place=torch.zeros(5, 3), count=count, batch_size=[5])
        >>> spec = make_composite_from_td(td)
        >>> spec.shape, spec["place"].shape, spec["count"].dtype
        (torch.Size([5]), torch.Size([5, 3]), torch.int64)
    """
    if not is_tensor_collection(data):
        raise SpecTypeError(
            f"got {data!r} of type {type(data).__name__}, which is no TensorDict. Pass one: "
            "TensorDict(entries, batch_size=[...])."
        )
    options = {"unsqueeze_null_shapes": unsqueeze_null_shapes, "dynamic_shape": dynamic_shape}
    if isinstance(data, LazyStackedTensorDict):
        members = [make_composite_from_td(part, **options) for part in data.unbind(data.stack_dim)]
        return stack(members, data.stack_dim)
    specs = Composite(shape=data.batch_size, device=data.device)
    specs.data_cls = type(data) if is_tensorclass(data) else None
    for name in data.keys():
        specs.set(name, _describe(data, data.get(name), options))
    return specs


def _describe(td: TensorDictBase, value: Any, options: dict[str, bool]) -> TensorSpec:
    tree: Any = value if is_tensor_collection(value) else None
    if tree is None and not isinstance(value, Tensor):  # which td.get unwraps
        return NonTensor(td.batch_size, device=td.device, example_data=value)
    if isinstance(value, (NonTensorDataBase, NonTensorStack)):
        batched = isinstance(value, NonTensorStack)
        example = value[(0,) * value.ndim].data if batched else value.data
        return NonTensor(value.batch_size, device=td.device, example_data=example, batched=batched)
    if tree is not None:
        return make_composite_from_td(tree, **options)
    shape = tuple(value.shape)
    if not shape and options["unsqueeze_null_shapes"]:
        shape = (1,)
    if options["dynamic_shape"] and len(shape) > td.ndim:
        shape = (*shape[: td.ndim], -1, *shape[td.ndim + 1 :])
    return Unbounded(torch.Size(shape), device=value.device, dtype=value.dtype)


def check_no_exclusive_keys(spec: TensorSpec, recurse: bool = True) -> bool:
    """Check whether in every stack within a spec all members have the same keys.

    Args:
        spec: any spec.
        recurse: look into nested composites too.

    Example:
        >>> import torch
        >>> from envkit import Composite, Unbounded, check_no_exclusive_keys
        >>> walker, ball = Composite(legs=Unbounded((4,))), Composite()
        >>> check_no_exclusive_keys(torch.stack([walker, ball]))
        False
        >>> check_no_exclusive_keys(torch.stack([walker, walker]))
        True
    """
    if isinstance(spec, StackedComposite):
        first, *others = (set(member.keys()) for member in spec.members)
        if any(first != other for other in others):
            return False
        return not recurse or (
            all(check_no_exclusive_keys(member) for member in spec.members)
            and all(check_no_exclusive_keys(spec[name]) for name in first if spec._is_tree(name))
        )
    if isinstance(spec, Composite) and recurse:
        return all(check_no_exclusive_keys(s) for s in spec.values() if s is not None)
    return True


def exclusive_paths(spec: TensorSpec) -> set[tuple[str, ...]]:
    """List the leaves that only some members of a stack within a spec have."""
    if isinstance(spec, StackedComposite):
        members = [set(map(as_path, member.keys(True, True))) for member in spec.members]
        below = set().union(*map(exclusive_paths, spec.members))
        return below | (set().union(*members) - set.intersection(*members))
    if isinstance(spec, Composite):
        nodes = ((name, below) for name, below in spec.items() if isinstance(below, Composite))
        return {(name, *path) for name, below in nodes for path in exclusive_paths(below)}
    return set()


def contains_lazy_spec(spec: TensorSpec) -> bool:
    """Check whether a spec is or holds a stack of unlike specs.

    Args:
        spec: any spec.

    Example:
        >>> import torch
        >>> from envkit import Composite, Unbounded, contains_lazy_spec
        >>> contains_lazy_spec(Composite(x=Unbounded((3,))))
        False
        >>> stack = torch.stack([Unbounded((3,)), Unbounded((4,))])
        >>> contains_lazy_spec(Composite(x=stack))
        True
    """
    if isinstance(spec, (Stacked, StackedComposite)):
        return True
    if isinstance(spec, Composite):
        return any(contains_lazy_spec(s) for s in spec.values() if s is not None)
    return False


def consolidate_spec(
    spec: S, recurse_through_entries: bool = True, recurse_through_stack: bool = True
) -> S:
    """Convert the unlike members of all stacks in a spec to one set of keys.

    A member that lacks an entry gets a placeholder: the spec that others have for it, each of its
    feature axes cut to size 0, or kept at -1 where it is dynamic. Where the others' specs differ, an
    axis on which they agree keeps its size. An entry without a feature axis is repeated as it is.

    Args:
        spec: any spec; it is not changed.
        recurse_through_entries: do so for stacks that are entries of composites too.
        recurse_through_stack: do so for stacks that are members of stacks too.

    Returns:
        A new spec. Leaves and composites without stacks come back as copies.

    Example:
        >>> import torch
        >>> from envkit import Composite, Unbounded, consolidate_spec
        >>> walker, ball = Composite(legs=Unbounded((4,))), Composite()
        >>> spec = consolidate_spec(torch.stack([walker, ball]))
        >>> spec[0]["legs"].shape, spec[1]["legs"].shape
        (torch.Size([4]), torch.Size([0]))
    """
    flags = (recurse_through_entries, recurse_through_stack)
    if isinstance(spec, StackedComposite):
        return stack(_consolidated(spec.members, *flags), spec.stack_dim)
    if isinstance(spec, Composite) and recurse_through_entries:
        return spec._map(lambda child: consolidate_spec(child, *flags))
    return spec.clone()


def _consolidated(members: Sequence[Composite], *flags: bool) -> list[Composite]:
    """Copy composites so that all have the keys of each."""
    entries, stacks = flags
    copies = [
        consolidate_spec(member, *flags)
        if stacks or not isinstance(member, StackedComposite)
        else member.clone()
        for member in members
    ]
    names = dict.fromkeys(name for member in copies for name in member.keys())
    for name in names:
        declared = [member.get(name, None) for member in copies]
        donors = [child for child in declared if child is not None]
        children = [
            _placeholder(donors, member.shape) if child is None else child
            for member, child in zip(copies, declared, strict=True)
        ]
        if donors and isinstance(donors[0], Composite) and entries:
            children = _consolidated(children, *flags)
        for member, child in zip(copies, children, strict=True):
            member.set(name, child)
    return copies


def _placeholder(donors: Sequence[TensorSpec], shape: torch.Size) -> Any:
    """Describe nothing in the manner of the specs that others have, for a member of this batch size."""
    if not donors:
        return None
    first = donors[0]._map_shape(Index((0,) * len(shape)))
    cut = _without_features(first, 0, _agreeing(donors, len(shape)))
    return cut._map_shape(expand_op(cut._free_shape, torch.Size((*shape, *cut._free_shape))))


def _agreeing(donors: Sequence[TensorSpec], batch_ndim: int) -> set[int]:
    """Feature axes on which unlike leaves have one known size; none where the leaves are all alike."""
    first = donors[0]
    alike = not isinstance(first, Stacked) and all(donor == first for donor in donors)
    shapes = {donor.shape[batch_ndim:] for donor in donors}
    if alike or isinstance(first, Composite) or len({len(shape) for shape in shapes}) > 1:
        return set()
    columns = [set(sizes) for sizes in zip(*shapes, strict=True)]
    return {i for i, sizes in enumerate(columns) if len(sizes) == 1 and -1 not in sizes}


def _without_features(spec: Any, kept: int, agreed: Collection[int] = ()) -> Any:
    """Cut all axes but the first ``kept`` and those ``agreed`` to size 0; dynamic ones stay."""
    if isinstance(spec, Stack):
        dim = spec.stack_dim
        kept -= dim < kept
        uneven = -1 in spec.shape
        agreed = {i - (i > dim) for i in agreed if i != dim} if uneven else ()
        return spec._each(lambda member: _without_features(member, kept, agreed))
    features = enumerate(spec._free_shape[kept:], kept)
    cuts = [slice(None) if size == -1 or i in agreed else slice(0, 0) for i, size in features]
    cut = spec._map_shape(Index((*(slice(None),) * kept, *cuts)))
    if not isinstance(cut, Composite):
        return cut
    return cut._map(lambda child: _without_features(child, cut.ndim))
