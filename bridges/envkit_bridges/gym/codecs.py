"""How Gymnasium spaces become specs, and their values rows of arrays or entries of a TensorDict, and back.

A `Codec` decides once, from a space, which leaves it has, what each leaf is, and how values of the space cross in both
directions. Wrappers and worker processes use the same codec, so no value is converted in two ways. Values that differ
from their space in shape, or do not fit its dtype, are refused: NumPy would broadcast the one and wrap the other around.

Conventions
    leaf      one entry of a (possibly nested) space, named by its path.
    row       what one environment owns of a leaf that has the form of an array: an array of the
              leaf's shape; a 0-d leaf has shape ().
    rows      array of shape (count, *leaf): values of several envs side by side.
    values    of several envs: a list, or one array of shape (count, *space), as simulators of many envs have them.
    key       name of the entry, for messages.
    encoding  of discrete spaces: one-hot int64, or 0-based integers when ``categorical``.
    index     option number of a discrete space, counted from 0; gymnasium counts from ``start``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Real
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.arrays.elementwise import dtype_name
from envkit.data.paths import Path, as_key, nest
from envkit.errors import EncodingError, SpecError, SpecStackError
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
from envkit_bridges.gym.backend import GymSpace, SpaceValue, gym_backend, library_of
from envkit_bridges.gym.space_conversions import converted, is_converted

if TYPE_CHECKING:
    from envkit.specs.annotations import Device


@dataclass(frozen=True)
class ArrayForm:
    """How an array of values becomes rows, and back; what comes out may share memory with what went in.

    Args:
        rows_of: from an array of values to rows, in the dtype of the entry.
        values_of: from rows to an array of values, in any dtype.
    """

    rows_of: Callable[[np.ndarray], np.ndarray]
    values_of: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class RowLeaf:
    """An entry that has the form of an array of fixed shape.

    Args:
        spec: what describes it.
        write: writes a value into a row.
        read: turns rows into values; none of them shares memory with the rows.
        together: the same for arrays of values; None where they are spelled one by one.
    """

    spec: TensorSpec
    write: Callable[[np.ndarray, Any], None]
    read: Callable[[np.ndarray], list[Any]]
    together: ArrayForm | None = None

    @cached_property
    def _form(self) -> tuple[tuple[int, ...], np.dtype]:
        assert self.spec.dtype is not None
        return tuple(self.spec.shape), numpy_dtype(self.spec.dtype)

    def writer(self, row: np.ndarray) -> Callable[[Any], None]:
        """Return the function that writes a value into ``row``, always the same one."""
        write = self.write
        return write.into(row) if isinstance(write, CopyIn) else partial(write, row)

    def encode(self, value: SpaceValue) -> torch.Tensor:
        """Turn a value into a new tensor."""
        row = np.empty(*self._form)
        self.write(row, value)
        return torch.from_numpy(row)

    def decode(self, data: torch.Tensor) -> SpaceValue:
        """Turn a tensor into a value."""
        return self.read(data.detach().cpu().numpy()[None])[0]

    def encode_array(self, values: SpaceValue) -> torch.Tensor:
        """Turn an array of values into a tensor of rows, which may share its memory.

        Raises:
            EncodingError: a value has another shape than the space says, or is not in it.
        """
        values = np.asarray(values)
        if self.together is not None:
            return torch.from_numpy(self.together.rows_of(values))
        shape, dtype = self._form
        rows = np.empty((len(values), *shape), dtype)
        for index, value in enumerate(values):
            self.write(rows[index, ...], value)
        return torch.from_numpy(rows)

    def decode_array(self, data: torch.Tensor | np.ndarray) -> np.ndarray:
        """Turn rows into an array of values, which may share their memory."""
        rows = data if isinstance(data, np.ndarray) else data.numpy(force=True)
        return np.stack(self.read(rows)) if self.together is None else self.together.values_of(rows)


@dataclass(frozen=True)
class ObjectLeaf:
    """An entry whose size or kind only the value tells; it travels in TensorDicts alone."""

    spec: Any
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]

    def write(self, row: np.ndarray, value: SpaceValue) -> None:
        """Refused: there are no rows for it."""
        raise self._no_rows()

    def writer(self, row: np.ndarray) -> Callable[[Any], None]:
        """Refused: there are no rows for it."""
        raise self._no_rows()

    def read(self, rows: np.ndarray) -> list[Any]:
        """Refused: there are no rows of it."""
        raise self._no_rows()

    def encode_array(self, values: SpaceValue) -> torch.Tensor:
        """Refused: there are no rows of it."""
        raise self._no_rows()

    def decode_array(self, data: torch.Tensor | np.ndarray) -> np.ndarray:
        """Refused: there are no rows of it."""
        raise self._no_rows()

    def _no_rows(self) -> SpecError:
        return SpecError(
            f"values of {self.spec} have no array form of fixed shape. "
            "Ask `Codec.has_rows` first, or use encode and decode."
        )


Leaf = RowLeaf | ObjectLeaf


# ------------------------------------------------------------------------- several values, no array


@dataclass(frozen=True)
class StackedLeaf(RowLeaf):
    """A leaf of tuples whose members share one shape: they lie on the first axis.

    Values of several envs are a tuple of one array for each member.
    """

    members: tuple[RowLeaf, ...] = ()

    def encode_array(self, values: SpaceValue) -> torch.Tensor:
        parts = [leaf.encode_array(part) for leaf, part in zip(self.members, values, strict=True)]
        return torch.stack(parts, 1)

    def decode_array(self, data: torch.Tensor | np.ndarray) -> Any:
        return tuple(leaf.decode_array(data[:, at]) for at, leaf in enumerate(self.members))


def stacked_leaf(spec: TensorSpec, members: Sequence[RowLeaf]) -> RowLeaf:
    """Build the leaf of tuples whose members share one shape."""

    def write(row: np.ndarray, value: SpaceValue) -> None:
        for index, (member, part) in enumerate(zip(members, value, strict=True)):
            member.write(row[index, ...], part)  # the dots keep a 0-d slot an array

    def read(rows: np.ndarray) -> list[Any]:
        parts = [member.read(rows[:, index]) for index, member in enumerate(members)]
        return list(zip(*parts, strict=True))

    return StackedLeaf(spec, write, read, members=tuple(members))


def ragged_leaf(spec: TensorSpec, members: Sequence[RowLeaf]) -> ObjectLeaf:
    """Build the leaf of tuples whose members differ in shape: values are nested tensors."""

    def encode(value: SpaceValue) -> TensorDictBase:
        return spec.encode(
            [member.encode(part) for member, part in zip(members, value, strict=True)]
        )

    shapes = [member.spec.shape for member in members]

    def decode(data: TensorDictBase) -> tuple[Any, ...]:
        parts = data.unbind(0)
        if [part.shape for part in parts] != shapes:
            raise SpecError(
                f"got parts of shapes {[tuple(part.shape) for part in parts]}, but the members of "
                f"the Tuple have {[tuple(shape) for shape in shapes]}. Tuples of unlike shapes "
                "cannot be batched: turn the space into a Dict with a gymnasium wrapper."
            )
        return tuple(member.decode(part) for member, part in zip(members, parts, strict=True))

    return ObjectLeaf(spec, encode, decode)


def _leaf_of_spec(spec: TensorSpec) -> Leaf:
    """Build the leaf of a spec that was registered for a space: what it encodes, and reads back."""
    if spec.dtype is None or -1 in spec.shape:
        return ObjectLeaf(spec, spec.encode, spec.to_numpy)

    def write(row: np.ndarray, value: SpaceValue) -> None:
        row[...] = spec.encode(value).numpy()

    def read(rows: np.ndarray) -> list[Any]:
        return [spec.to_numpy(torch.from_numpy(row.copy())) for row in rows]

    return RowLeaf(spec, write, read)


def text_leaf(space: GymSpace) -> ObjectLeaf:
    """Build the leaf of text: Python strings, carried as non-tensor data."""
    shortest = sorted(space.character_set)[0] * space.min_length
    spec = NonTensor(shape=(), example_data=shortest)
    return ObjectLeaf(spec, spec.encode, spec.to_numpy)


# ------------------------------------------------------------------------------------------ arrays


@dataclass(frozen=True)
class CopyIn:
    """Write an array or a number into a row as it is.

    A number may stand for an array of one element, and the other way round.
    """

    key: Any

    def into(self, row: np.ndarray) -> Callable[[Any], None]:
        """Return the function that writes into ``row``, which must be contiguous."""
        if row.ndim != 1:
            return partial(self, row)
        view = row.data

        def write(value: SpaceValue) -> None:
            try:
                view[:] = value  # the fastest way, which takes equal shapes and dtypes only
            except (BufferError, OverflowError, TypeError, ValueError):
                self(row, value)

        return write

    def __call__(self, row: np.ndarray, value: SpaceValue) -> None:
        """Write ``value``.

        Raises:
            EncodingError: it has another shape, is no number, or the dtype of ``row`` cannot hold it.
        """
        array = np.asarray(value)
        if array.shape != row.shape:
            if array.size != 1 or row.size != 1:
                raise misshapen(self.key, array.shape, row.shape)
            array = array.reshape(row.shape)
        if array.dtype == row.dtype:
            row[...] = array
            return
        if not holds_numbers(array, row.dtype):
            raise _unholdable(self.key, array, row)
        try:
            with np.errstate(over="raise", invalid="raise"):
                row[...] = array
        except (FloatingPointError, OverflowError, TypeError, ValueError) as error:
            raise _unholdable(self.key, array, row) from error
        if row.dtype.kind != "f" and not np.array_equal(row, array):
            raise _unholdable(self.key, array, row)


def holds_numbers(array: np.ndarray, dtype: np.dtype) -> bool:
    """Check whether an array holds real numbers alone, of any library, that ``dtype`` may take.

    A cast of NumPy would make NaN of None, 1.5 of ``"1.5"``, and drop imaginary parts.
    """
    if array.dtype.kind == "O":
        return all(isinstance(item, (Real, np.bool_)) for item in array.flat)
    return array.dtype.kind in "biuf" or np.can_cast(array.dtype, dtype, "same_kind")


_CURE = "Correct the env or its space: gymnasium.utils.env_checker.check_env(env) compares the two."


def misshapen(key: object, shape: tuple[int, ...], wanted: tuple[int, ...]) -> EncodingError:
    """Return an error that says that a value has another shape than its space."""
    return EncodingError(
        f"cannot put {key!r} of shape {shape} into shape {wanted}, which its space declares. {_CURE}"
    )


def _unholdable(key: object, array: np.ndarray, row: np.ndarray) -> EncodingError:
    return EncodingError(
        f"cannot put {key!r} of dtype {array.dtype} into {row.dtype}, which its space declares: "
        f"{_shown(array)} does not fit. {_CURE}"
    )


def lacking(space: GymSpace, value: SpaceValue, method: str) -> EncodingError | None:
    """Return the error of a value that lacks a member of its space; None if it has all of them.

    Args:
        method: of the simulator, which has returned the value.
    """
    path = _lacking_path(space, value)
    if path is None:
        return None
    name = ".".join(map(str, path))
    is_dict = isinstance(value, Mapping)
    held = f"it holds {sorted(map(str, value))}" if is_dict else f"it is a {type(value).__name__}"
    return EncodingError(
        f"{method} of the simulator returned an observation without {name!r}: {held}, but must hold all members of "
        f"its space {space}. Return {name!r} from reset and from step, or take it out of observation_space."
    )


def _lacking_path(space: GymSpace, value: SpaceValue) -> tuple[Any, ...] | None:
    """Find the first member of a Dict or Tuple, however deep, that a value lacks."""
    if not (_is_a(space, "Dict") or _is_a(space, "Tuple")):
        return None
    is_dict = _is_a(space, "Dict")
    for name, member in space.spaces.items() if is_dict else enumerate(space.spaces):
        try:
            below = _lacking_path(member, value[name])
        except (KeyError, IndexError, TypeError):
            return (name,)
        if below is not None:
            return (name, *below)
    return None


def outside(key: object, value: SpaceValue, space: GymSpace) -> EncodingError:
    """Return an error that says that a value is not in its space."""
    return EncodingError(f"{key!r} is {_shown(value)}, which is not in its space {space}. {_CURE}")


def _shown(value: SpaceValue) -> str:
    return np.array2string(np.asarray(value), threshold=16, separator=", ").replace("\n", "")


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the NumPy dtype that is spelled like a torch dtype."""
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


