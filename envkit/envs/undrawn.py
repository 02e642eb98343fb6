"""Envs that show themselves by their entries alone, and say so where a picture is asked for."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from envkit.errors import UnsupportedError

__all__ = ["Undrawn"]


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
