"""Policies written in JAX.

Conventions
    observation  the array called "observation" if the env shows nothing else, otherwise a dict of arrays,
                 nested as in the data; rows in front. Infos are left out.
    action       in the env's own encoding, rows in front: numbers for a discrete space, a dict by name
                 for a dict of spaces.
    outputs      action and whatever else is to be recorded, in a dict: keys are names or tuples of names,
                 values arrays with rows in front, or dicts. Memory is under ``next``.
    name         last part of the key of an action.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch
from tensordict import TensorDictBase

from envkit.data.paths import Path, as_key, as_path, nest
from envkit.env.policy import Policy, observation_inputs
from envkit.errors import KeyCollisionError, PolicyError
from envkit.rules import RESET, STEP
from envkit_bridges.dlpack import to_jax, to_jit, to_torch
from envkit_bridges.jax.codecs import encoded
from envkit_bridges.jax.keys import key_of

if TYPE_CHECKING:
    import numpy as np

    from envkit.env.base import EnvBase
    from envkit.functional.structure import PyTree


@dataclass(frozen=True, eq=False)
class JaxPolicy:
    """Act by a pure function, which `unroll` and `rollout` of stateless envs compile in.

    Args:
        function: ``(params, observation, key)`` to an action, or to a dict with "action" and more, see the
            module. Make it once: another function, even an equal one, is another program.
        params: any pytree of arrays. A policy with new ones (`dataclasses.replace`) compiles nothing.

    Raises:
        PolicyError: (a TypeError) ``function`` cannot be called with these three, or ``params`` holds
            tensors of torch.

    Example:
        >>> import jax.numpy as jnp
        >>> from envkit import JaxPolicy, PendulumJaxEnv
        >>> def act(params, observation, key):
        ...     return params * observation["thdot"][..., None]
        >>> policy = JaxPolicy(act, params=jnp.float32(-0.5))
        >>> env = PendulumJaxEnv(batch_size=[4])
        >>> env.rollout(3, policy)["action"].shape
        torch.Size([4, 3, 1])
    """

    function: Callable[[Any, Any, jax.Array], Any]
    params: Any = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise PolicyError(
                f"a JaxPolicy is made of a function, got {self.function!r} of type "
                f"{type(self.function).__name__}. Pass a function (params, observation, key) -> action."
            )
        _check_signature(self.function)
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            if isinstance(leaf, torch.Tensor | TensorDictBase):
                raise PolicyError(
                    f"params{jax.tree_util.keystr(path)} is {type(leaf).__name__} of torch, which JAX "
                    "does not compute with. Pass arrays, e.g. jax.numpy.asarray(tensor.detach().numpy()), "
                    "or translate a torch module with compile_policy."
                )

    def bound_to(self, env: EnvBase) -> Policy:
        """Return what acts step by step in any env, with keys from the env's generator of actions."""
        return _Stepwise(self, env)

    def named_params(self, params: object = None) -> dict[str, torch.Tensor]:
        """Return parameters by their paths; see `HasParams`."""
        chosen = self.params if params is None else params
        chosen = chosen.params if isinstance(chosen, JaxPolicy) else chosen
        return {
            jax.tree_util.keystr(path): to_torch(jnp.asarray(leaf)).to("cpu", copy=True)
            for path, leaf in jax.tree_util.tree_leaves_with_path(chosen)
        }

    def with_params(self, named: Mapping[str, torch.Tensor]) -> JaxPolicy:
        """Return this policy with other parameters; see `HasParams`.

        Example:
            >>> import jax.numpy as jnp
            >>> from envkit import JaxPolicy
            >>> policy = JaxPolicy(lambda params, observation, key: params, jnp.zeros(1))
            >>> others = {name: value + 2 for name, value in policy.named_params().items()}
            >>> policy.with_params(others).params
            Array([2.], dtype=float32)
        """

        def put(path: jax.tree_util.KeyPath, leaf: object) -> jax.Array:
            array = to_jax(named[jax.tree_util.keystr(path)].clone())
            return jax.device_put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array

        return replace(self, params=jax.tree_util.tree_map_with_path(put, self.params))


