"""Gymnasium spaces as envkit specs, and values as what a TensorDict or a row of an array holds.

A `Codec` decides once, from a space, which leaves it has and how values of the space cross in both
directions. Wrappers and worker processes use the same codec, so no value is converted in two ways.

Conventions
    leaf      one entry of a (possibly nested) space, named by its path.
    row       what one environment owns of a leaf that has the form of an array: an array of the
              leaf's shape; a 0-d leaf has shape ().
    encoding  of discrete spaces: one-hot int64, or 0-based integers when ``categorical``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.paths import Path, as_key, nest
from envkit.errors import SpecError, SpecStackError
from envkit.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
)
from envkit.specs.stacks import stack
from envkit_bridges.gym.backend import gym_backend, library_of
from envkit_bridges.gym.leaves import (
    Leaf,
    ObjectLeaf,
    RowLeaf,
    ragged_leaf,
    stacked_leaf,
    text_leaf,
)
from envkit_bridges.gym.space_leaves import leaf_of

__all__ = ["Codec", "codec_at", "codec_of", "space_of"]

ArraysByPath = Mapping[Path, np.ndarray]


@dataclass(frozen=True)
class Codec:
    """Leaves of a space, and the way from their values to a value of the space.

    Args:
        space: the gymnasium space.
        leaves: by path, each leaf and the function that picks its value out of one of the space.
        assemble: from lists of leaf values, all of one length, to that many values of the space.
    """

    space: Any
    leaves: dict[Path, tuple[Leaf, Callable[[Any], Any]]]
    assemble: Callable[[Mapping[Path, list[Any]]], list[Any]]

    @cached_property
    def has_rows(self) -> bool:
        """Whether every leaf has the form of an array of fixed shape."""
        return all(isinstance(leaf, RowLeaf) for leaf, _ in self.leaves.values())

    def spec(self, device: Any = None) -> Composite:
        """Give the leaves' specs as one Composite."""
        tree = Composite(device=device)
        for path, (leaf, _) in self.leaves.items():
            tree[path] = leaf.spec.to(device) if device is not None else leaf.spec
        return tree

    @cached_property
    def _only(self) -> tuple[Path, Leaf] | None:
        """The leaf whose values are those of the space, where there is one: nothing is picked or assembled."""
        if len(self.leaves) != 1:
            return None
        [(path, (leaf, pick))] = self.leaves.items()
        return (path, leaf) if pick is _itself and len(path) == 1 else None

    # ---------------------------------------------------------------- one value, for a TensorDict

    def encode(self, value: Any) -> dict[Path, Any]:
        """Turn a value of the space into tensors and non-tensor data by path; see `writer`."""
        encoded = {}
        for path, (leaf, pick) in self.leaves.items():
            encoded[path] = leaf.encode(value if pick is _itself else pick(value))
        return encoded

    def encode_nested(self, value: Any) -> dict[str, Any]:
        """Do what `encode` does, and give nested dicts."""
        if self._only is None:
            return nest(self.encode(value))
        (name,), leaf = self._only
        return {name: leaf.encode(value)}

    def decode(self, data: Mapping[Path, Any]) -> Any:
        """Turn tensors and non-tensor data by path into a value of the space.

        Nothing is checked: they are what the specs say.
        """
        if self._only is not None:
            path, leaf = self._only
            return leaf.decode(data[path])
        values = {}
        for path, (leaf, _) in self.leaves.items():
            values[path] = [leaf.decode(data[path])]
        return self.assemble(values)[0]

    # --------------------------------------------------------------------------- rows of many envs

    def writer(self, rows: ArraysByPath) -> Callable[[Any], None]:
        """Give the function that writes a value of the space into one environment's rows.

        It raises `EncodingError` where a value has another shape than its space says, or does not
        fit its dtype.
        """
        if self._only is not None:
            path, leaf = self._only
            return leaf.writer(rows[path])
        puts = [(leaf.writer(rows[path]), pick) for path, (leaf, pick) in self.leaves.items()]

        def write(value: Any) -> None:
            for put, pick in puts:
                put(pick(value))

        return write

    def read(self, rows: ArraysByPath) -> list[Any]:
        """Turn leaves with one leading axis into that many values of the space.

        Nothing is checked: they are what the specs say.
        """
        if self._only is not None:
            path, leaf = self._only
            return leaf.read(rows[path])
        return self.assemble(
            {path: leaf.read(rows[path]) for path, (leaf, _) in self.leaves.items()}
        )

    # --------------------------------------------------------------- arrays with the envs in front

    def encode_arrays(self, values: Any) -> dict[Path, torch.Tensor]:
        """Turn values of several envs, held as arrays with one more axis in front, into tensors of rows by path.

        They may share memory.

        Raises:
            EncodingError: a value is not in the space.
        """
        return {
            path: leaf.encode_array(np.asarray(values if pick is _itself else pick(values)))
            for path, (leaf, pick) in self.leaves.items()
        }

    def decode_arrays(self, data: Mapping[Path, torch.Tensor]) -> Any:
        """Turn tensors of rows by path into values of the space with the envs in front; memory may be shared.

        Nothing is checked: they are what the specs say.
        """
        parts = {path: [leaf.decode_array(data[path])] for path, (leaf, _) in self.leaves.items()}
        return self.assemble(parts)[0]


