"""How the results of an asynchronous pool were received: numbers of batches, and how busy the caller was."""

from __future__ import annotations

import time
from collections.abc import Sequence

__all__ = ["ExchangeStats"]


class ExchangeStats:
    """Counts since the pool was made, or since they were last reset."""

    def __init__(self) -> None:
        self._received: dict[int, float] = {}  # time of envs that wait for their next action
        self._clear()

    def _clear(self) -> None:
        now = time.monotonic()
        self._batches = self._items = self._capacity = self._partial = self._answered = 0
        self._answer_s = self._busy_s = 0.0
        self._received = dict.fromkeys(self._received, now)
        self._busy_since = self._began = now if self._received else None

    def receive(self, envs: Sequence[int], max_get: int | None, *, asks_for_action: bool) -> None:
        """Count a batch of results; envs that ask for their next action wait for it from now on."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        self._batches += 1
        self._items += len(envs)
        self._capacity += len(envs) if max_get is None else max_get
        self._partial += max_get is not None and len(envs) < max_get
        if asks_for_action and envs:
            if not self._received:
                self._busy_since = now
            self._received.update(dict.fromkeys(envs, now))

    def send(self, envs: Sequence[int]) -> None:
        """Count actions that envs have waited for."""
        now = time.monotonic()
        for env in envs:
            since = self._received.pop(env, None)
            if since is not None:
                self._answer_s += now - since
                self._answered += 1
        if not self._received and self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None

    def told(self, *, reset: bool) -> dict[str, float | int]:
        """Give the counts under TorchRL's names, and begin again where ``reset`` is set."""
        now = time.monotonic()
        busy_s = self._busy_s + (0.0 if self._busy_since is None else now - self._busy_since)
        elapsed_s = 0.0 if self._began is None else now - self._began
        told = {
            "batches": self._batches,
            "items": self._items,
            "avg_batch_size": _ratio(self._items, self._batches),
            "batch_fill_ratio": _ratio(self._items, self._capacity),
            "partial_batch_fraction": _ratio(self._partial, self._batches),
            "avg_batch_to_action_ms": 1e3 * _ratio(self._answer_s, self._answered),
            "consumer_busy_fraction": _ratio(busy_s, elapsed_s),
        }
        if reset:
            self._clear()
        return told


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
