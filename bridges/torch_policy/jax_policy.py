"""Policies written in JAX.

Conventions
    observation  the array called "observation" if the env shows nothing else, otherwise a dict of arrays,
                 nested as in the data; rows in front. Infos are left out.
    action       in the env's own encoding, rows in front: numbers for a discrete space, a dict by name
                 for a dict of spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import torch
from tensordict import TensorDictBase

from bridges.dlpack import to_jit, to_torch
from bridges.nesting import nest
from envkit.env_specs import as_key, as_path
from envkit.policy import Policy, observation_inputs
from envkit.specs import OneHot

if TYPE_CHECKING:
    from envkit.base import EnvBase

__all__ = ["JaxPolicy", "observed"]

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class JaxPolicy:
    """A pure function that acts; `unroll` and `rollout` of stateless envs compile it in.

    Args:
        function: ``(params, observation, key) -> action``. Make it once: another function, even an
            equal one, is another program.
        params: any pytree of arrays. A policy with new ones (`dataclasses.replace`) compiles nothing.
    """

    function: Callable[[Any, Any, jax.Array], Any]
    params: Any = None

    def bound_to(self, env: EnvBase) -> Policy:
        """Give what acts step by step in any env, with keys from the env's generator of actions."""
        return _Stepwise(self, env)


class _Stepwise:
    """Call a JAX policy on the rows of a TensorDict."""

    def __init__(self, policy: JaxPolicy, env: EnvBase):
        self._params = policy.params
        self._env = env
        self._paths = [as_path(key) for key in observation_inputs(env)]
        self._run = jax.jit(
            lambda params, leaves, key: policy.function(params, observed(leaves), key)
        )

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        leaves = {path: self._rows(tensordict, path) for path in self._paths}
        seed = torch.randint(2**31 - 1, (), generator=self._env._action_generator)
        action = to_torch(self._run(self._params, leaves, jax.random.PRNGKey(int(seed))))
        for key in self._env.action_keys:
            leaf = action[as_path(key)[-1]] if isinstance(action, Mapping) else action
            spec = self._env.full_action_spec[key]
            if isinstance(spec, OneHot):
                leaf = torch.nn.functional.one_hot(leaf.long(), spec.shape[-1])
            value = leaf.reshape(*tensordict.batch_size, *leaf.shape[1:])
            tensordict.set(key, value.to(spec.dtype))
        return tensordict

    def _rows(self, td: TensorDictBase, path: Path) -> Any:
        value = td.get(as_key(path))
        return to_jit(value.reshape(-1, *value.shape[td.ndim :]), detach=True)


def observed(leaves: Mapping[Path, Any]) -> Any:
    """Give what a policy in JAX sees of leaves by path."""
    seen = {path: leaf for path, leaf in leaves.items() if path[0] != "info"}
    return seen["observation",] if set(seen) == {("observation",)} else nest(seen)
