"""Find optional libraries, and say which extra brings a missing one.

Conventions
    extra  name in ``pip install 'envkit[extra]'``.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from envkit.errors import MissingLibraryError

__all__ = ["LIBRARIES", "explained", "get_available_libraries", "require"]

LIBRARIES = {
    "brax": "brax",
    "envpool": "envpool",
    "gymnasium": "gym",
    "imageio": "video",
    "imageio_ffmpeg": "video",
    "jax": "jax",
    "matplotlib": "viz",
    "ray": "ray",
    "tqdm": "viz",
}
"""Library name to the extra that brings it."""


def require(library: str) -> ModuleType:
    """Import an optional library.

    Raises:
        MissingLibraryError: it is not installed; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if _top(error.name) != _top(library):
            raise  # the library is there, but something it needs is not
        raise explained(error) from error


def explained(error: ModuleNotFoundError) -> ImportError:
    """Say how to install what an import did not find; ``error`` itself when envkit cannot know."""
    library = _top(error.name)
    if library not in LIBRARIES:
        return error
    return MissingLibraryError(
        f"{library!r} is not installed. Install it with: pip install 'envkit[{LIBRARIES[library]}]'",
        name=library,
    )


def get_available_libraries() -> dict[str, bool]:
    """Say for each optional library whether it is installed."""
    return {name: importlib.util.find_spec(name) is not None for name in LIBRARIES}


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]