IndicesOf = Callable[[Any], np.ndarray]


def leaf_of(space: GymSpace, categorical: bool, key: object) -> RowLeaf:
    """Build the leaf of a space that has no parts; its ``write`` raises `EncodingError` for others.

    Raises:
        SpecError: the space has no counterpart.
    """
    spaces = library_of(space).spaces
    if isinstance(space, spaces.Box):
        return _box(space, key)
    if isinstance(space, spaces.Discrete):
        return _discrete(space, categorical, key)
    if isinstance(space, spaces.MultiDiscrete):
        return _multi_discrete(space, categorical, key)
    if isinstance(space, spaces.MultiBinary):
        spec = Binary(space.shape[-1], shape=tuple(space.shape), dtype=torch.int8)
        return RowLeaf(spec, CopyIn(key), _rows, _copied(spec, space, key))
    kind = type(space).__name__
    raise SpecError(
        f"the space of {key!r} is {space}, a {kind}, which has no counterpart in specs. Flatten it with a wrapper of "
        "Gymnasium, or register a spec for such spaces: "
        f"register_gym_spec_conversion({kind})(lambda space, **kwargs: NonTensor())."
    )


# ------------------------------------------------------------------------------------------- boxes


def _box(space: GymSpace, key: object) -> RowLeaf:
    dtype = _torch_dtype(space.dtype)
    scalar = space.shape == ()
    shape = (1,) if scalar else tuple(space.shape)
    if dtype == torch.bool:
        spec: TensorSpec = Categorical(2, shape=shape, dtype=dtype)
    elif _is_unbounded(space):
        spec = Unbounded(shape, dtype=dtype)
    else:
        low, high = (np.asarray(bound).reshape(shape) for bound in (space.low, space.high))
        spec = Bounded(
            torch.from_numpy(low.copy()), torch.from_numpy(high.copy()), shape, dtype=dtype
        )
    return RowLeaf(spec, CopyIn(key), _scalars if scalar else _rows, _copied(spec, space, key))


