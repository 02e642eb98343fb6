"""What counts as a policy, and how a plain callable becomes one.

Conventions
    policy  callable that takes a TensorDict and writes the env's action keys into it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, cast, get_type_hints, runtime_checkable

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import TensorDictModuleBase
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type
from torch import nn

from envkit.data.paths import Key, as_path
from envkit.env.stepping import Stepping
from envkit.errors import PolicyError
from envkit.specs import TensorSpec

__all__ = [
    "BindsToEnv",
    "ExplorationType",
    "Policy",
    "PolicyLike",
    "as_policy",
    "exploration_type",
    "observation_inputs",
    "policy_device",
    "set_exploration_type",
    "takes_tensordict",
]

Policy = Callable[[TensorDictBase], TensorDictBase]

PolicyLike = Callable[..., Any] | nn.Module | None
"""What a user passes as a policy, see `as_policy`."""


@runtime_checkable
class BindsToEnv(Protocol):
    """A policy that must know the env to act in it."""

    def bound_to(self, env: Stepping) -> Policy:
        """Give the callable that acts in ``env``."""
        ...


def as_policy(env: Stepping, policy: PolicyLike, *, trust: bool = False) -> Policy:
    """Turn what a user passes as a policy into a callable from TensorDict to TensorDict.

    Args:
        env: its specs name the inputs and outputs of a plain callable.
        policy: None for random actions; one that `BindsToEnv`, such as a compiled one; a
            TensorDictModule, or a callable with one argument named ``tensordict`` or ``td`` or
            annotated as a TensorDict, is used as it is; any other callable gets the observation
            leaves (see `observation_inputs`), in the order of ``observation_spec``, and returns the
            action (a tuple when there are several action keys).
        trust: use ``policy`` as it is, whatever its signature.

    Raises:
        PolicyError: (a TypeError) ``policy`` is not callable, or takes another number of arguments. What
            is given raises it when it returns something that is no action.
    """
    if policy is None:
        return env.rand_action
    if isinstance(policy, BindsToEnv):
        return policy.bound_to(env)
    if not callable(policy):
        raise PolicyError(
            f"policy must be callable, got {type(policy).__name__}. "
            "Pass a module, a function, or None for random actions."
        )
    if isinstance(policy, TensorDictModuleBase):
        return cast(Policy, policy)
    if trust or takes_tensordict(policy):
        return _CallOnRoot(policy)
    actions = {key: env.full_action_spec[key] for key in env.action_keys}
    inputs = observation_inputs(env)
    _require_room(policy, inputs)
    return _CallOnLeaves(policy, inputs, actions, env.batch_dims)


def _require_room(policy: Callable[..., Any], inputs: list[Key]) -> None:
    """Check that a plain function takes as many arguments as there are entries for it.

    Raises:
        PolicyError: (a TypeError) it takes more or fewer.
    """
    signature = _signature_of(policy)
    if signature is None:
        return
    try:
        signature.bind(*inputs)
    except TypeError as error:
        name = getattr(policy, "__name__", type(policy).__name__)
        raise PolicyError(
            f"a policy that is a plain function is called with the observations, here {inputs}, but "
            f"{name}{signature} does not take {len(inputs)} arguments: {error}. Say which entries it reads: "
            'TensorDictModule(policy, in_keys=["observation"], out_keys=["action"]), from tensordict.nn; or '
            "take the TensorDict itself, as an argument named tensordict."
        ) from error


def _signature_of(policy: Any) -> inspect.Signature | None:
    """Read what a callable takes; None of builtins, which do not tell."""
    call = policy.forward if isinstance(policy, torch.nn.Module) else policy
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None


class _CallOnRoot:
    """Call a function on the TensorDict, and see to it that it gives one back."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        acted = self.function(tensordict)
        if not isinstance(acted, TensorDictBase):
            raise PolicyError(
                f"the policy returned {type(acted).__name__}, but was called with a TensorDict and "
                "must return the TensorDict with the action in it."
            )
        return acted