def _check_signature(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins do not tell theirs
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise PolicyError(
            f"{function!r} cannot be called with (params, observation, key): {error}. Let it take these "
            "three, even if it uses fewer."
        ) from None


@dataclass(frozen=True)
class Places:
    """Entries that a policy may write in an env.

    Attributes:
        actions: what it must write.
        written_by_env: what the env writes, at the root or under ``next``.
        lasting: what it may write under ``next``: entries that the env shows and takes back.
    """

    actions: tuple[Path, ...]
    written_by_env: frozenset[Path]
    lasting: frozenset[Path]

    @classmethod
    def of(cls, env: EnvBase) -> Places:
        """Read the specs of an env."""
        kinds = (env.observation_keys, env.reward_keys, env.done_keys, env.state_keys)
        written = frozenset(as_path(key) for keys in kinds for key in keys)
        states = frozenset(map(as_path, env.state_keys))
        lasting = frozenset(path for path in states if path[0] != "state")
        return cls(tuple(map(as_path, env.action_keys)), written, lasting)


class _Stepwise:
    """Call a JAX policy on the rows of a TensorDict."""

    def __init__(self, policy: JaxPolicy, env: EnvBase):
        self._policy = policy
        self._env = env
        self._paths = [as_path(key) for key in observation_inputs(env)]
        self._places = Places.of(env)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        leaves = {path: self._rows(tensordict, path) for path in self._paths}
        policy, places = self._policy, self._places
        key = self._draw_key()
        written = _act_compiled(policy.function, places, policy.params, leaves, key)
        for path, leaf in written.items():
            value = to_torch(leaf)
            if path in places.actions:
                value = encoded(value, self._env.full_action_spec[as_key(path)])
            tensordict.set(as_key(path), value.reshape((*tensordict.batch_size, *value.shape[1:])))
        return tensordict

    def _draw_key(self) -> jax.Array | np.ndarray:
        """Draw a key where the env draws actions; on a GPU as a tensor, which the host neither reads nor brings there."""
        generator = self._env._action_generator
        device = self._env.device if generator is None else generator.device
        if device is None or device.type == "cpu":
            return key_of(int(torch.randint(2**31 - 1, (), generator=generator)))
        kind = {"generator": generator, "device": device, "dtype": torch.int32}
        return to_jit(torch.randint(-(2**31), 2**31, (2,), **kind).view(torch.uint32), copy=False)

    def _rows(self, td: TensorDictBase, path: Path) -> jax.Array | np.ndarray:
        value = td.get(as_key(path))
        return to_jit(value.reshape((-1, *value.shape[td.ndim :])), detach=True)


def act(
    function: Callable[..., Any],
    places: Places,
    params: object,
    leaves: Mapping[Path, Any],
    key: jax.Array,
) -> dict[Path, jax.Array]:
    """Call the function of a `JaxPolicy` on observation leaves and give what it writes by path.

    Raises:
        PolicyError: (a TypeError) it returned nothing, no action, or one array for several actions; or
            something that is no array with one entry for each row.
        KeyCollisionError: it writes what the env writes, or under ``next`` what no env takes back.
    """
    is_plain = set(leaves) == {("observation",)}
    given = function(params, leaves["observation",] if is_plain else nest(leaves), key)
    rows = next(iter(leaves.values())).shape[0]
    written = _by_path(given, places.actions)
    _refuse_collisions(written, places)
    return {path: _array(path, value, rows) for path, value in written.items()}


def _by_path(returned: object, actions: Sequence[Path]) -> dict[Path, Any]:
    """Return by name what a function returned: one action, actions by name, or outputs."""
    by_name = {path[-1]: path for path in actions}
    names = sorted(by_name) if len(by_name) == len(actions) else [as_key(path) for path in actions]
    if returned is None:
        raise PolicyError(
            f"the JaxPolicy returned None, but the env takes the actions {names}. Return the "
            "action: the function does not write it anywhere."
        )
    if not isinstance(returned, Mapping) and len(actions) == 1:
        return {actions[0]: returned}
    written = dict(_flattened(returned)) if isinstance(returned, Mapping) else {}
    if len(by_name) == len(actions) and set(written) == {(name,) for name in by_name}:
        return {by_name[path[0]]: value for path, value in written.items()}
    if missing := [as_key(path) for path in actions if path not in written]:
        got = (
            list(map(as_key, written)) if isinstance(returned, Mapping) else type(returned).__name__
        )
        form = "a dict with an array for each of them"
        if len(actions) == 1:
            form = f"that array, or a dict with {missing[0]!r} and what else is to be recorded"
        raise PolicyError(
            f"the JaxPolicy returned {got}, but the env takes the actions {names}. Return {form}."
        )
    return written


def _flattened(tree: Mapping[Any, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in tree.items():
        names = (key,) if isinstance(key, str) else key
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise PolicyError(
                f"the JaxPolicy returned a dict with the key {key!r}. Keys are names or tuples of names."
            )
        path = (*prefix, *names)
        if isinstance(value, Mapping):
            yield from _flattened(value, path)
        else:
            yield path, value


def _refuse_collisions(written: Iterable[Path], places: Places) -> None:
    for path in written:
        key = as_key(path)
        if path[0] == "next" and path[1:] not in places.lasting:
            raise KeyCollisionError(
                f"the JaxPolicy returned {key!r}, but under 'next' it can only write what the env shows and "
                f"takes back, here {sorted(map(as_key, places.lasting), key=str)}. Append a "
                "TensorDictPrimer that declares the entry, or return it without 'next' to have it recorded."
            )
        if path in places.written_by_env or path[0] == "state" or path[-1] in (STEP, RESET):
            raise KeyCollisionError(
                f"the JaxPolicy returned {key!r}, which the env writes itself. Give that output another name."
            )


def _array(path: Path, value: object, rows: int) -> jax.Array:
    try:
        array = jnp.asarray(value)
    except TypeError:
        raise PolicyError(
            f"the JaxPolicy returned {type(value).__name__} as {as_key(path)!r}. Return an array with one "
            f"entry for each of the {rows} rows."
        ) from None
    if array.shape[:1] != (rows,):
        raise PolicyError(
            f"the JaxPolicy returned {as_key(path)!r} with shape {array.shape}, but was called for {rows} rows. "
            f"Return an array with one entry for each of them: ({rows}, ...)."
        )
    return array


@partial(jax.jit, static_argnums=(0, 1))
def _act_compiled(*args: PyTree) -> dict[Path, jax.Array]:
    return act(*args)
