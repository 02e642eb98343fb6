"""Find optional libraries, and say which extra brings a missing one.

Conventions
    extra  name in ``pip install 'envkit[extra]'``.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from envkit.errors import BrokenLibraryError, MissingLibraryError

__all__ = ["LIBRARIES", "explained", "get_available_libraries", "require"]

LIBRARIES = {
    "brax": "brax",
    "chess": "chess",
    "dm_control": "dm_control",
    "envpool": "envpool",
    "gymnasium": "gym",
    "gymnax": "gymnax",
    "h5py": "hdf5",
    "imageio": "video",
    "imageio_ffmpeg": "video",
    "jax": "jax",
    "jumanji": "jumanji",
    "matplotlib": "viz",
    "minari": "minari",
    "mpe2": "pettingzoo",
    "mujoco_playground": "playground",
    "pettingzoo": "pettingzoo",
    "pyarrow": "parquet",
    "ray": "ray",
    "stable_baselines3": "sb3",
    "torchrl": "torchrl",
    "tqdm": "viz",
}
"""Library name to the extra that brings it."""


def require(library: str) -> ModuleType:
    """Import an optional library.

    Raises:
        MissingLibraryError: it is not installed; the message names the extra that brings it.
        BrokenLibraryError: it is, and fails when it is imported.
    """
    try:
        return importlib.import_module(library)
    except Exception as error:
        name = _top(library)
        if isinstance(error, ModuleNotFoundError) and _top(error.name) == name:
            raise explained(error) from error
        wanted = f"envkit[{LIBRARIES[name]}]" if name in LIBRARIES else name
        raise BrokenLibraryError(
            f"{name!r} is installed, but fails when it is imported: {type(error).__name__}: {error}. What it "
            f"needs may be missing or of another version. Install it anew with: pip install '{wanted}'",
            name=name,
        ) from error


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