def _copied(spec: TensorSpec, space: GymSpace, key: object) -> ArrayForm:
    """Copy arrays at once where they have the form of the rows."""
    assert spec.dtype is not None
    shape, dtype = tuple(spec.shape), numpy_dtype(spec.dtype)
    copy_in = CopyIn(key)

    def rows_of(values: np.ndarray) -> np.ndarray:
        if values.shape[1:] != space.shape:
            raise misshapen(key, values.shape[1:], tuple(space.shape))
        values = values.reshape(len(values), *shape)
        if values.dtype == dtype:
            return values
        copy_in(rows := np.empty(values.shape, dtype), values)
        return rows

    return ArrayForm(rows_of, lambda rows: rows.reshape(len(rows), *space.shape))


def _is_unbounded(space: GymSpace) -> bool:
    if np.issubdtype(space.dtype, np.floating):
        lowest, highest = -np.inf, np.inf
    else:
        info = np.iinfo(space.dtype)
        lowest, highest = info.min, info.max
    return bool(np.all(space.low == lowest) and np.all(space.high == highest))


# ---------------------------------------------------------------------------------------- discrete


def _discrete(space: GymSpace, categorical: bool, key: object) -> RowLeaf:
    start, count = int(getattr(space, "start", 0)), int(space.n)

    def index_of(value: SpaceValue) -> int:
        index = value - start if type(value) is int else _whole(value, space, key).item() - start
        if not 0 <= index < count:
            raise outside(key, value, space)
        return index

    def indices_of(values: np.ndarray) -> np.ndarray:
        given = values.reshape(len(values))
        indices = _whole(given, space, key).astype(space.dtype) - start
        if (wrong := (indices < 0) | (indices >= count)).any():
            raise outside(key, given[wrong][0], space)
        return indices

    if categorical:
        spec: TensorSpec = Categorical(count, shape=(), dtype=_torch_dtype(space.dtype))

        def write_index(row: np.ndarray, value: SpaceValue) -> None:
            row[...] = index_of(value)

        form = ArrayForm(indices_of, lambda rows: rows + start)
        return RowLeaf(
            spec, write_index, lambda rows: [index + start for index in rows.tolist()], form
        )

    def write_one_hot(row: np.ndarray, value: SpaceValue) -> None:
        row[:] = 0
        row[index_of(value)] = 1

    spec = OneHot(count, dtype=torch.int64)

    def one_hot(values: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(values), count), np.int64)
        rows[np.arange(len(values)), indices_of(values)] = 1
        return rows

    form = ArrayForm(one_hot, lambda rows: (rows.argmax(-1) + start).astype(space.dtype))

    def read_one_hot(rows: np.ndarray) -> list[int]:
        return [index + start for index in rows.argmax(-1).tolist()]

    return RowLeaf(spec, write_one_hot, read_one_hot, form)


