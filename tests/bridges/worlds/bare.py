"""Compare a stateless world step by step with its library, bit for bit.

Both step from the same states with the same actions. A new episode is begun by two different programs, ours at
the size in which rows are reset: it is compared up to rounding, and both go on from ours.

Conventions
    state   the library's own, rows in front.
    moment  dict of what a step shows: "observation" (a tree), "reward", "terminated", "truncated" and others;
            "rewards" (a tree) where there are several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tensordict import TensorDict

from envkit.data.paths import as_key, as_path
from envkit.functional import EpisodeState, TimeLimitState, Timestep, name_of, row_keys
from envkit_bridges.dlpack import to_jit
from envkit_bridges.jax.codecs import action_tree
from envkit_bridges.jax.fused_transforms import observation_leaves

Moment = dict[str, Any]


def own_states(env: Any, td: TensorDict) -> Any:
    """Give the states of the env's core, rows in front, and the keys of the next episodes."""
    state = env._engine.programs.read_state(to_jit(env._engine.state(td), copy=True))
    key = state.key
    while isinstance(state, EpisodeState | TimeLimitState):
        state = state.inner
    return state, key


def assert_shows(td: TensorDict, moment: Moment, *, close: bool = False) -> None:
    """Check that an entry stands for every leaf of an observation, and reward and end are the same."""
    for path, leaf in observation_leaves(Timestep(moment["observation"])).items():
        array = td[as_key(path)].numpy()
        assert array.dtype == leaf.dtype, (path, array.dtype, leaf.dtype)
        _compare(array, leaf, path, close)
    for name in moment:
        if name not in ("observation", "rewards"):
            wanted = np.asarray(moment[name]).reshape(td[name].shape)
            _compare(td[name].numpy(), wanted.astype(td[name].numpy().dtype), name, close)
    for path, leaf in jax.tree_util.tree_leaves_with_path(moment.get("rewards", {})):
        array = td[as_key(name_of(path))].numpy()
        _compare(array, np.asarray(leaf, np.float32).reshape(array.shape), path, close)


def _compare(array: Any, wanted: Any, what: Any, close: bool) -> None:
    if close and np.issubdtype(array.dtype, np.floating):
        np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-5, err_msg=str(what))
    else:
        np.testing.assert_array_equal(array, wanted, err_msg=str(what))


def assert_equals_bare(
    env: Any,
    steps: int,
    reset: Callable[[jax.Array], Moment],
    step: Callable[[Any, Any], tuple[Any, Moment]],
    *,
    close: bool = False,
) -> int:
    """Play random actions with resets, and compare every step, state included, with the library.

    Args:
        env: of batch size (rows,), its actions as the library takes them.
        steps: how many.
        reset: the library's own, jitted, from keys of the episodes, one a row.
        step: the library's own, jitted, from states and actions.
        close: floats of one step may be rounded otherwise, where XLA fuses the two programs in two ways.

    Returns:
        How many episodes ended.
    """
    env.set_seed(0)
    td, ended = env.reset(), 0
    _, now = jax.random.split(jax.random.PRNGKey(0))
    episodes = jax.jit(jax.vmap(lambda key: jax.random.split(key)[1]))
    assert_shows(td, reset(episodes(row_keys(now, env.numel()))), close=True)
    state, _ = own_states(env, td)
    for _ in range(steps):
        env.rand_action(td)
        actions = action_tree({as_path(key): td[key].numpy() for key in env.action_keys})
        state, moment = step(state, actions)
        data, td = env.step_and_maybe_reset(td)
        assert_shows(data["next"], moment, close=close)
        after, carried = own_states(env, data["next"])
        for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
            _compare(np.asarray(one), np.asarray(other), "state", close)
        state, _ = own_states(env, td)
        done = data["next", "done"][:, 0]
        ended += int(done.sum())
        if done.any():
            assert_shows(td[done], _rows(reset(episodes(carried)), done.numpy()), close=True)
    return ended


def _rows(moment: Moment, mask: np.ndarray) -> Moment:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[mask], moment)
