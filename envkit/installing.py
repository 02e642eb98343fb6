"""The name under which envkit is installed, the table of optional libraries, and the folder where envkit keeps files.

``envkit`` on the Python Package Index is another project, which parses environment variables. Ours is not published
there: extras are installed from a clone of the repository.

To add a library of envs, write its module in ``bridges/envkit_bridges/worlds`` and a line in `LIBRARIES`: `make`,
`list_envs`, error messages and ``envkit doctor`` read that line.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DISTRIBUTION = "envkit-rl"
"""Distribution name, as in pyproject.toml. The import name is ``envkit``."""

Kind = Literal["stateless", "stateful", "batched"]


@dataclass(frozen=True)
class Library:
    """An optional library.

    Attributes:
        module: name by which it is imported.
        distribution: name by which it is installed.
        extra: of envkit, which brings it.
        wrapper: public class around its env objects, if it has any.
        world: name in ids, if `make` builds its envs; the meaning of it and of ``kind`` is in
            `envkit_bridges.catalogue.ids`.
        kind: of its envs.
        adapter: module in ``bridges/envkit_bridges/worlds`` that lists and builds its envs.
        env: class of the adapter that builds an env by name; "" where the adapter has a function `build` for that.
        limit: keyword of its envs that truncates episodes after so many steps, if they have one.
    """

    module: str
    distribution: str
    extra: str
    wrapper: str | None = None
    world: str | None = None
    kind: Kind = "stateful"
    adapter: str = ""
    env: str = ""
    limit: str | None = None


def _of_jax(name: str, classes: str, module: str | None = None) -> Library:
    """Describe a library of envs in JAX.

    Args:
        name: in ids, and of its distribution, its extra and its adapter.
        classes: what ``Env`` and ``Wrapper`` follow in the names of its classes.
        module: by which it is imported; None where that is ``name``.
    """
    return Library(
        module or name,
        name,
        name,
        wrapper=f"{classes}Wrapper",
        world=name,
        kind="stateless",
        adapter=name,
        env=f"{classes}Env",
        limit="episode_length",
    )


LIBRARIES = {
    library.module: library
    for library in (
        _of_jax("brax", "Brax"),
        _of_jax("craftax", "Craftax"),
        _of_jax("gymnax", "Gymnax"),
        _of_jax("jaxmarl", "JaxMARL"),
        _of_jax("jumanji", "Jumanji"),
        _of_jax("navix", "Navix"),
        _of_jax("pgx", "Pgx"),
        _of_jax("playground", "Playground", module="mujoco_playground"),
        _of_jax("xminigrid", "XMiniGrid"),
        Library(
            "dm_control",
            "dm-control",
            "dm_control",
            wrapper="DMControlWrapper",
            world="dm_control",
            adapter="dm_control",
        ),
        Library(
            "envpool",
            "envpool",
            "envpool",
            world="envpool",
            kind="batched",
            adapter="envpool.multithreaded_env",
            limit="max_episode_steps",
        ),
        Library(
            "gymnasium",
            "gymnasium",
            "gym",
            wrapper="GymWrapper",
            world="gym",
            adapter="gymnasium",
            limit="max_episode_steps",
        ),
        Library(
            "mjlab",
            "mjlab",
            "mjlab",
            wrapper="MJLabWrapper",
            world="mjlab",
            kind="batched",
            adapter="mjlab",
            limit="max_steps",
        ),
        Library(
            "pettingzoo",
            "pettingzoo",
            "pettingzoo",
            wrapper="PettingZooWrapper",
            world="pettingzoo",
            adapter="pettingzoo.pettingzoo_env",
        ),
        Library(
            "vmas",
            "vmas",
            "vmas",
            wrapper="VmasWrapper",
            world="vmas",
            kind="batched",
            adapter="vmas",
            limit="max_steps",
        ),
        Library("mpe2", "mpe2", "pettingzoo", wrapper="PettingZooWrapper"),
        Library("torchrl", "torchrl", "torchrl", wrapper="TorchRLWrapper"),
        Library("chess", "chess", "chess"),
        Library("h5py", "h5py", "hdf5"),
        Library("imageio", "imageio", "video"),
        Library("imageio_ffmpeg", "imageio-ffmpeg", "video"),
        Library("jax", "jax", "jax"),
        Library("matplotlib", "matplotlib", "viz"),
        Library("minari", "minari", "minari"),
        Library("pyarrow", "pyarrow", "parquet"),
        Library("ray", "ray", "ray"),
        Library("stable_baselines3", "stable-baselines3", "sb3"),
        Library("tqdm", "tqdm", "viz"),
    )
}
"""Libraries by the name by which they are imported."""


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
