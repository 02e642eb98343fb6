"""Policies written in JAX.

Conventions
    observation  the array called "observation" if the env shows nothing else, otherwise a dict of arrays,
                 nested as in the data; rows in front. Infos are left out.
    action       in the env's own encoding, rows in front: numbers for a discrete space, a dict by name
                 for a dict of spaces.
    name         last part of the key of an action.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import torch
from tensordict import TensorDictBase

from bridges.dlpack import to_jit, to_torch
from envkit.errors import PolicyError
from envkit.keys import Path, as_key, as_path
from envkit.nesting import nest
from envkit.policy import Policy, observation_inputs
from envkit.specs import OneHot

if TYPE_CHECKING:
    from envkit.base import EnvBase

__all__ = ["JaxPolicy", "act"]


@dataclass(frozen=True, eq=False)
class JaxPolicy:
    """A pure function that acts; `unroll` and `rollout` of stateless envs compile it in.

    Args:
        function: ``(params, observation, key) -> action``. Make it once: another function, even an
            equal one, is another program.
        params: any pytree of arrays. A policy with new ones (`dataclasses.replace`) compiles nothing.

    Raises:
        PolicyError: (a TypeError) ``function`` cannot be called with these three, or ``params`` holds
            tensors of torch.
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
                    f"params{jax.tree_util.keystr(path)} is a {type(leaf).__name__} of torch, which JAX "
                    "does not compute with. Pass arrays, e.g. jax.numpy.asarray(tensor.detach().numpy()), "
                    "or translate a torch module with compile_policy."
                )

    def bound_to(self, env: EnvBase) -> Policy:
        """Give what acts step by step in any env, with keys from the env's generator of actions."""
        return _Stepwise(self, env)


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


class _Stepwise:
    """Call a JAX policy on the rows of a TensorDict."""

    def __init__(self, policy: JaxPolicy, env: EnvBase):
        self._policy = policy
        self._env = env
        self._paths = [as_path(key) for key in observation_inputs(env)]
        self._keys = {as_path(key)[-1]: key for key in env.action_keys}

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        leaves = {path: self._rows(tensordict, path) for path in self._paths}
        policy, names = self._policy, tuple(self._keys)
        actions = _act_compiled(policy.function, names, policy.params, leaves, self._draw_key())
        for name, leaf in actions.items():
            key = self._keys[name]
            value, spec = to_torch(leaf), self._env.full_action_spec[key]
            if isinstance(spec, OneHot):
                value = torch.nn.functional.one_hot(value.long(), spec.shape[-1])
            value = value.reshape(*tensordict.batch_size, *value.shape[1:])
            tensordict.set(key, value.to(spec.dtype))
        return tensordict

    def _draw_key(self) -> jax.Array:
        generator = self._env._action_generator
        device = None if generator is None else generator.device
        seed = torch.randint(2**31 - 1, (), generator=generator, device=device)
        return jax.random.PRNGKey(int(seed))

    def _rows(self, td: TensorDictBase, path: Path) -> Any:
        value = td.get(as_key(path))
        return to_jit(value.reshape(-1, *value.shape[td.ndim :]), detach=True)


def act(
    function: Callable[..., Any],
    names: Sequence[str],
    params: Any,
    leaves: Mapping[Path, Any],
    key: jax.Array,
) -> dict[str, Any]:
    """Call the function of a `JaxPolicy` on observation leaves and give its actions by name.

    Raises:
        PolicyError: (a TypeError) it returned nothing, other names, or one array for several actions.
    """
    is_plain = set(leaves) == {("observation",)}
    action = function(params, leaves["observation",] if is_plain else nest(leaves), key)
    if action is None:
        raise PolicyError(
            f"the JaxPolicy returned None, but the env takes the actions {sorted(names)}. Return the "
            "action: the function does not write it anywhere."
        )
    if not isinstance(action, Mapping) and len(names) == 1:
        return {names[0]: action}
    if not isinstance(action, Mapping) or set(action) != set(names):
        got = sorted(action) if isinstance(action, Mapping) else type(action).__name__
        raise PolicyError(
            f"the JaxPolicy returned {got}, but the env takes the actions {sorted(names)}. Return "
            + ("that array." if len(names) == 1 else "a dict with an array for each of them.")
        )
    return dict(action)


@partial(jax.jit, static_argnums=(0, 1))
def _act_compiled(*args: Any) -> dict[str, Any]:
    return act(*args)
