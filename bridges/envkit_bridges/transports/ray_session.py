"""Ray in this process: begun where nobody has, and then ended after the last pool that uses it.

Conventions
    session  from the first pool that found no Ray to the end of the last pool that began meanwhile. Ray that
             somebody else began is used and left alone.
"""

from __future__ import annotations

import os

from envkit.errors import ArgumentError
from envkit_bridges.libraries import require

ray = require("ray")

__all__ = ["RaySession"]


class RaySession:
    """One pool's part in the session, from now on until `end`.

    Args:
        address: of the cluster, as ``ray.init`` takes it; None takes what that finds, or begins one here.

    Raises:
        ArgumentError: this process is connected to another cluster.
    """

    _users = 0  # of this process, as Ray itself
    _begun: tuple[str, str] | None = None  # the connection that a pool began

    def __init__(self, address: str | None):
        if not ray.is_initialized():
            ray.init(address=address, include_dashboard=False)
            RaySession._users, RaySession._begun = 0, _connection()
        elif address not in (None, "auto", known := ray.get_runtime_context().gcs_address):
            raise ArgumentError(
                f"backend_options['address'] is {address!r}, but this process is connected to Ray at "
                f"{known!r} already, and can be to one cluster only. Leave the address out, or call "
                "ray.shutdown() first."
            )
        RaySession._users += 1
        self._connection, self.owner_pid = _connection(), os.getpid()

    @property
    def is_alive(self) -> bool:
        """Whether this process is the one that began it, and Ray was not shut down since."""
        return (
            os.getpid() == self.owner_pid
            and ray.is_initialized()
            and _connection() == self._connection
        )

    def end(self) -> None:
        """Have no part in it any more, called once; the last pool ends Ray, if a pool began it."""
        if not self.is_alive:
            return
        RaySession._users -= 1
        if RaySession._begun == self._connection and RaySession._users == 0:
            ray.shutdown()


def _connection() -> tuple[str, str]:
    """Name this process's connection to Ray: jobs of a cluster have names of their own, clusters their nodes."""
    context = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id()
