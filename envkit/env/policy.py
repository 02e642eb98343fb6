"""Kinds of policies that users pass, and the entries that they read; `bound_policy` calls them.

Conventions
    policy  callable that takes a TensorDict and writes the env's action keys into it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import UnionType
from typing import (
    Annotated,
    Any,
    Protocol,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    TensorDictModuleBase,
    set_interaction_type,
)
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from envkit.data.paths import Key, as_path
from envkit.env.stepping import Stepping
from envkit.errors import BatchSizeError, NoParentError, PolicyError
from envkit.specs import TensorSpec

# TorchRL's names.
ExplorationType = InteractionType
exploration_type = interaction_type
set_exploration_type = set_interaction_type

Policy = Callable[[TensorDictBase], TensorDictBase]

PolicyLike = Callable[..., Any] | nn.Module | None
"""A policy as a user passes it, see `bind_policy`."""


@runtime_checkable
class BindsToEnv(Protocol):
    """A policy that must know the env to act in it."""

    def bound_to(self, env: Stepping) -> Policy:
        """Return the callable that acts in ``env``."""
        ...


@runtime_checkable
class HasParams(Protocol):
    """A policy that is no module and holds its parameters apart from what computes with them; it is never written to."""

    def named_params(self, params: Any = None) -> dict[str, torch.Tensor]:
        """Return parameters by name, copied: its own, or ``params`` in the same form, or those of one like it."""
        ...

    def with_params(self, named: Mapping[str, torch.Tensor]) -> Self:
        """Return a policy like this one, with parameters as `named_params` gives them, copied."""
        ...


def require_policy(policy: object) -> None:
    """Check that something can act: a function, a module, one that `BindsToEnv`, or None.

    Raises:
        PolicyError: (a TypeError) it is something else.
    """
    if policy is not None and not callable(policy) and not isinstance(policy, BindsToEnv):
        raise PolicyError(
            f"policy is {policy!r}, of type {type(policy).__name__}, but must be callable. Pass a module, a function, or "
            "None for random actions."
        )


class RandomPolicy:
    """Write random actions, for who needs a policy as an object; None does the same in a rollout.

    Args:
        action_spec: what actions are drawn from: a Composite of entries, or the spec of one. It says the shape,
            batch axes included. None draws for the env in which the policy is run.
        action_key: where an action is written that is no entry of a Composite.

    Example:
        >>> from envkit import GymEnv, RandomPolicy
        >>> env = GymEnv("Pendulum-v1")
        >>> env.rollout(3, RandomPolicy())["action"].shape
        torch.Size([3, 1])
        >>> policy = RandomPolicy(env.full_action_spec)
        >>> policy(env.reset())["action"].shape
        torch.Size([1])
        >>> env.close()
    """

    def __init__(self, action_spec: TensorSpec | None = None, action_key: Key = "action"):
        self.action_spec = None if action_spec is None else action_spec.clone()
        self.action_key = action_key
        self._follows_env = action_spec is None

    def set_action_spec_from_env(self, env: Stepping) -> None:
        """Set ``action_spec`` to the ``full_action_spec`` of an env, where there is none.

        Collectors call this with their env. In another env such a policy goes on to draw actions of that one.

        Example:
            >>> policy = RandomPolicy()
            >>> policy.set_action_spec_from_env(GymEnv("Pendulum-v1"))
            >>> policy.action_spec["action"].shape
            torch.Size([1])
        """
        if self.action_spec is None:
            self.action_spec = env.full_action_spec.clone()

    def bound_to(self, env: Stepping) -> Policy:
        """Return what acts in ``env``: this object, or where it was given no spec, random actions of that env."""
        return env.rand_action if self._follows_env or self.action_spec is None else self

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write an action into ``tensordict``, which is returned.

        Raises:
            NoParentError: (a RuntimeError) there is no spec to draw from.
            BatchSizeError: (a RuntimeError) what it draws has other batch axes than ``tensordict``.
        """
        if self.action_spec is None:
            raise NoParentError(
                "RandomPolicy was called by hand and has no action_spec to draw from. Pass one: "
                "RandomPolicy(env.full_action_spec)."
            )
        drawn = self.action_spec.rand()
        try:
            if isinstance(drawn, TensorDictBase):
                return tensordict.update(drawn)
            return tensordict.set(self.action_key, drawn)
        except RuntimeError as error:  # which does not say whose sizes they are
            raise BatchSizeError(
                f"the action_spec of RandomPolicy has shape {tuple(self.action_spec.shape)}, but was to draw for data of "
                f"batch size {tuple(tensordict.batch_size)}. Pass that of the env that is run, batch axes included: "
                "RandomPolicy(env.full_action_spec), or RandomPolicy(), which asks that env."
            ) from error

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(action_spec={self.action_spec}, action_key={self.action_key!r})"
        )


def signature_of(policy: Any) -> inspect.Signature | None:
    """Read what a callable takes; None of builtins, which do not tell."""
    call = policy.forward if isinstance(policy, torch.nn.Module) else policy
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None


def observation_inputs(env: Stepping) -> list[Key]:
    """List what a plain policy sees: observation entries in declared order.

    Nested entries that the env also reads back as state (a simulator's own state), infos, and what transforms
    have added for bookkeeping (`StepCounter`, `RewardSum`, ...) are not observations in that sense and are left out.
    """

    def read() -> list[Key]:
        hidden = env._facts.bookkeeping | env._facts.infos
        state = {as_path(key) for key in env.full_state_spec.keys(True, True)}
        paths = {key: as_path(key) for key in env.full_observation_spec.keys(True, True)}
        return [
            key
            for key, path in paths.items()
            if path not in hidden and (len(path) == 1 or path not in state)
        ]

    return [*env._declared.cached("observation_inputs", read)]


def policy_device(policy: Any) -> torch.device | None:
    """Find where a policy computes: the device of its first parameter or buffer, if any."""
    if isinstance(policy, torch.nn.Module):
        for tensor in (*policy.parameters(), *policy.buffers()):
            return tensor.device
    return None


HOW_CALLED = (
    "A policy is called with the observations: policy(observation). If its argument is named `td` or `tensordict`, or is "
    "annotated as a TensorDict, it is called with the TensorDict: policy(td)."
)
"""Which of its two forms a function or a plain module has, for messages; `takes_tensordict` decides it."""

WRONG_FORM = (AttributeError, IndexError, KeyError, TypeError)
"""Errors of a policy that may come from the other form: a tensor is no TensorDict."""


def takes_tensordict(policy: Any) -> bool:
    """Check whether a callable takes a TensorDict, by its type, parameter name or annotation."""
    if isinstance(policy, TensorDictModuleBase):
        return True
    signature = signature_of(policy)
    if signature is None:
        return False
    positional = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [one for one in positional if one.default is one.empty]
    taken = required or positional[:1]  # as `EnvBase.rand_action` takes it
    if len(taken) != 1:
        return False
    if taken[0].name in ("tensordict", "td"):
        return True
    annotation = taken[0].annotation
    if isinstance(annotation, str):
        try:
            call = policy.forward if isinstance(policy, torch.nn.Module) else policy
            annotation = get_type_hints(call).get(taken[0].name)
        except (NameError, TypeError):  # a name that only exists for type checkers
            return "TensorDict" in str(taken[0].annotation)
    if get_origin(annotation) in (Union, UnionType, Annotated):  # such as TensorDict | None
        kinds = get_args(annotation)
    else:
        kinds = (annotation,)
    return any(isinstance(kind, type) and issubclass(kind, TensorDictBase) for kind in kinds)