def _whole(value: SpaceValue, space: GymSpace, key: object) -> np.ndarray:
    """Return the integers that ``value`` spells: 1.0 is one, and 1.5, ``"1"`` and None are none."""
    array = np.asarray(value)
    if array.dtype.kind in "biu":
        return array.astype(np.int64)
    if not (holds_numbers(array, np.dtype(float)) and (array.astype(float) % 1 == 0).all()):
        raise outside(key, value, space)
    return array.astype(np.int64)


def _multi_discrete(space: GymSpace, categorical: bool, key: object) -> RowLeaf:
    """One choice for each entry of ``nvec``.

    Entries of equal size keep the shape of the space, whatever it is. Others are laid out on one
    axis, in C order.
    """
    sizes = np.asarray(space.nvec)
    start = np.asarray(getattr(space, "start", np.zeros_like(sizes)))
    equal = bool((sizes == sizes.flat[0]).all())

    def indices_of(value: SpaceValue) -> np.ndarray:
        found = _whole(value, space, key)
        if found.shape != sizes.shape:
            raise misshapen(key, found.shape, sizes.shape)
        indices = found - start
        if not ((indices >= 0) & (indices < sizes)).all():
            raise outside(key, value, space)
        return indices

    if categorical:
        return _choice_indices(space, sizes, start, equal, indices_of)
    return _choice_one_hot(space, sizes, start, equal, indices_of)


