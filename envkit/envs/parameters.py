"""Parameters of an env that travel in the data, under ``params``: defaults, specs, and those of a reset.

Conventions
    params  TensorDict of scalars, one for each element of the batch; a row that brings some of them has the
            defaults for the others.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from envkit.data.arguments import require_tensordict
from envkit.errors import BatchSizeError, InputError, MissingKeyError
from envkit.specs import Composite, Unbounded

__all__ = ["default_parameters", "parameter_specs", "parameters_in"]


def default_parameters(given: TensorDictBase | None, defaults: TensorDictBase) -> TensorDictBase:
    """Give the parameters of rows that bring none: those ``given`` to the constructor over the defaults.

    Raises:
        DataTypeError: something else than a TensorDict was given.
        BatchSizeError: it has a batch size.
        MissingKeyError: it has no ``params``.
        InputError: (a ValueError) one is NaN or infinite.
    """
    known = defaults.get("params")
    if given is None:
        return known
    require_tensordict("td_params", given, "what gen_params() gives")
    if given.batch_size:
        raise BatchSizeError(
            f"td_params has batch size {tuple(given.batch_size)}, but holds one set of defaults, of batch size "
            "(). Parameters of each row are data: reset(env.gen_params(batch_size=[...]))."
        )
    own = given.get("params", None)
    if own is None or not set(own.keys()) <= set(known.keys()):
        raise MissingKeyError(
            f"td_params holds {sorted(map(str, given.keys(True, True)))}, but must hold 'params' with some of "
            f"{sorted(known.keys())}. Pass what gen_params() gives."
        )
    for name, value in own.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise InputError(
                f"('params', {name!r}) of td_params is {value.tolist()}, but must be finite. Correct it, or leave it "
                f"out for {known[name].item():g}."
            )
    return _over(known, own)


def parameter_specs(defaults: TensorDictBase) -> Composite:
    """Declare parameters: any number of their dtypes."""
    leaves = {
        name: Unbounded((), device=value.device, dtype=value.dtype)
        for name, value in defaults.items()
    }
    return Composite(leaves, device=defaults.device)


def parameters_in(
    td: TensorDictBase | None,
    defaults: TensorDictBase,
    shape: torch.Size,
    device: torch.device | None,
) -> TensorDictBase:
    """Give the parameters of the rows of ``td``, batch size ``shape``, in memory of their own on ``device``.

    Raises:
        InputError: (a ValueError) those that ``td`` brings are not one number for each row.
    """
    own = None if td is None else td.get("params", None)
    if own is not None:
        _require_of_rows(own, defaults, shape)
    rows = (defaults if device is None else defaults.to(device)).expand(shape)
    return (rows if own is None else _over(rows, own)).clone()


def _require_of_rows(own: TensorDictBase, defaults: TensorDictBase, shape: torch.Size) -> None:
    """Check that parameters that the data brings are one number for each row.

    Raises:
        InputError: (a ValueError) they are not.
    """
    if not isinstance(own, TensorDictBase):
        raise InputError(
            f"'params' is a {type(own).__name__}, but holds parameters by name: {sorted(defaults.keys())}. Pass a "
            "TensorDict as gen_params(batch_size=[...]) gives it, or leave it out."
        )
    for name, value in own.items():
        if name in defaults.keys() and value.shape != shape:
            raise InputError(
                f"('params', {name!r}) has shape {tuple(value.shape)}, but there is one for each row of batch size "
                f"{tuple(shape)}. Expand or reshape it to that shape."
            )


def _over(known: TensorDictBase, own: TensorDictBase) -> TensorDictBase:
    """Put parameters over others, in the dtypes of those."""
    chosen = {
        name: value.to(known[name].dtype) for name, value in own.items() if name in known.keys()
    }
    return known.copy().update(chosen)
