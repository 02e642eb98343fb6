"""Moves bytes between processes and wakes workers; knows NumPy and the standard library only."""

from envkit.transport.block import Block
from envkit.transport.failure import Failure
from envkit.transport.forkserver import ForkServer, shared_fork_server
from envkit.transport.host import Host, MakeHost, RowCursor, RowsFailedError
from envkit.transport.in_process import ThisThread, Threads
from envkit.transport.layout import Field, Layout, Traffic
from envkit.transport.pool import Backend, Job, Pool, Selection
from envkit.transport.processes import Processes

__all__ = [
    "Backend",
    "Block",
    "Failure",
    "Field",
    "ForkServer",
    "Host",
    "Job",
    "Layout",
    "MakeHost",
    "Pool",
    "Processes",
    "RowCursor",
    "RowsFailedError",
    "Selection",
    "ThisThread",
    "Threads",
    "Traffic",
    "shared_fork_server",
]