def _choice_indices(
    space: GymSpace, sizes: np.ndarray, start: np.ndarray, equal: bool, indices_of: IndicesOf
) -> RowLeaf:
    dtype = _torch_dtype(space.dtype)
    if equal:
        spec: TensorSpec = Categorical(int(sizes.flat[0]), shape=sizes.shape, dtype=dtype)
    else:
        spec = MultiCategorical(sizes.flatten().tolist(), dtype=dtype)

    def write(row: np.ndarray, value: SpaceValue) -> None:
        row[...] = indices_of(value).reshape(row.shape)

    return RowLeaf(spec, write, lambda rows: list(rows.reshape(len(rows), *sizes.shape) + start))


def _choice_one_hot(
    space: GymSpace, sizes: np.ndarray, start: np.ndarray, equal: bool, indices_of: IndicesOf
) -> RowLeaf:
    flat_sizes = sizes.flatten().tolist()
    ends = np.cumsum(flat_sizes)
    offsets = ends - flat_sizes
    if equal:
        options = flat_sizes[0]
        spec: TensorSpec = OneHot(options, shape=(*sizes.shape, options), dtype=torch.int64)
    else:
        spec = MultiOneHot(flat_sizes, dtype=torch.int64)

    def write(row: np.ndarray, value: SpaceValue) -> None:
        flat = row.reshape(-1)  # a view: rows are contiguous
        flat[:] = 0
        flat[offsets + indices_of(value).reshape(-1)] = 1

    def read(rows: np.ndarray) -> list[Any]:
        flat = rows.reshape(len(rows), -1)
        parts = [flat[:, low:high].argmax(-1) for low, high in zip(offsets, ends, strict=True)]
        indices = np.stack(parts, -1).astype(space.dtype)
        return list(indices.reshape(len(rows), *sizes.shape) + start)

    return RowLeaf(spec, write, read)


