"""What envs of our own share: no picture of them is drawn, their random numbers come from one torch generator, saved with
them, and their parameters travel in the data, under ``params``.

Conventions
    generator  None until the first seed: numbers then come from torch's global generator.
    params     TensorDict of scalars, one for each element of the batch; a row that brings some of them has the
               defaults for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, Self

import torch
from tensordict import TensorDictBase

from envkit.data.arguments import require_tensordict
from envkit.data.plain import from_plain, plain
from envkit.env.base import EnvBase
from envkit.env.seeding import checked_seed
from envkit.errors import BatchSizeError, InputError, MissingKeyError, UnsupportedError
from envkit.specs import Composite, Unbounded
from envkit.specs.annotations import Destination


class Undrawn:
    """Base of an env that draws no picture.

    Attributes:
        shows: what to do in place of drawing it, for the message.
    """

    shows: ClassVar[str] = "Plot what it observes, with plot_rollout(data)"

    def render(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse to draw.

        Raises:
            UnsupportedError: (a NotImplementedError) always; the message says what to do instead.
        """
        raise UnsupportedError(
            f"{self!r} cannot be drawn: it has no method `render() -> frame`, a uint8 array of shape (H, W, 3). "
            f"{self.shows}, or write one in a subclass."
        )


class SeededEnv(Undrawn, EnvBase):
    """A batch-unlocked env that reads its state from the data and draws from its own generator."""

    _batch_locked = False
    _noise: torch.Generator | None = None
    _noise_seed: int | None = None

    def _set_seed(self, seed: int) -> None:
        self._noise_seed = checked_seed(seed)
        self._noise = torch.Generator(self.device or "cpu").manual_seed(self._noise_seed)

    def _uniform(self, shape: torch.Size, low: float, high: float) -> torch.Tensor:
        """Draw float32 numbers between two bounds."""
        return torch.rand(shape, **self._how_drawn()) * (high - low) + low

    def _normal(self, *shape: int) -> torch.Tensor:
        """Draw float32 numbers of mean 0 and variance 1."""
        return torch.randn(shape, **self._how_drawn())

    def _how_drawn(self) -> dict[str, Any]:
        return {"generator": self._noise, "dtype": torch.float32, "device": self.device}

    def _shape_of(self, td: TensorDictBase | None) -> torch.Size:
        """Return the batch size that a reset of ``td`` has."""
        return self.batch_size if td is None else td.batch_size

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Move specs and future outputs to a device, and begin the random numbers again there; returns self."""
        moved, before = super().to(*args, **kwargs), self._noise
        if before is not None and self._noise_seed is not None and before.device != self.device:
            self._set_seed(self._noise_seed)  # a generator cannot be moved
        return moved

    def _own_state(self) -> dict[str, Any]:
        own = super()._own_state()
        if self._noise is None:
            return own
        return {**own, "noise": plain(self._noise), "noise_seed": self._noise_seed}

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._take_own_state(state, strict=strict)
        self._noise = from_plain(state.get("noise"))
        self._noise_seed = state.get("noise_seed")


def default_parameters(
    td_params: TensorDictBase | None, defaults: TensorDictBase
) -> TensorDictBase:
    """Return the parameters of rows that bring none: ``td_params`` of the constructor over the defaults.

    Raises:
        DataTypeError: something else than a TensorDict was given.
        BatchSizeError: it has a batch size.
        MissingKeyError: it has no ``params``.
        InputError: (a ValueError) one is NaN or infinite.
    """
    parameters = defaults.get("params")
    if td_params is None:
        return parameters
    require_tensordict("td_params", td_params, "what gen_params() gives")
    if td_params.batch_size:
        raise BatchSizeError(
            f"td_params has batch size {tuple(td_params.batch_size)}, but holds one set of defaults, of batch size "
            "(). Parameters of each row are data: reset(env.gen_params(batch_size=[...]))."
        )
    changed = td_params.get("params", None)
    if changed is None or not set(changed.keys()) <= set(parameters.keys()):
        raise MissingKeyError(
            f"td_params holds {sorted(map(str, td_params.keys(True, True)))}, but must hold 'params' with some of "
            f"{sorted(parameters.keys())}. Pass what gen_params() gives."
        )
    for name, value in changed.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise InputError(
                f"('params', {name!r}) of td_params is {value.tolist()}, but must be finite. Correct it, or leave it "
                f"out for {parameters[name].item():g}."
            )
    return _over(parameters, changed)


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
    """Return the parameters of the rows of ``td``, batch size ``shape``, in their own memory on ``device``.

    Raises:
        InputError: (a ValueError) those that ``td`` brings are not one number for each row.
    """
    params = None if td is None else td.get("params", None)
    if params is not None:
        _require_of_rows(params, defaults, shape)
    rows = (defaults if device is None else defaults.to(device)).expand(shape)
    return (rows if params is None else _over(rows, params)).clone()


def _require_of_rows(params: TensorDictBase, defaults: TensorDictBase, shape: torch.Size) -> None:
    """Check that parameters that the data brings are one number for each row.

    Raises:
        InputError: (a ValueError) they are not.
    """
    if not isinstance(params, TensorDictBase):
        raise InputError(
            f"'params' is of type {type(params).__name__}, but holds parameters by name: {sorted(defaults.keys())}. Pass a "
            "TensorDict as gen_params(batch_size=[...]) gives it, or leave it out."
        )
    for name, value in params.items():
        if name in defaults.keys() and value.shape != shape:
            raise InputError(
                f"('params', {name!r}) has shape {tuple(value.shape)}, but there is one for each row of batch size "
                f"{tuple(shape)}. Expand or reshape it to that shape."
            )


def _over(base: TensorDictBase, changed: TensorDictBase) -> TensorDictBase:
    """Put parameters over others, in the dtypes of those."""
    chosen = {
        name: value.to(base[name].dtype) for name, value in changed.items() if name in base.keys()
    }
    return base.copy().update(chosen)
