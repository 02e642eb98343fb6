"""Find optional libraries, and say which extra brings a missing one.

Conventions
    extra  name in ``pip install 'envkit[extra]'``.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from envkit.errors import MissingLibraryError

__all__ = ["LIBRARIES", "get_available_libraries", "require"]

LIBRARIES = {
    "brax": "brax",
    "gymnasium": "gym",
    "jax": "jax",
    "matplotlib": "viz",
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
        if error.name is not None and error.name.partition(".")[0] != library.partition(".")[0]:
            raise  # the library is there, but something it needs is not
        extra = LIBRARIES.get(library.partition(".")[0])
        advice = f"pip install 'envkit[{extra}]'" if extra else f"pip install {library}"
        raise MissingLibraryError(
            f"{library!r} is not installed. Install it with: {advice}", name=library
        ) from error


def get_available_libraries() -> dict[str, bool]:
    """Say for each optional library whether it is installed."""
    return {name: importlib.util.find_spec(name) is not None for name in LIBRARIES}
