"""Many steps as one `lax.scan`, with new episodes begun inside.

Conventions
    carry   (state, timestep, count): rows, what is known of them now, and steps taken so far. A row
            of ``timestep`` may be done: its new episode begins at the start of the next step,
            so that the last step of a run never triggers a reset, and runs in pieces give what
            one run gives.
    policy  ``(params, observation, key) -> action`` over all rows.
    time    leading axis of what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from envkit import rules
from envkit.functional.batch import BatchedEnv
from envkit.functional.core import Timestep

__all__ = ["random_policy", "unroll"]

Policy = Callable[[Any, Any, jax.Array], Any]


def random_policy(env: BatchedEnv, rows: int) -> Policy:
    """Draw actions from the action space, whatever is observed."""
    return lambda params, observation, key: env.sample_action(key, rows)


def unroll(
    env: BatchedEnv,
    carry: tuple[Any, Timestep, jax.Array],
    policy: Policy,
    params: Any,
    key: jax.Array,
    *,
    steps: int,
    record_state: bool = False,
) -> tuple[tuple[Any, Timestep, jax.Array], dict[str, Any]]:
    """Take ``steps`` steps and record them.

    Args:
        env: rows of one environment.
        carry: where to start; see the conventions.
        policy, params: what acts.
        key: step number t acts from ``fold_in(key, count + t)``.
        steps: length of the run.
        record_state: record the packed state of every step at root and next.

    Returns:
        The carry after the last step, and time-major ``root`` and ``next`` timesteps, ``action``,
        and, if recorded, ``root_state`` and ``next_state``.
    """

    def once(carry: tuple[Any, Timestep, jax.Array], _: None):
        state, timestep, count = carry
        ended = rules.done_from(timestep.terminated, timestep.truncated)
        state, root = env.restart_where(ended, state, timestep)
        action = policy(params, root.observation, jax.random.fold_in(key, count))
        following, new = env.step(state, action)
        recorded = {"root": root, "action": action, "next": new}
        if record_state:
            recorded["root_state"] = env.packing.pack(state)
            recorded["next_state"] = env.packing.pack(following)
        return (following, new, count + 1), recorded

    state, timestep, count = carry
    carry = (state, timestep, jnp.asarray(count, jnp.int32))
    return jax.lax.scan(once, carry, None, length=steps)
