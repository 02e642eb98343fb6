"""The kinds of policies, and how a plain callable becomes one.

Conventions
    policy  callable that takes a TensorDict and writes the env's action keys into it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
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

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    TensorDictModule,
    TensorDictModuleBase,
    set_interaction_type,
)
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from envkit.data.paths import Key, Path, as_path
from envkit.data.transition import without_device
from envkit.env.on_leaves import (
    HOW_CALLED,
    WRONG_FORM,
    ActionWriter,
    CallModule,
    CallOnLeaves,
    LeavesPolicy,
    add_advice,
)
from envkit.env.policy_calls import calls_of_run, changed_in_place, tensors_in, versions_of
from envkit.env.stepping import Stepping
from envkit.errors import BatchSizeError, NoParentError, PolicyError, RolloutError
from envkit.specs import TensorSpec

# TorchRL's names.
ExplorationType = InteractionType
exploration_type = interaction_type
set_exploration_type = set_interaction_type

Policy = Callable[[TensorDictBase], TensorDictBase]

PolicyLike = Callable[..., Any] | nn.Module | None
"""A policy as a user passes it, see `as_policy`."""


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


class RowsPolicy(Protocol):
    """Acts on NumPy rows for one run, with no TensorDict made for a step.

    Attributes:
        reads: entries of a root that it takes.
        writes: entries that it gives, with their shape (rows in front) and dtype.
    """

    reads: tuple[Path, ...]
    writes: Mapping[Path, tuple[tuple[int, ...], np.dtype]]

    def __call__(self, rows: Mapping[Path, np.ndarray], out: Mapping[Path, np.ndarray]) -> None:
        """Read ``rows``, which hold what it `reads`, and fill ``out``, which has room for what it `writes`."""
        ...


@runtime_checkable
class ActsInRuns(Protocol):
    """A policy that may act in a run with no TensorDict made for a step: what `as_policy` gives for some."""

    def __call__(self, td: TensorDictBase, /) -> TensorDictBase: ...

    def for_run(self, root: TensorDictBase) -> LeavesPolicy | RowsPolicy | None:
        """Return what acts on roots like ``root``, and does what it would do on TensorDicts.

        None where it must see TensorDicts. Ask again for each run: what is given reads the parameters
        where they lie now, and nothing else of the policy is looked at again.
        """
        ...


def as_policy(env: Stepping, policy: PolicyLike, *, trust: bool = False) -> Policy:
    """Turn what a user passes as a policy into a callable from TensorDict to TensorDict.

    Args:
        env: its specs name the inputs and outputs of a plain callable.
        policy: None or ``env.rand_action`` for random actions; or one that `BindsToEnv`, such as a compiled one. A
            TensorDictModule is called with the TensorDict. So is a callable with one argument named ``tensordict`` or
            ``td`` or annotated as a TensorDict. A new TensorDict that it returns is merged into that. Any other
            callable gets the observation leaves (see `observation_inputs`), in the order of ``observation_spec``, and
            returns the action (a tuple when there are several action keys). Further tensors of the tuple are recorded
            as ``output1``, ``output2``, ...
        trust: use ``policy`` as it is, whatever its signature.

    Raises:
        PolicyError: (a TypeError) ``policy`` is not callable, or takes another number of arguments. The
            result raises it when it returns something that is no action, or has changed in place what it was called with.
    """
    if policy is None:
        return env.rand_action
    if isinstance(policy, BindsToEnv):
        return policy.bound_to(env)
    require_policy(policy)
    if policy == env.rand_action:
        return env.rand_action
    if isinstance(policy, TensorDictModule) and type(policy) is TensorDictModule:
        return CallModule(policy, _CallOnRoot(policy))
    if trust:
        return _CallOnRoot(policy, "That is so because of trust_policy=True.")
    if takes_tensordict(policy):
        return _CallOnRoot(policy)
    inputs = observation_inputs(env)
    _require_room(policy, inputs)
    return CallOnLeaves(policy, inputs, ActionWriter(env))


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
        """Take the ``full_action_spec`` of an env over as ``action_spec``, where there is none.

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


