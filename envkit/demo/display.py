"""What the demo shows while it works: a progress bar on a terminal, a few plain lines elsewhere.

Everything is said through `say`, which puts a line above a running bar. What envkit itself announces,
long compilations, comes the same way within `announcements_said`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tqdm import tqdm

__all__ = ["TrainingBar", "announcements_said", "say"]


def say(text: str) -> None:
    """Print a line at once; a bar that is on the screen moves below it."""
    tqdm.write(text)
    sys.stdout.flush()


class TrainingBar:
    """How far training is: a bar if stderr is a terminal, else a line for each evaluation."""

    def __init__(self, budget: int):
        self._bar = tqdm(
            total=budget, desc="training", unit=" steps", unit_scale=True, disable=None
        )

    def advance(self, steps: int) -> None:
        """Count environment steps."""
        self._bar.update(steps)

    def evaluated(self, steps: int, lengths: Mapping[str, float]) -> None:
        """Show mean episode lengths by simulator after ``steps`` steps."""
        found = ", ".join(f"{name} {length:.0f}" for name, length in lengths.items())
        if self._bar.disable:
            say(f"{steps:>11,} steps: {found}")
        else:
            self._bar.set_postfix_str(found)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


@contextmanager
def announcements_said() -> Iterator[None]:
    """Hand what the logger "envkit" announces to `say`, and to no other handler."""
    logger, handler = logging.getLogger("envkit"), _Sayer()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


class _Sayer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"  {self.format(record)}")