# ------------------------------------------------------------------------------------------ arrays


def _rows(rows: np.ndarray) -> list[Any]:
    return list(rows.copy())  # the simulator may keep its action; the rows will be refilled


def _scalars(rows: np.ndarray) -> list[Any]:
    return [row.reshape(()) for row in rows.copy()]


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


ArraysByPath = Mapping[Path, np.ndarray]


@dataclass(frozen=True)
class Codec:
    """Leaves of a space, and the way from their values to a value of the space.

    Args:
        space: the gymnasium space.
        leaves: by path, each leaf and the function that picks its value out of one of the space.
        assemble: from lists of leaf values, all of one length, to that many values of the space.
        members: of a Dict, and of a Tuple whose members are entries, the codec of each by its name or number there.
    """

    space: Any
    leaves: Mapping[Path, tuple[Leaf, Callable[[Any], Any]]]
    assemble: Callable[[Mapping[Path, list[Any]]], list[Any]]
    members: Mapping[Any, Codec] | None = None

    @cached_property
    def has_rows(self) -> bool:
        """Whether every leaf has the form of an array of fixed shape."""
        return all(isinstance(leaf, RowLeaf) for leaf, _ in self.leaves.values())

    def spec(self, device: Device | None = None) -> Composite:
        """Return the leaves' specs as one Composite."""
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

    def encode(self, value: SpaceValue) -> dict[Path, Any]:
        """Turn a value of the space into tensors and non-tensor data by path; see `writer`."""
        encoded = {}
        try:
            for path, (leaf, pick) in self.leaves.items():
                encoded[path] = leaf.encode(value if pick is _itself else pick(value))
        except (KeyError, IndexError, TypeError) as error:
            raise lacking(self.space, value, "reset or step") or error from None
        return encoded

    def encode_nested(self, value: SpaceValue) -> dict[str, Any]:
        """Encode as `encode` does, and return nested dicts."""
        if self._only is None:
            return nest(self.encode(value))
        (name,), leaf = self._only
        return {name: leaf.encode(value)}

    def decode(self, data: Mapping[Path, Any]) -> SpaceValue:
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

    def writer(self, rows: ArraysByPath, method: str = "step") -> Callable[[Any], None]:
        """Return the function that writes a value of the space, which ``method`` returned, into one environment's rows.

        It raises `EncodingError` where a value lacks a member of the space, has another shape than its space
        says, or does not fit its dtype.
        """
        if self._only is not None:
            path, leaf = self._only
            return leaf.writer(rows[path])
        puts = [(leaf.writer(rows[path]), pick) for path, (leaf, pick) in self.leaves.items()]

        def write(value: SpaceValue) -> None:
            try:
                for put, pick in puts:
                    put(pick(value))
            except (KeyError, IndexError, TypeError) as error:
                raise lacking(self.space, value, method) or error from None

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

    def encode_arrays(self, values: SpaceValue) -> dict[Path, torch.Tensor]:
        """Turn values of several envs, held as arrays with one more axis in front, into tensors of rows by path.

        They may share memory.

        Raises:
            EncodingError: a value is not in the space.
        """
        return {
            path: leaf.encode_array(values if pick is _itself else pick(values))
            for path, (leaf, pick) in self.leaves.items()
        }

    def decode_arrays(self, data: Mapping[Path, torch.Tensor | np.ndarray]) -> SpaceValue:
        """Turn rows by path into values of the space with the envs in front; memory may be shared.

        Nothing is checked: they are what the specs say.
        """
        parts = {path: [leaf.decode_array(data[path])] for path, (leaf, _) in self.leaves.items()}
        return self.assemble(parts)[0]


