"""What envs of our own share: no picture of them is drawn, and their random numbers come from one torch generator, saved with them.

Conventions
    generator  None until the first seed: numbers then come from torch's global generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, Self

import torch
from tensordict import TensorDictBase

from envkit.data.plain import from_plain, plain
from envkit.env.base import EnvBase
from envkit.env.seeding import checked_seed
from envkit.errors import UnsupportedError
from envkit.specs.annotations import Destination

__all__ = ["SeededEnv", "Undrawn"]


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
    """A batch-unlocked env that reads its state from the data and draws from a generator of its own."""

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
        """Give the batch size that a reset of ``td`` has."""
        return self.batch_size if td is None else td.batch_size

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Move specs and future outputs to a device, and begin the random numbers anew there; returns self."""
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