class _CallOnLeaves:
    """Call a plain function on observation leaves and write what it returns as the action.

    Args:
        function: what the user passed.
        in_keys: entries it is called with.
        actions: spec of each entry it returns.
        batch_dims: number of batch axes of these specs.

    How many elements an action has is looked at in the first call only.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        in_keys: list[Key],
        actions: dict[Key, TensorSpec],
        batch_dims: int,
    ):
        self.function = function
        self.in_keys = in_keys
        self.out_keys = list(actions)
        self.actions = actions
        self.batch_dims = batch_dims
        self._was_called = False

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        actions = self.function(*(tensordict.get(key) for key in self.in_keys))
        if not isinstance(actions, tuple):
            actions = (actions,)
        if len(actions) != len(self.out_keys):
            raise PolicyError(
                f"the policy returned {len(actions)} values, but the env has the action keys "
                f"{self.out_keys}. Return one tensor for each of them."
            )
        for key, action in zip(self.out_keys, actions, strict=True):
            if not isinstance(action, torch.Tensor) and self.actions[key].dtype is not None:
                action = self._as_tensor(action, key)
            if not self._was_called:
                self._check_size(action, key, tensordict.batch_size)
            tensordict.set(key, action)
        self._was_called = True
        return tensordict

    def _as_tensor(self, action: Any, key: Key) -> Any:
        """Take numbers and arrays for tensors."""
        try:
            return torch.as_tensor(action)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PolicyError(
                f"the policy returned {action!r}, of type {type(action).__name__}, as {key!r}, but "
                f"the env takes {self.actions[key]}. Return a tensor."
            ) from error

    def _check_size(self, action: Any, key: Key, batch: torch.Size) -> None:
        spec = self.actions[key]
        if spec.dtype is None or -1 in spec.shape:
            return
        shape = torch.Size((*batch, *spec.shape[self.batch_dims :]))
        if action.numel() != shape.numel():
            raise PolicyError(
                f"the policy returned a tensor of shape {tuple(action.shape)} as {key!r}, but the "
                f"env takes {tuple(shape)}: {spec}. Return one value for each element."
            )


def observation_inputs(env: Stepping) -> list[Key]:
    """List what a plain policy sees: observation entries in declared order.

    Nested entries that the env also reads back as state (a simulator's own state), what stands under
    "info", and what transforms have added for bookkeeping (`StepCounter`, `RewardSum`, ...) are not
    observations in that sense and are left out.
    """
    books = env._books
    state = {as_path(key) for key in env.full_state_spec.keys(True, True)}
    paths = {key: as_path(key) for key in env.full_observation_spec.keys(True, True)}
    return [
        key
        for key, path in paths.items()
        if path not in books and (len(path) == 1 or (path not in state and path[0] != "info"))
    ]


def policy_device(policy: Any) -> torch.device | None:
    """Find where a policy computes: the device of its first parameter or buffer, if any."""
    if isinstance(policy, torch.nn.Module):
        for tensor in (*policy.parameters(), *policy.buffers()):
            return tensor.device
    return None


def takes_tensordict(policy: Any) -> bool:
    """Say whether a callable takes a TensorDict, by its type, parameter name or annotation."""
    if isinstance(policy, TensorDictModuleBase):
        return True
    signature = _signature_of(policy)
    if signature is None:
        return False
    parameters = signature.parameters.values()
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) != 1:
        return False
    if required[0].name in ("tensordict", "td"):
        return True
    annotation = required[0].annotation
    if isinstance(annotation, str):
        try:
            call = policy.forward if isinstance(policy, torch.nn.Module) else policy
            annotation = get_type_hints(call).get(required[0].name)
        except (NameError, TypeError):  # a name that only exists for type checkers
            return "TensorDict" in str(required[0].annotation)
    return isinstance(annotation, type) and issubclass(annotation, TensorDictBase)
