"""How many threads torch uses in this process while envs that limit them run.

There is one number for the whole process, and envs begin and end in any order: the limit of the
newest env that runs holds, and after the last one the number before the first.
"""

from __future__ import annotations

import torch

__all__ = ["ThreadLimit"]


class ThreadLimit:
    """A limit that holds from now on until `end`."""

    _running: list[ThreadLimit] = []  # noqa: RUF012  (of this process, as the number itself)
    _before = 0

    def __init__(self, num_threads: int):
        self.num_threads = num_threads
        if not self._running:
            ThreadLimit._before = torch.get_num_threads()
        self._running.append(self)
        torch.set_num_threads(num_threads)

    def end(self) -> None:
        """Let the limit of the newest env that still runs hold, or the number before all of them."""
        self._running.remove(self)
        newest = self._running[-1].num_threads if self._running else ThreadLimit._before
        torch.set_num_threads(newest)