# ------------------------------------------------------------------------------- space -> codec


def codec_of(space: GymSpace, *, categorical: bool, key: str) -> Codec:
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


def codec_at(space: GymSpace, path: Path, *, categorical: bool) -> Codec:
    """Build the codec of a space whose entries lie at or below ``path``, and keep their names.

    Args:
        space, categorical: of `codec_of`.
        path: of the leaf, or of the node where the space is a Dict.

    Raises:
        SpecError: see `codec_of`.
    """
    return _build(space, path, categorical, False)


def _is_tree(space: GymSpace) -> bool:
    if is_converted(space):
        return False
    if _is_a(space, "Sequence"):
        return _is_tree(space.feature_space)
    return _is_a(space, "Dict")


def _is_a(space: GymSpace, kind: str) -> bool:
    return isinstance(space, getattr(library_of(space).spaces, kind, ()))


def _build(space: GymSpace, path: Path, categorical: bool, renames: bool) -> Codec:
    """Build the codec of a space that lies at ``path``; the entries of a Dict lie below it."""
    spec = converted(space, categorical=categorical, key=as_key(path))
    if spec is not None:
        leaf = _leaf_of_spec(spec)
    elif _is_a(space, "Dict"):
        return _dict_codec(space, path, categorical, renames)
    elif _is_a(space, "Sequence"):
        return _sequence_codec(space, path, categorical, renames)
    elif _is_a(space, "Tuple"):
        try:
            leaf = _tuple_leaf(space, categorical, path[-1])
        except SpecStackError:
            return _members_codec(space, path, categorical, renames)
    elif _is_a(space, "Text"):
        leaf = text_leaf(space)
    else:
        leaf = leaf_of(space, categorical, as_key(path))
    return Codec(space, {path: (leaf, _itself)}, lambda values: values[path])


def codecs_of(
    observed: GymSpace | None, acted: GymSpace, *, categorical: bool
) -> tuple[Codec | None, Codec]:
    """Build the codecs of the observation and the action space of one env, so that no two entries have one name.

    Args:
        observed: None where observations are left out.
        acted: the action space.
        categorical: see `codec_of`.
    """
    action = codec_of(acted, categorical=categorical, key="action")
    observation = None
    if observed is not None:
        observation = codec_of(observed, categorical=categorical, key="observation")
        if any(path[0] in _TAKEN for path in observation.leaves):
            observation = codec_at(observed, ("observation",), categorical=categorical)
        if _clash(observation, action):
            action = codec_at(acted, ("action",), categorical=categorical)
    return observation, action


_TAKEN = frozenset(("action", "next", "reward", "done", "terminated", "truncated"))
"""Names of what a step takes and gives beside the observation."""


def _clash(observation: Codec, action: Codec) -> bool:
    """Check whether an observation and an action have one name, or the one is called like a node above the other."""
    return any(
        seen[: len(acted)] == acted[: len(seen)]
        for seen in observation.leaves
        for acted in action.leaves
    )


def _dict_codec(space: GymSpace, path: Path, categorical: bool, renames: bool) -> Codec:
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

    return Codec(space, leaves, assemble, members)


