"""Specs of envkit as specs of TorchRL, and back.

Both libraries name their classes and what these hold alike. So a spec is built again from its public
attributes, with the class of the same name in the other library. TorchRL is imported by `to_torchrl_spec`
alone: who holds a spec of theirs has done so.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch

import envkit.specs as envkit_specs
from envkit.errors import SpecError
from envkit.specs import Composite, TensorSpec

if TYPE_CHECKING:
    from torchrl.data import TensorSpec as TorchRLSpec

_Build = Callable[[Any, Any], Any]  # from a spec, with the classes of the library to build for


def from_torchrl_spec(spec: TorchRLSpec) -> TensorSpec:
    """Return a spec of TorchRL's as one of envkit's: same kind, shape, dtype, device, bounds and masks.

    A `Choice` of TorchRL's does not say which of its axes are rows, so one option is drawn for all.

    Args:
        spec: any spec of TorchRL.

    Raises:
        SpecError: (a ValueError) it is of no kind that envkit has.

    Example:
        >>> import torchrl.data
        >>> from envkit import Bounded, from_torchrl_spec
        >>> spec = from_torchrl_spec(torchrl.data.Bounded(-1.0, 1.0, shape=(2,)))
        >>> spec == Bounded(-1.0, 1.0, shape=(2,))
        True
    """
    return _rebuilt(spec, envkit_specs)


def to_torchrl_spec(spec: TensorSpec) -> TorchRLSpec:
    """Return a spec as one of TorchRL's: same kind, shape, dtype, device, bounds and masks.

    Args:
        spec: any spec of envkit.

    Raises:
        ModuleNotFoundError: TorchRL is not installed.

    Example:
        >>> import torchrl.data
        >>> from envkit import Bounded, to_torchrl_spec
        >>> spec = to_torchrl_spec(Bounded(-1.0, 1.0, shape=(2,)))
        >>> spec == torchrl.data.Bounded(-1.0, 1.0, shape=(2,))
        True
    """
    import torchrl.data

    return _rebuilt(spec, torchrl.data)


def _rebuilt(spec: Any, library: ModuleType) -> Any:
    if hasattr(spec, "stack_dim"):
        members = [_rebuilt(member, library) for member in spec.unbind(spec.stack_dim)]
        return torch.stack(members, spec.stack_dim)
    for kind in type(spec).__mro__:
        if kind.__name__ in _BUILDERS:
            return _BUILDERS[kind.__name__](spec, library)
    raise SpecError(
        f"{type(spec).__module__}.{type(spec).__name__} has no counterpart. Pass a "
        f"{', '.join(_BUILDERS)}, or a stack of them."
    )


def _placed(spec: Any) -> dict[str, Any]:
    return {"shape": spec.shape, "device": spec.device, "dtype": spec.dtype}


def _options(kind: str, sizes: str) -> _Build:
    return lambda spec, library: getattr(library, kind)(
        getattr(spec, sizes), **_placed(spec), mask=spec.mask
    )


def _composite(spec: Any, library: ModuleType) -> Any:
    entries = {
        key: None if entry is None else _rebuilt(entry, library)
        for key, entry in cast(Composite, spec).items()
    }
    placed = {"shape": spec.shape, "device": spec.device, "data_cls": spec.data_cls}
    return library.Composite(entries, **placed)


_BUILDERS: dict[str, _Build] = {
    "Binary": lambda spec, library: library.Binary(**_placed(spec)),
    **{name: _options(name, "n") for name in ("OneHot", "Categorical")},
    **{name: _options(name, "nvec") for name in ("MultiOneHot", "MultiCategorical")},
    "Bounded": lambda spec, library: library.Bounded(
        spec.space.low, spec.space.high, **_placed(spec), domain=spec.domain
    ),
    "Unbounded": lambda spec, library: library.Unbounded(**_placed(spec), domain=spec.domain),
    "NonTensor": lambda spec, library: library.NonTensor(
        shape=spec.shape, device=spec.device, example_data=spec.example_data, batched=spec.batched
    ),
    "Choice": lambda spec, library: library.Choice(
        [_rebuilt(option, library) for option in spec._choices]
    ),
    "Composite": _composite,
}
