"""The one way up: what a lower layer offers but a higher one does, looked up when it is called.

Imports point down. `EnvBase.append_transform`, `EnvBase.check_env_specs` and a few more are written
for users in the class they know, and done by modules above that class. They find them here by
name, in the table of the front door or in the one below. A contract of import-linter names who may.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

_NOT_PUBLIC = {
    "EnvPoolAsyncEnvPool": "envkit_bridges.worlds.envpool.async_pool",
    "RayActors": "envkit_bridges.transports.ray",
    "from_torchrl_transform": "envkit_bridges.exports.torchrl",
    "transform_and_sampler": "envkit_bridges.exports.torchrl_subclasses",
    "register_gym": "envkit_bridges.exports.gym_registry",
    "with_policy_transforms": "envkit.transforms.primer",
}

PRELOADED = (
    "torch",
    "tabulate",
    "tensordict",
    "gymnasium",
    "envkit.batched.env_host",
    "envkit_bridges.gym.gym_env",
)
"""Modules that worker processes find imported when they start, where they are installed.

With tabulate torch sums up at the end of each process what it has compiled, and imports it for that.
"""


def late(name: str) -> Any:
    """Return the function or class of this name, from a layer above the one that asks."""
    home = _NOT_PUBLIC.get(name)
    return getattr(import_module("envkit" if home is None else home), name)


def is_public(name: str) -> bool:
    """Check whether the front door offers a name."""
    return name in import_module("envkit")._HOME_OF


def told_elsewhere(package: str) -> Callable[[str], NoReturn]:
    """Make the ``__getattr__`` of a package where users look for what the front door offers.

    It raises ImportError, not AttributeError, for such a name: of the latter ``from package import name`` would
    drop the message.
    """

    def missing(name: str) -> NoReturn:
        if is_public(name):
            raise ImportError(
                f"{name!r} is not in {package}, but in envkit itself. Write: from envkit import {name}",
                name=package,
            )
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return missing
