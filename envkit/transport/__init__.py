"""Moves bytes between processes and wakes workers; knows NumPy and the standard library only."""

from envkit.transport.block import Block
from envkit.transport.failure import Failure
from envkit.transport.forkserver import ForkServer, shared_fork_server
from envkit.transport.host import Host, MakeHost, RowCursor, RowsFailedError
from envkit.transport.layout import Field, Layout, Traffic
from envkit.transport.local import LocalPool
from envkit.transport.pool import Pool, Selection
from envkit.transport.processes import ProcessPool

__all__ = [
    "Block",
    "Failure",
    "Field",
    "ForkServer",
    "Host",
    "Layout",
    "LocalPool",
    "MakeHost",
    "Pool",
    "ProcessPool",
    "RowCursor",
    "RowsFailedError",
    "Selection",
    "Traffic",
    "shared_fork_server",
]
