"""`AsyncEnvPool` over EnvPool's own way of giving results as they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from envkit.batched.async_pool import AsyncEnvPool
from envkit.batched.host import BUILDING, COMMAND_NAMES, Maker
from envkit.data.arguments import known_to, refuse_unknown
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, ArgumentTypeError, OptionError
from envkit.transport import Pool
from envkit_bridges.worlds.envpool.env import MultiThreadedEnv
from envkit_bridges.worlds.envpool.jobs import EnvPoolJobs
from envkit_bridges.worlds.envpool.library import require_keywords, require_name

__all__ = ["EnvPoolAsyncEnvPool"]


class EnvPoolAsyncEnvPool(AsyncEnvPool):
    """An `AsyncEnvPool` whose envs EnvPool steps with its own threads.

    Args:
        env_makers: the id of an env of the library, or a list that names it once for each env.
        create_env_kwargs: go to ``envpool.make_gymnasium``, the same for all.
        **options: of `AsyncEnvPool`. Rows are always exchanged in memory, and none is built anew.

    Raises:
        MissingLibraryError: (an ImportError) EnvPool is not installed.
        ArgumentTypeError: (a TypeError) ``env_makers`` holds no names.
        ArgumentError: the names or keywords of the envs differ, or the library has no such env.
        OptionError: (a TypeError) another way of exchanging data, or going on without rows, is asked for.
    """

    backend = "envpool"

    def _visit_transforms(self, visit: Any, given: Any) -> Any:
        return None  # envs of the library have no transforms

    def __init__(
        self,
        env_makers: str | Sequence[str],
        *,
        create_env_kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        **options: Any,
    ):
        refuse_unknown("AsyncEnvPool", options, known_to(AsyncEnvPool) or [])
        is_list = isinstance(env_makers, Iterable) and not isinstance(env_makers, str | EnvBase)
        names = list(env_makers) if is_list else [env_makers]
        if not names or not all(isinstance(name, str) for name in names):
            raise ArgumentTypeError(
                f"env_makers is {env_makers!r}, but with backend='envpool' must be the id of an env of EnvPool, or a "
                "list that names it once for each env: ['CartPole-v1'] * 8."
            )
        if len(set(names)) > 1:
            raise ArgumentError(
                f"env_makers names {sorted(set(names))}, but a pool of EnvPool holds envs of one kind. Make one "
                "pool for each, or take backend='threading'."
            )
        require_name(names[0])
        if options.get("use_buffers") is False or options.get("on_worker_failure") == "restart":
            raise OptionError(
                "with backend='envpool' rows are exchanged in memory and none is built anew. Leave use_buffers and "
                "on_worker_failure out."
            )
        self.env_name = names[0]
        make = partial(_pool_of_one, names[0])
        super().__init__([make] * len(names), create_env_kwargs=create_env_kwargs, **options)
        if any(kwargs != self._kwargs[0] for kwargs in self._kwargs):
            raise ArgumentError(
                f"create_env_kwargs is {create_env_kwargs!r}, but all envs of a pool of EnvPool are made alike. "
                "Pass one dict."
            )
        require_keywords(names[0], self._kwargs[0])

    def _make_pool(self, makers: list[Maker], described: frozenset[int]) -> Pool:
        return EnvPoolJobs(
            self.env_name,
            self.num_workers,
            self._kwargs[0],
            commands=COMMAND_NAMES,
            timeout_s=self.timeout,
            start_timeout_s=self.start_timeout,
            building=BUILDING,
        )


def _pool_of_one(env_name: str, **kwargs: Any) -> MultiThreadedEnv:
    return MultiThreadedEnv(1, env_name, create_env_kwargs=kwargs)