def _members_codec(space: GymSpace, path: Path, categorical: bool, renames: bool) -> Codec:
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

    return Codec(space, leaves, assemble, dict(enumerate(members)))


def _itself(value: SpaceValue) -> SpaceValue:
    return value


def _then(name: str | int, pick: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return (lambda value: value[name]) if pick is _itself else (lambda value: pick(value[name]))


# --------------------------------------------------------------------------- tuples and sequences


def _tuple_leaf(space: GymSpace, categorical: bool, name: str) -> Leaf:
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

    def encode(value: SpaceValue) -> TensorDictBase:
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


def _sequence_codec(space: GymSpace, path: Path, categorical: bool, renames: bool) -> Codec:
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

    def elements(value: SpaceValue) -> list[Any]:
        return list(utils.iterate(space.stacked_feature_space, value))

    def assemble(values: Mapping[Path, list[Any]]) -> list[Any]:
        return [
            joined({path: lists[index] for path, lists in values.items() if path in element.leaves})
            for index in range(len(values[next(iter(element.leaves))]))
        ]

    def joined(lists: dict[Path, list[Any]]) -> SpaceValue:
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


def space_of(spec: TensorSpec) -> GymSpace:
    """Return the gymnasium space of a spec; the inverse of `codec_of` up to the encoding.

    Raises:
        SpecError: the spec has no gymnasium counterpart.
    """
    spaces = gym_backend("spaces")
    if isinstance(spec, Composite):
        return spaces.Dict({name: space_of(member) for name, member in spec.items()})
    shape = tuple(spec.shape)
    if isinstance(spec, NonTensor):
        return spaces.Text(max_length=4096)
    dtype = np.dtype(dtype_name(spec.dtype))
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
    raise SpecError(
        f"{type(spec).__name__} has no gymnasium space. Use Bounded, Unbounded, Binary or one of the choices."
    )


NO_SPACE = (torch.bfloat16, torch.complex32, torch.complex64, torch.complex128)
"""Dtypes that no space of a gym library has."""


def dict_space(tree: Any, spaces: ModuleType) -> GymSpace:
    """Return a nested dict of spaces as one space, names in order; a space is given as it is."""
    if not isinstance(tree, dict):
        return tree
    return spaces.Dict({name: dict_space(part, spaces) for name, part in sorted(tree.items())})


def shown_space(spec: TensorSpec, spaces: ModuleType) -> GymSpace:
    """Return the space of what is shown: it contains the arrays a spec holds, shape and dtype."""
    if isinstance(spec, Composite):
        members = {name: shown_space(spec[name], spaces) for name in sorted(spec.keys())}
        return spaces.Dict(members)
    if spec.dtype == torch.bool:
        return spaces.MultiBinary(tuple(spec.shape)) if spec.shape else spaces.Discrete(2)
    if isinstance(spec, Categorical) and spec.shape:
        dtype = np.dtype(dtype_name(spec.dtype))
        return spaces.MultiDiscrete(np.full(tuple(spec.shape), spec.n), dtype=dtype)
    return space_of(spec)


def asked_space(spec: TensorSpec, spaces: ModuleType) -> GymSpace:
    """Return the space of what is asked for: indices where a spec holds one-hot codes."""
    if isinstance(spec, Composite):
        members = {name: asked_space(spec[name], spaces) for name in sorted(spec.keys())}
        return spaces.Dict(members)
    batch = tuple(spec.shape[:-1])
    if isinstance(spec, OneHot):
        return spaces.MultiDiscrete(np.full(batch, spec.n)) if batch else spaces.Discrete(spec.n)
    if isinstance(spec, MultiOneHot):
        return spaces.MultiDiscrete(np.broadcast_to(spec.nvec, (*batch, len(spec.nvec))))
    if isinstance(spec, Binary) or spec.dtype == torch.bool:
        return spaces.MultiBinary(tuple(spec.shape))
    return space_of(spec)