# ------------------------------------------------------------------------------- space -> codec


def codec_of(space: Any, *, categorical: bool, key: str) -> Codec:
    """Build the codec of a gymnasium space.

    Args:
        space: any gymnasium space.
        categorical: encode discrete spaces as integers instead of one-hot.
        key: name of the leaf when the space is not a Dict (nor a Sequence of them). In a Dict an
            entry ``state`` is called ``observation``, unless the key is "action".
            Members of a Tuple that cannot be stacked are entries "0", "1", ... below its name.

    Raises:
        SpecError: the space has no counterpart (Graph, OneOf, a Sequence that is not stacked).
    """
    return _build(space, () if _is_tree(space) else (key,), categorical, key != "action")


def codec_at(space: Any, path: Path, *, categorical: bool) -> Codec:
    """Build the codec of a space whose entries lie at or below ``path``, and keep their names.

    Args:
        space, categorical: of `codec_of`.
        path: of the leaf, or of the node where the space is a Dict.

    Raises:
        SpecError: see `codec_of`.
    """
    return _build(space, path, categorical, False)


def _is_tree(space: Any) -> bool:
    if _is_a(space, "Sequence"):
        return _is_tree(space.feature_space)
    return _is_a(space, "Dict")


def _is_a(space: Any, kind: str) -> bool:
    return isinstance(space, getattr(library_of(space).spaces, kind, ()))


def _build(space: Any, path: Path, categorical: bool, renames: bool) -> Codec:
    """Build the codec of a space that lies at ``path``; the entries of a Dict lie below it."""
    if _is_a(space, "Dict"):
        return _dict_codec(space, path, categorical, renames)
    if _is_a(space, "Sequence"):
        return _sequence_codec(space, path, categorical, renames)
    if _is_a(space, "Tuple"):
        try:
            leaf = _tuple_leaf(space, categorical, path[-1])
        except SpecStackError:
            return _members_codec(space, path, categorical, renames)
    elif _is_a(space, "Text"):
        leaf = text_leaf(space)
    else:
        leaf = leaf_of(space, categorical, as_key(path))
    return Codec(space, {path: (leaf, _itself)}, lambda values: values[path])


def _dict_codec(space: Any, path: Path, categorical: bool, renames: bool) -> Codec:
    is_free = renames and "observation" not in space.spaces

    def shown(name: str) -> str:
        return "observation" if is_free and name == "state" else name

    members = {
        name: _build(member, (*path, shown(name)), categorical, renames)
        for name, member in space.spaces.items()
    }
    leaves = {
        at: (leaf, _then(name, pick))
        for name, codec in members.items()
        for at, (leaf, pick) in codec.leaves.items()
    }

    def assemble(values: Mapping[Path, list[Any]]) -> list[Any]:
        parts = [codec.assemble(values) for codec in members.values()]
        return [dict(zip(members, row, strict=True)) for row in zip(*parts, strict=True)]

    return Codec(space, leaves, assemble)


def _members_codec(space: Any, path: Path, categorical: bool, renames: bool) -> Codec:
    """Build the codec of a Tuple whose members cannot be stacked: an entry for each, "0", "1" and so on."""
    members = [
        _build(member, (*path, str(index)), categorical, renames)
        for index, member in enumerate(space.spaces)
    ]
    leaves = {
        at: (leaf, _then(index, pick))
        for index, codec in enumerate(members)
        for at, (leaf, pick) in codec.leaves.items()
    }

    def assemble(values: Mapping[Path, list[Any]]) -> list[Any]:
        return list(zip(*(codec.assemble(values) for codec in members), strict=True))

    return Codec(space, leaves, assemble)


def _itself(value: Any) -> Any:
    return value


