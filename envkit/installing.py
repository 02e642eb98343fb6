"""The name under which envkit is installed, the command that adds one of its extras, and where it keeps files.

``envkit`` on the Python Package Index is another project, which parses environment variables. Ours is not published
there: extras are installed from a clone of the repository.
"""

import os
from pathlib import Path

DISTRIBUTION = "envkit-rl"
"""Distribution name, as in pyproject.toml. The import name is ``envkit``."""


def install_command(*extras: str) -> str:
    """Return the command that installs extras when it is run in the folder of a clone.

    Example:
        >>> install_command("brax", "gym")
        "pip install -e '.[brax,gym]'"
    """
    return f"pip install -e '.[{','.join(extras)}]'"


def install_hint(*extras: str) -> str:
    """Return the sentence of an error text that says how to install extras. The command ends it."""
    return f"In the folder of your clone of envkit, run: {install_command(*extras)}"


def cache_folder() -> Path:
    """Return the folder for files that can be made again: ``envkit`` in the user's cache folder, which may not exist yet.

    That is ``$XDG_CACHE_HOME``, else ``~/.cache``.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "envkit"
