"""Where data deviates from specs, in words.

This module compares; it runs no environment. Each deviation is one line that names the entry, what it
is and what its spec says.

Conventions
    specs    `EnvBase.specs`, shape (*batch,).
    fake     zeros in the layout that the specs declare, batch size (*batch,).
    real     data of batch size (*batch, *time), with or without ``next``; lazy stacks are compared
             part by part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from envkit.data.paths import Path, as_key, as_path
from envkit.data.transition import leaves
from envkit.specs import Composite, TensorSpec, contains_lazy_spec

_KINDS = {
    (): (
        ("output", "observation"),
        ("input", "state"),
        ("input", "action"),
        ("output", "done"),
    ),
    ("next",): (("output", "observation"), ("output", "reward"), ("output", "done")),
}

_FOUND = ": found "


def deviations(
    specs: Composite,
    fake: TensorDictBase,
    real: TensorDictBase,
    *,
    device: torch.device | None,
    check_dtype: bool,
    accept_nan: bool = False,
) -> list[str]:
    """List where ``real`` differs from ``fake`` in keys, shapes, dtypes and devices, or leaves its specs.

    Args:
        specs: say which values are allowed, and which sizes only data can tell.
        fake: what is expected; without ``next`` only the root is compared.
        real: the data.
        device: where data must be; None does not ask.
        check_dtype: compare dtypes too.
        accept_nan: NaN may stand for an unknown value.
    """
    same = partial(deviations, device=device, check_dtype=check_dtype, accept_nan=accept_nan)
    stacked = _stacked_along(real)
    if stacked is not None and stacked >= specs.ndim:
        steps = (same(specs, fake, step) for step in real.unbind(stacked))
        return distinct(line for lines in steps for line in lines)
    if specs.ndim and (contains_lazy_spec(specs) or isinstance(real, LazyStackedTensorDict)):
        return [
            f"{line} (env {index})"
            for index in range(specs.shape[0])
            for line in same(specs[index], fake[index], real[index])
        ]
    got, wanted = dict(_entries(real)), dict(_entries(fake))
    declared = _declared(specs)
    for path, spec in _next_states(specs).items():
        if path in got and path not in wanted:
            wanted[path], declared[path] = spec.zero(), spec
    lines = _key_lines(set(wanted), set(got))
    for path in sorted((path for path in wanted if path in got), key=_root_first):
        value, spec = got[path], declared.get(_named(path))
        if spec is None:
            spec = _of_one_part(specs, path)
        else:
            for part in (name for name in path if isinstance(name, int)):
                spec = spec[(*(slice(None),) * specs.ndim, part)]
        dynamic = spec.shape if -1 in spec.shape else getattr(wanted[path], "shape", ())
        event = tuple(dynamic[specs.ndim :])
        lines += _leaf_lines(
            path, wanted[path], value, event, len(real.batch_size), device, check_dtype
        ) or _value_lines(path, value, spec[(0,) * specs.ndim], check_dtype, accept_nan)
    return lines


def _stacked_along(td: TensorDictBase) -> int | None:
    """Return the batch axis along which a TensorDict, or a node of it, is a lazy stack; None where nothing is."""
    if isinstance(td, LazyStackedTensorDict):
        return td.stack_dim
    nodes = (node for node in td.values() if isinstance(node, TensorDictBase))
    dims = (_stacked_along(node) for node in nodes if not is_non_tensor(node))
    return next((dim for dim in dims if dim is not None and dim < td.batch_dims), None)


def distinct(lines: Iterable[str]) -> list[str]:
    """Drop lines that only repeat for other values what another says."""
    distinct: dict[str, str] = {}
    for line in lines:
        distinct.setdefault(line.partition(_FOUND)[0], line)
    return list(distinct.values())


def changed_paths(before: TensorDictBase, after: TensorDictBase) -> list[Path]:
    """List the tensors of ``before`` that ``after``, of the same layout, holds with other values."""
    if isinstance(before, LazyStackedTensorDict):
        dim = before.stack_dim
        parts = zip(before.unbind(dim), after.unbind(dim), strict=True)
        return list(dict.fromkeys(path for part in parts for path in changed_paths(*part)))
    now = dict(leaves(after))
    return [
        path
        for path, value in leaves(before)
        if isinstance(value, torch.Tensor) and not _is_equal(value, now[path])
    ]


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_nested:
        return all(map(_is_equal, one.unbind(), other.unbind()))
    both_nan = (one != one) & (other != other)
    return bool(((one == other) | both_nan).all())


def _entries(td: TensorDictBase) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """List the leaves of a transition; those of an uneven stack have the number of the part in their path."""
    for path, value in leaves(td):
        if isinstance(value, LazyStackedTensorDict) and not is_non_tensor(value):
            for index, part in enumerate(value.tensordicts):
                yield from (((*path, index, *below), leaf) for below, leaf in _entries(part))
        elif is_tensor_collection(value) and not is_non_tensor(value):  # a tensorclass
            yield from (((*path, *below), leaf) for below, leaf in _entries(value.to_tensordict()))
        else:
            yield path, value


def _named(path: tuple[Any, ...]) -> Path:
    """Return the path in the specs of what has ``path`` in the data."""
    return tuple(name for name in path if isinstance(name, str))


def _declared(specs: Composite) -> dict[Path, TensorSpec]:
    """Return the spec of every entry of a transition, by path."""
    return {
        (*place, *as_path(key)): leaf
        for place, kinds in _KINDS.items()
        for side, kind in kinds
        for key, leaf in specs[f"{side}_spec", f"full_{kind}_spec"].items(True, True)
    }


def _of_one_part(specs: Composite, path: tuple[Any, ...]) -> TensorSpec:
    """Return the spec of an entry that only some parts of an uneven stack have."""
    place, names = (path[:1], path[1:]) if path[0] == "next" else ((), path)
    for side, kind in _KINDS[place]:
        spec: Any = specs[f"{side}_spec", f"full_{kind}_spec"]
        for name in names:
            if isinstance(name, int):
                spec = spec[(*(slice(None),) * specs.ndim, name)]
            else:
                spec = spec.get(name, None) if isinstance(spec, Composite) else None
            if spec is None:
                break
        else:
            return spec
    raise AssertionError(f"{path} is expected, so a spec declares it")


def _next_states(specs: Composite) -> dict[Path, TensorSpec]:
    """Return the spec of each state under ``next``: a step may give it, and the next root has it then."""
    states = specs["input_spec", "full_state_spec"]
    return {("next", *as_path(key)): leaf for key, leaf in states.items(True, True)}


def _root_first(path: Path) -> tuple[bool, Path]:
    return path[0] == "next", path


def _key_lines(wanted: set[tuple[Any, ...]], got: set[tuple[Any, ...]]) -> list[str]:
    cures = {path: "_step" if path[0] == "next" else "_reset" for path in wanted}
    return [
        *(
            f"{as_key(path)!r} is present in real but not in fake: declare it in a spec, or do not "
            "return it"
            for path in sorted(got - wanted, key=_root_first)
        ),
        *(
            f"{as_key(path)!r} is present in fake but not in real: return it from {cures[path]}, or "
            "do not declare it"
            for path in sorted(wanted - got, key=_root_first)
        ),
    ]


def _leaf_lines(
    path: Path,
    wanted: Any,
    got: Any,
    event: tuple[int, ...],
    batch_ndim: int,
    device: torch.device | None,
    check_dtype: bool,
) -> list[str]:
    key = as_key(path)
    if not isinstance(got, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        if isinstance(got, torch.Tensor) == isinstance(wanted, torch.Tensor):
            return []
        kinds = [
            "a tensor" if isinstance(v, torch.Tensor) else "non-tensor data" for v in (got, wanted)
        ]
        return [f"{key!r} is {kinds[0]}, its spec says {kinds[1]}"]
    lines = []
    if not got.is_nested:  # the shape of a nested tensor is that of its parts, which `is_in` asks
        got_event = tuple(got.shape[batch_ndim:])
        sizes = zip(event, got_event, strict=False)
        if len(event) != len(got_event) or any(said not in (-1, size) for said, size in sizes):
            lines.append(f"{key!r} has shape {got_event}, its spec says {event}")
    if check_dtype and wanted.dtype != got.dtype:
        lines.append(f"{key!r} has dtype {got.dtype}, its spec says {wanted.dtype}")
    if device is not None and wanted.device != got.device:
        lines.append(f"{key!r} is on {got.device}, its spec says {wanted.device}")
    return lines


def _value_lines(
    path: Path, value: Any, spec: TensorSpec, check_dtype: bool, accept_nan: bool
) -> list[str]:
    if not isinstance(value, torch.Tensor) or spec.dtype is None:
        return []
    if not check_dtype and not value.is_nested:
        value = value.to(spec.dtype)
    has_nan = value.is_floating_point() and not value.is_nested and bool(value.isnan().any())
    if has_nan and not accept_nan:
        return [f"{as_key(path)!r} holds NaN"]
    if spec.is_in(value):
        return []
    found = ""
    if not value.is_nested and value.numel():
        found = f"{_FOUND}{value.min().item():g} to {value.max().item():g}"
    return [f"{as_key(path)!r} has values outside its spec {spec}{found}"]