def replay(env: Stepping, actions: Iterable[Any]) -> Policy:
    """Return the policy that does what was decided before.

    Args:
        env: says what its actions are called.
        actions: one item for each step: what a plain callable would return, or a TensorDict of actions.

    The result raises `PolicyError` (a TypeError) when an item is no action, and `RolloutError` when there is none.
    """
    upcoming = enumerate(actions)
    write = ActionWriter(env, checks_each=True)
    write.cure = "Pass"

    def act(tensordict: TensorDictBase) -> TensorDictBase:
        number, action = next(upcoming, (None, None))
        if action is None:
            raise RolloutError(
                "actions ended before the rollout did. Pass one for each step, or a list, whose length is "
                "the most steps that are taken."
            )
        write.given_by = f"item {number} of actions holds"
        if not isinstance(action, TensorDictBase):
            return write(tensordict, action)
        before = tensors_in(tensordict)
        try:
            tensordict.update(action)
        except RuntimeError as error:  # which tells no sizes
            raise PolicyError(
                f"item {number} of actions is a TensorDict of batch size {tuple(action.batch_size)}, but the env has "
                f"{tuple(tensordict.batch_size)}. Pass one action for each row."
            ) from error
        if (calls := calls_of_run()) is not None:
            calls.own_entries(tensordict, before)
        return tensordict

    return act


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
            f"the policy would be called with the observations {inputs}, but {name}{signature} does not take "
            f"{len(inputs)} arguments: {error}. {HOW_CALLED} To name the entries that it reads, pass "
            'TensorDictModule(policy, in_keys=["observation"], out_keys=["action"]), from tensordict.nn.'
        ) from error


def _signature_of(policy: Any) -> inspect.Signature | None:
    """Read what a callable takes; None of builtins, which do not tell."""
    call = policy.forward if isinstance(policy, torch.nn.Module) else policy
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None


class _CallOnRoot:
    """Call a policy on the TensorDict, into which goes what it returns in a new one.

    Args:
        function: the policy.
        why: why it is called so, for messages.
    """

    def __init__(self, function: Callable[..., Any], why: str = HOW_CALLED):
        self.function, self.why = function, why

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        given = tensors_in(tensordict)
        tensors = given.values()
        versions = versions_of(tensors)
        try:
            acted = self.function(tensordict)
        except Exception as error:
            add_advice(error, tensordict.values(True, True))
            is_sure = isinstance(self.function, TensorDictModuleBase) or isinstance(error, KeyError)
            if isinstance(error, WRONG_FORM) and not is_sure:
                error.add_note(
                    f"The policy was called with the TensorDict, and not with the observations. {self.why}"
                )
            raise
        if versions_of(tensors) != versions:
            raise changed_in_place(given, tensors, versions)
        if acted is not tensordict:
            self._merge(tensordict, acted)
        if (calls := calls_of_run()) is not None:
            calls.called(given, tensors, versions)
            calls.own_entries(tensordict, given)
        return tensordict

    def _merge(self, tensordict: TensorDictBase, acted: Any) -> None:
        """Write what a policy has returned in a new TensorDict into the one that it was called with."""
        if not isinstance(acted, TensorDictBase):
            raise PolicyError(
                f"the policy returned {type(acted).__name__}, but was called with a TensorDict and "
                f"must return one. Write the action into it, or return a new one with the action. {self.why}"
            )
        try:
            tensordict.update(acted)
        except RuntimeError as error:  # which tells no sizes
            raise PolicyError(
                f"the policy returned a TensorDict of batch size {tuple(acted.batch_size)}, but was called with one of "
                f"{tuple(tensordict.batch_size)}. Return one row for each."
            ) from error


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


def on_device(act: Policy, there: torch.device | None, back: torch.device | None) -> Policy:
    """Have a policy act on data moved ``there``, and move the data ``back``; None: an env of no device gets data of none."""
    if there is None or there == back:
        return act

    def cast(td: TensorDictBase) -> TensorDictBase:
        acted = act(td.to(there))
        return acted.to(back) if back is not None else without_device(acted)

    return cast


def takes_tensordict(policy: Any) -> bool:
    """Check whether a callable takes a TensorDict, by its type, parameter name or annotation."""
    if isinstance(policy, TensorDictModuleBase):
        return True
    signature = _signature_of(policy)
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
