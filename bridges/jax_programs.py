"""The compiled programs behind a stateless env, one set for each batch size that occurs.

`Programs` owns everything that is traced: which sizes exist, how rows are padded to them, and what
each program returns. It works on arrays by name and does not know TensorDict.

Conventions
    rows      flat batch axis; callers flatten before and restore after.
    size      rows a program is compiled for: the env's own size as it is, else a power of two.
    state     the two packed buffers, floats (rows, width) and words int32 (rows, width).
    flags     bool (3, rows, 1): done, terminated, truncated.
    outputs   dict of leading-axis arrays, see `_outputs`; observation leaves by path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.functional import BatchedEnv, StatePacking, Timestep, unroll

__all__ = ["Programs", "padded_size"]

Path = tuple[str, ...]
Arrays = dict[Any, Any]


def padded_size(rows: int, own: int) -> int:
    """Give the compiled size for ``rows``: the env's own size, else the next power of two."""
    return own if rows == own else 1 << max(rows - 1, 0).bit_length()


class Programs:
    """Jitted reset, step, restart, advance and unroll of one batched env.

    Args:
        env: the env over rows.
        own_size: number of rows compiled without padding.

    ``traces`` counts how often each program was traced, by name; tests read it.
    """

    def __init__(self, env: BatchedEnv, own_size: int):
        self.env = env
        self.packing = StatePacking.of(env)
        self.own_size = own_size
        self.traces: dict[str, int] = {}
        self.init = self._jit(self._init, static_argnums=1)
        self.step = self._jit(self._step)
        self.masked_step = self._jit(self._masked_step)
        self.restart = self._jit(self._restart)
        self.advance = self._jit(self._advance)
        self.reseed = self._jit(self._reseed)
        self.unroll = self._jit(self._unroll, static_argnums=(4, 5, 6))

    def _jit(self, function: Callable, **options: Any) -> Callable:
        name = function.__name__.removeprefix("_")

        def counted(*args: Any) -> Any:
            self.traces[name] = self.traces.get(name, 0) + 1
            return function(*args)

        return jax.jit(counted, **options)

    # ----------------------------------------------------------------------------------- programs

    def _init(self, key: Any, size: int) -> Arrays:
        state, timestep = self.env.init(key, size)
        return self._outputs(state, timestep)

    def _step(self, packed: Arrays, action: Any) -> Arrays:
        state, timestep = self.env.step(self.packing.unpack(packed), action)
        return self._outputs(state, timestep)

    def _masked_step(self, packed: Arrays, action: Any, mask: Any, kept: Arrays) -> Arrays:
        stepped = self._step(packed, action)
        stepped["floats"], stepped["words"] = (
            rules.choose(mask, stepped[name], packed[name]) for name in ("floats", "words")
        )
        for path, value in kept["observation"].items():
            new = stepped["observation"][path]
            stepped["observation"][path] = rules.choose(mask, new, value)
        stepped["reward"] = rules.choose(
            mask, stepped["reward"], jnp.zeros_like(stepped["reward"])
        )
        stepped["flags"] = jnp.where(mask[None, :, None], stepped["flags"], kept["flags"])
        return stepped

    def _restart(self, packed: Arrays, mask: Any, kept: Arrays) -> Arrays:
        """Begin new episodes where ``mask`` is set; the other rows stay bit for bit."""
        observation, flags = kept["observation"], kept["flags"]
        state = self.packing.unpack(packed)
        timestep = Timestep(
            observation=self._observation_tree(observation),
            reward=jnp.zeros(mask.shape, jnp.float32),
            terminated=flags[1, :, 0],
            truncated=flags[2, :, 0],
        )
        state, timestep = self.env.restart_where(mask, state, timestep)
        outputs = self._outputs(state, timestep)
        outputs["flags"] = jnp.where(mask[None, :, None], outputs["flags"], flags)
        return outputs

    def _advance(self, packed: Arrays, action: Any) -> tuple[Arrays, Arrays]:
        """Step, and begin new episodes where one has ended."""
        state, timestep = self.env.step(self.packing.unpack(packed), action)
        done = rules.done_from(timestep.terminated, timestep.truncated)
        fresh_state, fresh = self.env.restart_where(done, state, timestep)
        return self._outputs(state, timestep), self._outputs(fresh_state, fresh)

    def _reseed(self, packed: Arrays, key: Any) -> Arrays:
        state = self.packing.unpack(packed)
        return self.packing.pack(self.env.reseed(state, key))
