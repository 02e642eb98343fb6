"""A fresh Python interpreter that runs one function of envkit.

This module decides with what flags, path and signals it starts. It does not know what runs.
"""

import multiprocessing.spawn
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, cast

_PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "
    "sys.path[:] = {path!r}; from {module} import main; main(*{arguments!r})"
)


def run_python(
    module: str, arguments: Sequence[int], fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start an interpreter that calls ``module.main(*arguments)`` and inherits ``fds``.

    It ignores Ctrl-C, which is its parent's to handle, and has no standard input. It leads a session
    of its own: no signal for the group or the terminal of this process reaches it.
    """
    program = _PROGRAM.format(path=absolute_sys_path(), module=module, arguments=tuple(arguments))
    executable = os.fsdecode(multiprocessing.spawn.get_executable())
    flags: list[str] = cast(Any, subprocess)._args_from_interpreter_flags()
    # Ctrl-C between here and the first line of the program must not kill it: blocked signals
    # stay blocked across exec.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(
            [executable, *flags, "-c", program],
            pass_fds=fds,
            env=worker_environ(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def worker_environ() -> dict[str, str]:
    """Environment variables for a worker: those of now, and JAX on the CPU.

    One process that owns a GPU is enough; ``ENVKIT_WORKER_JAX_PLATFORMS`` says otherwise.
    """
    return {
        **os.environ,
        "JAX_PLATFORMS": os.environ.get("ENVKIT_WORKER_JAX_PLATFORMS", "cpu"),
    }


def absolute_sys_path() -> list[str]:
    """`sys.path` as it is now, with the empty entry spelled out, or left out if it leads nowhere."""
    here = working_directory() or ""
    return [entry or here for entry in sys.path if entry or here]


def working_directory() -> str | None:
    """Directory that this process is in; None if that was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
