"""DeepMind Control's suite: how it is imported, how it draws, and which tasks it has.

Conventions
    pair  domain and task: "cartpole" and "swingup"; "cartpole/swingup" in ids.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from envkit_bridges import offscreen
from envkit_bridges.libraries import quietly, require

__all__ = [
    "draw_without_window",
    "env_names",
    "fetching_names",
    "import_suite",
    "tasks_by_domain",
    "without_advice",
]


def import_suite() -> Any:
    """Import dm_control's suite, which finds no window where there is none and warns of it."""
    with quietly(), _on_the_calling_thread():
        suite = require("dm_control.suite")
    draw_without_window()
    return suite


@contextlib.contextmanager
def _on_the_calling_thread() -> Iterator[None]:
    """Have OSMesa draw where it is called, as EGL does: a thread of its own could not be left at exit without errors."""
    name = "DISABLE_RENDER_THREAD_OFFLOADING"  # read when dm_control is imported
    chosen = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if chosen is None:
            os.environ.pop(name, None)


def draw_without_window() -> None:
    """Have dm_control choose how it draws at its first picture: some tasks draw in a reset, or a user's code does."""
    drawing: Any = importlib.import_module("dm_control._render")

    def first_renderer(*args: Any, **kwargs: Any) -> Any:
        offscreen.prepare()
        if drawing.Renderer is first_renderer:
            importlib.reload(drawing)  # MUJOCO_GL was set after the import
        return drawing.Renderer(*args, **kwargs)

    if drawing.Renderer.__module__ != __name__ and not offscreen.is_chosen():
        drawing.Renderer = first_renderer


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Leave out what MuJoCo says of the age of dm_control's own models."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return "is deprecated" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


def env_names() -> list[str]:
    """List all pairs of the suite, "cartpole/swingup" say, sorted.

    Raises:
        MissingLibraryError: dm_control is not installed.
    """
    return sorted("/".join(pair) for pair in import_suite().ALL_TASKS)


def fetching_names() -> frozenset[str]:
    """Name those that are fetched from the network: none."""
    return frozenset()


def tasks_by_domain() -> list[tuple[str, list[str]]]:
    """List the domains with their tasks: those of the benchmark first, then extra ones."""
    suite = import_suite()
    tasks: dict[str, list[str]] = {}
    for domain, task in (*suite.BENCHMARKING, *suite.EXTRA):
        tasks.setdefault(domain, []).append(task)
    return list(tasks.items())