def _then(name: str | int, pick: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return (lambda value: value[name]) if pick is _itself else (lambda value: pick(value[name]))


# --------------------------------------------------------------------------- tuples and sequences


def _tuple_leaf(space: Any, categorical: bool, name: str) -> Leaf:
    """Stack the members of a Tuple into one entry.

    Raises:
        SpecError: there are none.
        SpecStackError: they are of unlike kinds or dtypes.
    """
    if not space.spaces:
        raise SpecError(f"{space} has no members, so there is nothing to record. Give it a member.")
    trees = [_is_tree(member) for member in space.spaces]
    members = [
        _build(member, () if is_tree else (name,), categorical, True)
        for member, is_tree in zip(space.spaces, trees, strict=True)
    ]
    if all(trees):
        return _tree_tuple(members)
    leaves = [leaf for codec in members for leaf, _ in codec.leaves.values()]
    rows = [leaf for leaf in leaves if isinstance(leaf, RowLeaf)]
    if any(codec._only is None for codec in members) or len(rows) < len(leaves):
        raise SpecStackError("only arrays, or only Dicts, can be stacked")
    spec = stack([leaf.spec for leaf in rows], 0)
    if len({leaf.spec.shape for leaf in rows}) == 1:
        return stacked_leaf(spec, rows)
    return ragged_leaf(spec, rows)


def _tree_tuple(members: list[Codec]) -> ObjectLeaf:
    """A Tuple of Dicts: a TensorDict that stacks one for each member."""
    forms = [
        {path: (leaf.spec.shape, leaf.spec.dtype) for path, (leaf, _) in codec.leaves.items()}
        for codec in members
    ]
    if any(form != forms[0] for form in forms[1:]):
        raise SpecStackError("Dicts must have the same keys, shapes and dtypes")

    def encode(value: Any) -> TensorDictBase:
        parts = [
            TensorDict(codec.encode_nested(part))
            for codec, part in zip(members, value, strict=True)
        ]
        return cast(TensorDictBase, torch.stack(cast(list, parts), 0))

    def decode(data: TensorDictBase) -> tuple[Any, ...]:
        return tuple(
            codec.decode({path: part.get(as_key(path)) for path in codec.leaves})
            for codec, part in zip(members, data.unbind(0), strict=True)
        )

    return ObjectLeaf(stack([codec.spec() for codec in members], 0), encode, decode)


def _sequence_codec(space: Any, path: Path, categorical: bool, renames: bool) -> Codec:
    """A stacked Sequence: every leaf of its elements gets a leading axis of unknown size."""
    if not space.stack:
        raise SpecError(
            f"{space} does not stack its elements and has no array form. Make it with stack=True."
        )
    utils = library_of(space).vector.utils
    element = _build(space.feature_space, path, categorical, renames)
    if not element.has_rows:
        raise SpecError(
            f"the elements of {space} have no array form of fixed shape. "
            "Flatten them with a gymnasium wrapper."
        )

    def elements(value: Any) -> list[Any]:
        return list(utils.iterate(space.stacked_feature_space, value))

    def assemble(values: Mapping[Path, list[Any]]) -> list[Any]:
        return [
            joined({path: lists[index] for path, lists in values.items() if path in element.leaves})
            for index in range(len(values[next(iter(element.leaves))]))
        ]

    def joined(lists: dict[Path, list[Any]]) -> Any:
        made = element.assemble(lists)
        blank = utils.create_empty_array(space.feature_space, len(made))
        return utils.concatenate(space.feature_space, made, blank) if made else blank

    def each(pick: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
        return lambda value: [pick(one) for one in elements(value)]

    leaves = {at: (_series(leaf), each(pick)) for at, (leaf, pick) in element.leaves.items()}
    return Codec(space, leaves, assemble)


def _series(leaf: Leaf) -> ObjectLeaf:
    """Any number of values of a leaf that has rows, along a leading axis."""

    def encode(values: list[Any]) -> torch.Tensor:
        return torch.stack([leaf.encode(value) for value in values]) if values else empty

    def decode(data: torch.Tensor) -> list[Any]:
        return leaf.read(data.detach().cpu().numpy())

    spec = leaf.spec.unsqueeze(0).make_neg_dim(0)
    empty = leaf.spec.zero((0,))
    return ObjectLeaf(spec, encode, decode)


# -------------------------------------------------------------------------------- spec -> space


def space_of(spec: TensorSpec) -> Any:
    """Give the gymnasium space of a spec; the inverse of `codec_of` up to the encoding.

    Raises:
        SpecError: the spec has no gymnasium counterpart.
    """
    spaces = gym_backend("spaces")
    if isinstance(spec, Composite):
        return spaces.Dict({name: space_of(member) for name, member in spec.items()})
    shape = tuple(spec.shape)
    if isinstance(spec, NonTensor):
        return spaces.Text(max_length=4096)
    dtype = np.dtype(str(spec.dtype).removeprefix("torch."))
    if isinstance(spec, MultiCategorical):
        return spaces.MultiDiscrete(list(spec.nvec))
    if isinstance(spec, OneHot | MultiOneHot | Binary):
        return spaces.Box(0, 1, shape, dtype=np.int8 if dtype == bool else dtype)
    if isinstance(spec, Categorical):
        if shape in ((), (1,)):
            return spaces.Discrete(spec.n)
        return spaces.MultiDiscrete(np.full(shape, spec.n))
    if isinstance(spec, Bounded):
        return spaces.Box(spec.low.cpu().numpy(), spec.high.cpu().numpy(), shape, dtype)
    if isinstance(spec, Unbounded):
        if np.issubdtype(dtype, np.floating):
            return spaces.Box(-np.inf, np.inf, shape, dtype)
        info = np.iinfo(dtype)
        return spaces.Box(info.min, info.max, shape, dtype)
    raise SpecError(f"{type(spec).__name__} has no gymnasium space. Use a leaf of specs.md.")
