"""The name under which envkit is installed, and the command that adds one of its extras.

``envkit`` on the Python Package Index is another project, which parses environment variables. Ours is not published
there: extras are installed from a clone of the repository.
"""

__all__ = ["DISTRIBUTION", "install_command", "install_hint"]

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
