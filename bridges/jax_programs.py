"""The compiled programs behind a stateless env, and how their arrays are named.

`Programs` owns everything that is traced. It works on flat rows and on arrays by path; it does not
know TensorDict, torch, or batches of more than one axis.

Conventions
    rows     flat batch axis, padded to the size a program is compiled for.
    path     tuple of names; a state has either the two paths `PACKED`, or one for each leaf.
    flags    bool (3, rows, 1): done, terminated, truncated.
    outputs  dict with "observation" and "state" (arrays by path), "reward" (rows, 1), "flags".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from envkit.errors import KeyCollisionError
from envkit.functional import (
    BatchedEnv,
    Timestep,
    done_of,
    name_of,
    random_policy,
    row_keys,
    unroll,
)

__all__ = ["PACKED", "Programs", "padded_size"]

Path = tuple[str, ...]
ByPath = dict[Path, Any]

# torch stores these, but neither adds nor (in a TensorDict) clones them.
_SIGNED = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}

PACKED: tuple[Path, Path] = (("floats",), ("words",))


def padded_size(rows: int, own: int) -> int:
    """Give the size to compile for: the env's own as it is, any other rounded up to a power of two.

    Sizes from 1 to N thus take about log2(N) programs.
    """
    return own if rows == own else 1 << max(rows - 1, 0).bit_length()


class Programs:
    """Jitted init, step, restart, advance, unroll, reseed and relayout over rows.

    Args:
        env: the env over rows.
        packed: give states out as two buffers; else leaf by leaf. Both are taken in.

    ``traces`` counts by name how often each program was traced.
    """

    def __init__(self, env: BatchedEnv, *, packed: bool = True):
        self.env = env
        self.packed = packed
        self.traces: dict[str, int] = {}
        self.init = self._jit("init", self._init, static_argnums=1)
        self.step = self._jit("step", self._step)
        self.masked_step = self._jit("masked_step", self._masked_step)
        self.restart = self._jit("restart", self._restart)
        self.advance = self._jit("advance", self._advance)
        self.reseed = self._jit("reseed", self._reseed)
        self.relayout = self._jit("relayout", self._relayout)
        self.unroll = self._jit("unroll", self._unroll, static_argnums=(4, 5, 6))

    def _jit(self, name: str, function: Callable, **options: Any) -> Callable:
        def counted(*args: Any) -> Any:
            self.traces[name] = self.traces.get(name, 0) + 1
            return function(*args)

        return jax.jit(counted, **options)

    # ----------------------------------------------------------------------------------- programs

    def _init(self, key: jax.Array, rows: int) -> dict[str, Any]:
        return self._outputs(*self.env.init(key, rows))

    def _step(self, state: ByPath, action: Any) -> dict[str, Any]:
        return self._outputs(*self.env.step(self._read_state(state), action))

    def _masked_step(
        self, state: ByPath, action: Any, mask: jax.Array, observation: ByPath, flags: jax.Array
    ) -> dict[str, Any]:
        """Step all rows and keep what was there in those ``mask`` leaves out; their reward is 0."""
        root = self._read_timestep(observation, flags)
        return self._outputs(*self.env.step_where(mask, self._read_state(state), root, action))

    def _restart(self, state: ByPath, mask: jax.Array) -> dict[str, Any]:
        """Begin new episodes where ``mask`` is set; other rows keep their state and show zeros."""
        blank = jax.tree.map(
            lambda like: jnp.zeros((*mask.shape, *like.shape), like.dtype), self.env.template[1]
        )
        return self._outputs(*self.env.restart_where(mask, self._read_state(state), blank))

    def _advance(self, state: ByPath, action: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Step, then begin new episodes where one has ended; gives `next` and the root after it."""
        following, timestep = self.env.step(self._read_state(state), action)
        fresh = self.env.restart_where(done_of(timestep), following, timestep)
        return self._outputs(following, timestep), self._outputs(*fresh)

    def _reseed(self, state: ByPath, key: jax.Array) -> ByPath:
        rows = self._read_state(state)
        return self._write_state(replace(rows, key=row_keys(key, rows.key.shape[0])))

    def _relayout(self, state: ByPath) -> ByPath:
        """Bring a state of either layout into the one that is given out."""
        return self._write_state(self._read_state(state))

    def _unroll(
        self,
        state: ByPath,
        observation: ByPath,
        flags: jax.Array,
        key: jax.Array,
        steps: int,
        policy: Any,
        record_state: bool,
        params: Any = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Take many steps; gives what was recorded, time-major, and the root after the last."""
        carry = (self._read_state(state), self._read_timestep(observation, flags))
        act = random_policy(self.env) if policy is None else policy
        carry, steps_made = unroll(
            self.env, carry, act, params, key, steps=steps, record_state=record_state
        )
        root = Timestep(
            steps_made.observation,
            steps_made.next.reward,  # a root has none; nobody reads this
            steps_made.terminated,
            steps_made.truncated,
            steps_made.info,
        )
        out = {"root": self._shown(root), "action": steps_made.action}
        out["next"] = self._shown(steps_made.next)
        if steps_made.state is not None and steps_made.next_state is not None:
            out["root"]["state"] = self._name_buffers(steps_made.state)
            out["next"]["state"] = self._name_buffers(steps_made.next_state)
        return out, self._outputs(*carry)

    # -------------------------------------------------------------------------------------- names

    def _outputs(self, state: Any, timestep: Timestep) -> dict[str, Any]:
        return {"state": self._write_state(state), **self._shown(timestep)}

    def _shown(self, timestep: Timestep) -> dict[str, Any]:
        """Name what a timestep shows; time, if any, stays in front of the rows."""
        terminated, truncated = timestep.terminated, timestep.truncated
        return {
            "observation": observation_leaves(timestep),
            "reward": timestep.reward[..., None],
            "flags": jnp.stack([done_of(timestep), terminated, truncated])[..., None],
        }

    def _read_timestep(self, observation: ByPath, flags: jax.Array) -> Timestep:
        like = self.env.template[1]
        named = observation_leaves(like)
        leaves = [observation[path] for path in named]
        tree = jax.tree.structure((like.observation, like.info))
        shown, info = tree.unflatten(leaves)
        rows = flags.shape[1]
        reward = jnp.zeros(rows, jnp.float32)
        return Timestep(shown, reward, flags[1, :, 0], flags[2, :, 0], info)

    def _write_state(self, state: Any) -> ByPath:
        packing = self.env.packing
        if not self.packed:
            return self.name_leaves(state)
        return {(name,): buffer for name, buffer in packing.pack(state).items()}

    def _name_buffers(self, buffers: dict[str, jax.Array]) -> ByPath:
        if not self.packed:
            return self.name_leaves(self.env.packing.unpack(buffers))
        return {(name,): buffer for name, buffer in buffers.items()}

    def _read_state(self, state: ByPath) -> Any:
        packing = self.env.packing
        if set(state) == set(PACKED):
            return packing.unpack({path[0]: buffer for path, buffer in state.items()})
        dtypes = {field.name: field.dtype for field in packing.fields}
        return packing.from_leaves(
            {name: _same_bits(leaf, dtypes[name]) for name, leaf in state.items()}
        )

    def name_leaves(self, state: Any) -> ByPath:
        """Give the leaves of a state by path, unsigned ones as signed ones of the same bits."""
        return {
            name: _same_bits(leaf, _SIGNED.get(leaf.dtype.name, leaf.dtype))
            for name, leaf in self.env.packing.leaves(state).items()
        }


def _same_bits(leaf: jax.Array, dtype: Any) -> jax.Array:
    return leaf if leaf.dtype == dtype else jax.lax.bitcast_convert_type(leaf, jnp.dtype(dtype))


def observation_leaves(timestep: Timestep) -> ByPath:
    """Name the leaves of an observation; a bare array is called "observation".

    So is an entry "state", since that name stands for the state of the env.

    Raises:
        KeyCollisionError: there is an entry "observation" as well.
    """
    shown = jax.tree_util.tree_flatten_with_path(timestep.observation)[0]
    infos = jax.tree_util.tree_flatten_with_path(timestep.info)[0]
    names = [name_of(path) or ("observation",) for path, _ in shown]
    if {"state", "observation"} <= {name[0] for name in names}:
        raise KeyCollisionError(
            "the env observes both 'state' and 'observation', but 'state' is where a stateless env "
            "keeps its own state. Give that observation another name."
        )
    names = [("observation", *name[1:]) if name[0] == "state" else name for name in names]
    return {
        **{name: leaf for name, (_, leaf) in zip(names, shown, strict=True)},
        **{("info", *name_of(path)): leaf for path, leaf in infos},
    }
