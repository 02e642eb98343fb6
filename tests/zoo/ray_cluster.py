"""A small Ray cluster on this machine, begun by the first test that needs one and ended with the program."""

from __future__ import annotations

import warnings
from typing import Any

from envkit import ParallelEnv

__all__ = ["begin_ray", "on_ray"]


def begin_ray() -> None:
    """Begin Ray for two actors at a time, with little memory; does nothing where it runs."""
    import ray

    if ray.is_initialized():
        return
    with warnings.catch_warnings():
        # Ray starts its daemons by fork, and JAX, once it is imported, warns of any; they exec at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=150 * 2**20,
            log_to_driver=False,
            configure_logging=False,
        )


def on_ray(*args: Any, **kwargs: Any) -> ParallelEnv:
    """Make a `ParallelEnv` whose sub-envs are on that cluster."""
    begin_ray()
    return ParallelEnv(*args, backend="ray", **kwargs)
