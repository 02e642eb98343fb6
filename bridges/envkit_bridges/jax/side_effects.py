"""Side effects in Python of reset and step of a stateless env: refused when they are traced.

A program repeats the values that Python had while it was traced: a number that ``np.random`` drew then, or a count that
``self.t += 1`` changed then. `Traced` compares what such a call could change, with the rule for modules of
`envkit_bridges.policy.side_effects`; `frozen_values` traces twice and compares the programs, which finds clocks and globals, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from envkit.errors import StateStructureError
from envkit.functional import BatchedEnv, EnvWrapper, Timestep
from envkit.functional.spaces import sample_space
from envkit.functional.structure import PyTree, is_typed_key
from envkit_bridges.libraries import LIBRARIES
from envkit_bridges.policy.side_effects import changed_places, generator_states, values_held

_FIX = (
    "Keep what changes in the state, which reset and step return, and draw with jax.random from a key in it. To count "
    "traces, read traces of the JaxEnv."
)


@dataclass(frozen=True)
class Traced(EnvWrapper):
    """Refuse a reset or step that changes values of Python. Compiled programs run without it.

    An attribute that is set for the first time is a cache, and allowed; one that is changed, or holds an array of
    the trace, is not. Envs of known libraries are not looked at: Brax's ``fast`` counts its traces.

    Raises:
        StateStructureError: while tracing, it does.
    """

    def reset(self, key: jax.Array, /) -> tuple[Any, Timestep]:
        """Start an episode."""
        return self._checked("reset", key)

    def step(self, state: PyTree, action: PyTree, /) -> tuple[Any, Timestep]:
        """Advance."""
        return self._checked("step", state, action)

    def _checked(self, name: str, *args: PyTree) -> tuple[Any, Timestep]:
        method, owners = getattr(self.env, name), _owners(self.env, name)
        if not owners:
            return method(*args)
        before = [(dict(getattr(owner, "__dict__", {})), values_held(owner)) for owner in owners]
        drawn = generator_states()
        result = method(*args)
        for owner, (attributes, values) in zip(owners, before, strict=True):
            for place, value in getattr(owner, "__dict__", {}).items():
                is_new = place not in attributes or attributes[place] is not value
                if is_new and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
                    raise _error(name, owner, f"writes its attribute {place!r}")
            after = values_held(owner)
            if changed := [place for place in changed_places(values, after) if place in values]:
                raise _error(name, owner, f"changes {changed[0]}")
        # another thread may have drawn meanwhile
        if (drawn_from := changed_places(drawn, generator_states())) and _differs(method, args):
            raise _error(name, self.env, f"draws from {drawn_from[0]}")
        return result


def _owners(env: object, name: str) -> list[Any]:
    """List an env and those inside it, but for those whose method ``name`` is that of a known library."""
    owners = []
    while env is not None:
        owners.append(env)
        env = getattr(env, "env", None)
    return [
        owner for owner in owners if not _is_of_library(getattr(type(owner), name, type(owner)))
    ]


def _is_of_library(value: Any) -> bool:
    """Check whether a class or function belongs to envkit or to a library that it has an adapter for."""
    return str(value.__module__).partition(".")[0] in (*LIBRARIES, "envkit", "envkit_bridges")


def _error(name: str, owner: object, what: str) -> StateStructureError:
    return StateStructureError(
        f"{name} of {type(owner).__name__} {what}. A program is traced once and would repeat the value of that call at every "
        f"step. {_FIX}"
    )


def frozen_values(env: Any) -> Iterator[str]:
    """List the methods of a user's env that compute something else each time they are traced.

    Args:
        env: a `StatelessEnv`, or one that holds another as ``env``; envkit's own wrappers are left out.
    """
    while isinstance(env, BatchedEnv | EnvWrapper):
        env = env.env
    if _is_of_library(type(env)):
        return
    key = jax.random.PRNGKey(0)
    state = jax.eval_shape(env.reset, key)[0]
    action = jax.eval_shape(lambda key: sample_space(env.action_space, key), key)
    for name, args in (("reset", (key,)), ("step", (state, action))):
        if _differs(getattr(env, name), args):
            yield (
                f"{name} of {type(env).__name__} computes something else each time it is traced, with numbers that "
                f"Python gave: a program would repeat those of its trace. {_FIX}"
            )


def _differs(method: Callable[..., Any], args: tuple[PyTree, ...]) -> bool:
    """Trace a method twice with arguments like these, and compare the programs."""
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), args)
    return _program(method, like) != _program(method, like)


def _program(method: Callable[..., Any], like: tuple[Any, ...]) -> Hashable:
    # a new function, or JAX would give the trace that it keeps
    traced = jax.make_jaxpr(lambda *args: method(*args))(*like)
    consts = [
        jax.random.key_data(const) if is_typed_key(const.dtype) else const
        for const in traced.consts
    ]
    values = tuple((str(const.dtype), const.shape, np.asarray(const).tobytes()) for const in consts)
    return re.sub("0x[0-9a-f]+", "", str(traced)), values
