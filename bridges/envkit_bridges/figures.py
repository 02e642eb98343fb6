"""Pictures that a library draws with matplotlib, as arrays; no window opens.

Conventions
    frame  uint8 (H, W, 3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from envkit_bridges.libraries import require

__all__ = ["in_memory"]


@contextlib.contextmanager
def in_memory() -> Iterator[Callable[[], np.ndarray]]:
    """Have pyplot draw into memory, and give a function that reads its current figure as a frame.

    Figures that are made inside are closed at the end; the user's own figures and backend stay.

    Raises:
        MissingLibraryError: (an ImportError) matplotlib is not installed.
    """
    pyplot = require("matplotlib.pyplot")
    backend, is_interactive = require("matplotlib").get_backend(), pyplot.isinteractive()
    before = set(pyplot.get_fignums())

    def frame() -> np.ndarray:
        canvas = pyplot.gcf().canvas
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

    pyplot.switch_backend("Agg")
    pyplot.ion()  # else libraries show their figures, which Agg cannot
    try:
        yield frame
    finally:
        for number in set(pyplot.get_fignums()) - before:
            pyplot.close(number)
        pyplot.switch_backend(backend)
        pyplot.interactive(is_interactive)
