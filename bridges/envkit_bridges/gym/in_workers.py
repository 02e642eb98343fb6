"""Envs by name that are built as several in worker processes where ``num_workers`` says so."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from envkit.batched.parallel import ParallelEnv
from envkit.data.arguments import as_int

__all__ = ["MaybeInWorkers"]


class MaybeInWorkers:
    """Base of a class of envs that takes ``num_workers``: above 1, what is made is a `ParallelEnv` of so many."""

    if not TYPE_CHECKING:  # which would look for the keywords here

        def __new__(cls, *args: Any, num_workers: int = 1, **kwargs: Any) -> Any:
            meaning = "the number of processes, or 1 to have the env in this one"
            num_workers = as_int("num_workers", num_workers, least=1, meaning=meaning)
            if num_workers > 1:
                return ParallelEnv(num_workers, partial(cls, *args, **kwargs))
            return super().__new__(cls)
