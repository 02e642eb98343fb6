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

from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envkit.keys import Path, as_key, as_path
from envkit.specs import Composite, contains_lazy_spec
from envkit.transition import leaves

__all__ = ["changed", "deviations"]

_KINDS = {
    "root": (
        ("output", "observation"),
        ("input", "state"),
        ("input", "action"),
        ("output", "done"),
    ),
    "next": (("output", "observation"), ("output", "reward"), ("output", "done")),
}


def deviations(
    specs: Composite,
    fake: TensorDictBase,
    real: TensorDictBase,
    *,
    device: torch.device | None,
    check_dtype: bool,
) -> list[str]:
    """List where ``real`` differs from ``fake`` in keys, shapes, dtypes and devices, or leaves its specs.

    Args:
        specs: say which values are allowed, and which sizes only data can tell.
        fake: what is expected; without ``next`` only the root is compared.
        real: the data.
        device: where data must be; None does not ask.
        check_dtype: compare dtypes too.
    """
    same = partial(deviations, device=device, check_dtype=check_dtype)
    if isinstance(real, LazyStackedTensorDict) and real.stack_dim >= specs.ndim:
        steps = (same(specs, fake, step) for step in real.unbind(real.stack_dim))
        return list(dict.fromkeys(line for lines in steps for line in lines))
    if specs.ndim and (contains_lazy_spec(specs) or isinstance(real, LazyStackedTensorDict)):
        return [
            f"{line} (env {index})"
            for index in range(specs.shape[0])
            for line in same(specs[index], fake[index], real[index])
        ]
    lines = _key_lines(fake, real)
    got, wanted = dict(leaves(real)), dict(leaves(fake))
    dynamic = _dynamic_shapes(specs)
    for path in (path for path in wanted if path in got):
        event = tuple(dynamic.get(path, getattr(wanted[path], "shape", ()))[specs.ndim :])
        lines += _leaf_lines(
            path, wanted[path], got[path], event, len(real.batch_size), device, check_dtype
        )
    return lines + _value_lines(specs, real)


def changed(before: TensorDictBase, after: TensorDictBase) -> list[Path]:
    """List the tensors of ``before`` that ``after``, of the same layout, holds with other values."""
    now = dict(leaves(after))
    return [
        path
        for path, value in leaves(before)
        if isinstance(value, torch.Tensor) and not _is_equal(value, now[path])
    ]


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_nested:
        return all(map(torch.equal, one.unbind(), other.unbind()))
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def _dynamic_shapes(specs: Composite) -> dict[Path, torch.Size]:
    """Give the shapes that have sizes only data can tell, by path in a transition."""
    shapes = {}
    for side, kind in {kind for kinds in _KINDS.values() for kind in kinds}:
        for key, leaf in specs[f"{side}_spec", f"full_{kind}_spec"].items(True, True):
            if -1 in leaf.shape:
                shapes[as_path(key)] = shapes[("next", *as_path(key))] = leaf.shape
    return shapes


def _key_lines(fake: TensorDictBase, real: TensorDictBase) -> list[str]:
    wanted, got = ({path for path, _ in leaves(td)} for td in (fake, real))
    cures = {path: "_step" if path[0] == "next" else "_reset" for path in wanted}
    return [
        *(
            f"{as_key(path)!r} is present in real but not in fake: declare it in a spec, or do not "
            "return it"
            for path in sorted(got - wanted)
        ),
        *(
            f"{as_key(path)!r} is present in fake but not in real: return it from {cures[path]}, or "
            "do not declare it"
            for path in sorted(wanted - got)
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


def _value_lines(specs: Composite, real: TensorDictBase) -> list[str]:
    lines = []
    for place, kinds in _KINDS.items():
        td = real if place == "root" else real.get("next", None)
        for side, kind in kinds if td is not None else ():
            spec = specs[f"{side}_spec", f"full_{kind}_spec"]
            single = spec[(0,) * specs.ndim] if specs.ndim else spec
            lines += [f"{line} at {place}" for line in _outside(single, td)]
    return list(dict.fromkeys(lines))


def _outside(spec: Composite, td: TensorDictBase) -> list[str]:
    lines = []
    for key, leaf in spec.items(True, True):
        value = td.get(key, None)
        if isinstance(value, torch.Tensor) and leaf.dtype is not None and not leaf.is_in(value):
            lines.append(f"{key!r} has values outside its spec {leaf}")
    return lines
