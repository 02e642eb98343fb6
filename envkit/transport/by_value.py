"""Pickle objects for a process that did not run the caller's script.

What another process can import travels as a name, by plain pickle's rule. What it cannot import
travels by value: lambdas, local classes, and all that the script itself defines.

Conventions
    script  the module `__main__`. In a process that `multiprocessing` started by "spawn" or
            "forkserver", the script was imported under the name `__mp_main__`, which is missing in
            other processes just as well; cloudpickle takes that name for an ordinary module.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle

__all__ = ["dumps"]

_SCRIPT = "__mp_main__"
_registering = threading.RLock()  # cloudpickle's register is one for all threads


def dumps(thing: Any) -> bytes:
    """Pickle ``thing``; `pickle.loads` undoes it, in any process that has cloudpickle."""
    with _script_by_value():
        return cloudpickle.dumps(thing)


@contextmanager
def _script_by_value() -> Iterator[None]:
    """Have cloudpickle pickle by value what the script defines; afterwards all is as before."""
    script = sys.modules.get(_SCRIPT)
    with _registering:
        # Where the process was not started by multiprocessing, the name is one more for `__main__`.
        is_new = (
            script is not None
            and script.__name__ == _SCRIPT
            and _SCRIPT not in cloudpickle.list_registry_pickle_by_value()
        )
        if not is_new:
            yield
            return
        cloudpickle.register_pickle_by_value(script)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(script)
