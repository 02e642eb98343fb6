"""A policy in one env: `bind_policy` decides, once, how what a user passes is called.

A policy can be called in three ways. All take a TensorDict. Some also act on single tensors, or on rows of
NumPy memory: then a run builds no TensorDict for a step. `BoundPolicy.for_run` says which.

Conventions
    root    TensorDict that a policy acts on; it writes the env's action keys into it.
    leaves  tensors by position, as `LeavesPolicy.reads` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, skip_existing
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from envkit.data.paths import Key, Path, as_path
from envkit.data.transition import leaves, without_device
from envkit.env.policy import (
    HOW_CALLED,
    WRONG_FORM,
    BindsToEnv,
    Policy,
    PolicyLike,
    observation_inputs,
    require_policy,
    signature_of,
    takes_tensordict,
)
from envkit.env.policy_calls import calls_of_run, changed_in_place, tensors_in, versions_of
from envkit.env.stepping import Stepping
from envkit.env.torch_threads import act_with_fitting_threads, work_of_row
from envkit.errors import PolicyError, RolloutError
from envkit.specs import Categorical, OneHot, TensorSpec


@dataclass(frozen=True)
class LeavesPolicy:
    """Acts on tensors for one run, with no TensorDict made for a step.

    Attributes:
        reads: entries of a root that it is called with.
        writes: entries that it gives; where it gives a tree as one of them, the node. A function may
            give further ones, which are no entries of the env: ``output1``, ...
        act: gives the entries, from the tensors in the order of `reads`.
    """

    reads: tuple[Path, ...]
    writes: tuple[Path, ...]
    act: Callable[[Sequence[Tensor]], Mapping[Path, Any]]


@dataclass(frozen=True)
class RowsPolicy:
    """Acts on NumPy rows for one run, with no TensorDict made for a step.

    Attributes:
        reads: entries of a root that it takes.
        writes: entries that it gives, with their shape (rows in front) and dtype.
        act: reads rows, which hold what it `reads`, and fills memory for what it `writes`: ``act(rows, out)``.
    """

    reads: tuple[Path, ...]
    writes: Mapping[Path, tuple[tuple[int, ...], np.dtype]]
    act: Callable[[Mapping[Path, np.ndarray], Mapping[Path, np.ndarray]], None]


class BoundPolicy:
    """A policy that acts in one env: called with a TensorDict, which it returns with actions.

    Args:
        act: what is called.
    """

    def __init__(self, act: Policy):
        self._act = act

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._act(tensordict)

    def for_run(self, root: TensorDictBase) -> LeavesPolicy | RowsPolicy | None:
        """Return what acts on roots like ``root`` without TensorDicts, and does the same; None if nothing does.

        Ask again for each run: what is returned reads the parameters where they lie now, and nothing else of the policy
        is looked at again.
        """
        return None


def bind_policy(
    env: Stepping, policy: PolicyLike, *, trust: bool = False, original: PolicyLike = None
) -> BoundPolicy:
    """Turn what a user passes as a policy into what acts in an env.

    Args:
        env: its specs name the inputs and outputs of a plain callable.
        policy: None or ``env.rand_action`` for random actions; or one that `BindsToEnv`, such as a compiled one. A
            TensorDictModule is called with the TensorDict. So is a callable with one argument named ``tensordict`` or
            ``td`` or annotated as a TensorDict. A new TensorDict that it returns is merged into that. Any other
            callable gets the observation leaves (see `observation_inputs`), in the order of ``observation_spec``, and
            returns the action (a tuple when there are several action keys). Further tensors of the tuple are recorded
            as ``output1``, ``output2``, ...
        trust: use ``policy`` as it is, whatever its signature.
        original: what ``policy`` was compiled from, if it hides its signature.

    Raises:
        PolicyError: (a TypeError) ``policy`` is not callable, or takes another number of arguments. The
            result raises it when it returns something that is no action, or has changed in place what it was called with.
    """
    if policy is None:
        return BoundPolicy(env.rand_action)
    if isinstance(policy, BindsToEnv):
        bound = policy.bound_to(env)
        return bound if isinstance(bound, BoundPolicy) else BoundPolicy(bound)
    require_policy(policy)
    if policy == env.rand_action:
        return BoundPolicy(policy)
    if isinstance(policy, TensorDictModule) and type(policy) is TensorDictModule:
        return _OnModule(policy)
    if trust:
        return _OnTensorDict(policy, "That is so because of trust_policy=True.")
    if takes_tensordict(policy if original is None else original):
        return _OnTensorDict(policy)
    inputs = observation_inputs(env)
    _require_room(policy, inputs)
    return _OnLeaves(policy, inputs, ActionWriter(env))


def replay(env: Stepping, actions: Iterable[Any]) -> BoundPolicy:
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

    return BoundPolicy(act)


def _require_room(policy: Callable[..., Any], inputs: list[Key]) -> None:
    """Check that a plain function takes as many arguments as there are entries for it.

    Raises:
        PolicyError: (a TypeError) it takes more or fewer.
    """
    signature = signature_of(policy)
    if signature is None:
        return
    try:
        signature.bind(*inputs)
    except TypeError as error:
        name = getattr(policy, "__name__", type(policy).__name__)
        if len(inputs) == 1 and len(signature.parameters) == len(_OF_JAX):
            raise PolicyError(
                f"the policy would be called with the observations {inputs}, but {name}{signature} takes three arguments, as "
                f"functions of JAX do: ({', '.join(_OF_JAX)}). Pass JaxPolicy(policy, params)."
            ) from error
        raise PolicyError(
            f"the policy would be called with the observations {inputs}, but {name}{signature} does not take "
            f"{len(inputs)} arguments: {error}. {HOW_CALLED} To name the entries that it reads, pass "
            'TensorDictModule(policy, in_keys=["observation"], out_keys=["action"]), from tensordict.nn.'
        ) from error


_OF_JAX = ("params", "observation", "key")
"""The arguments that a `JaxPolicy` passes to its function."""


def on_device(
    act: BoundPolicy, there: torch.device | None, back: torch.device | None
) -> BoundPolicy:
    """Wrap a policy: it acts on data moved ``there``, and the data is moved ``back``; None: an env of no device gets data of none."""
    if there is None or there == back:
        return act

    def cast(td: TensorDictBase) -> TensorDictBase:
        acted = act(td.to(there))
        return acted.to(back) if back is not None else without_device(acted)

    return BoundPolicy(cast)


class _OnTensorDict(BoundPolicy):
    """Calls a policy with the TensorDict, into which goes what it returns in a new one.

    Args:
        function: the policy.
        why: why it is called so, for messages.
    """

    def __init__(self, function: Callable[..., Any], why: str = HOW_CALLED):
        super().__init__(function)
        self._work, self._why = work_of_row(function), why

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensors_before = tensors_in(tensordict)
        tensors = tensors_before.values()
        versions = versions_of(tensors)
        try:
            work = self._work * tensordict.batch_size.numel()
            acted = act_with_fitting_threads(work, self._act, tensordict)
        except Exception as error:
            _advise(error, tensordict.values(True, True))
            is_sure = isinstance(self._act, TensorDictModuleBase) or isinstance(error, KeyError)
            if isinstance(error, WRONG_FORM) and not is_sure:
                error.add_note(
                    f"The policy was called with the TensorDict, and not with the observations. {self._why}"
                )
            raise
        if versions_of(tensors) != versions:
            raise changed_in_place(tensors_before, tensors, versions)
        if acted is not tensordict:
            self._merge(tensordict, acted)
        if (calls := calls_of_run()) is not None:
            calls.called(tensors_before, tensors, versions)
            calls.own_entries(tensordict, tensors_before)
        return tensordict

    def _merge(self, tensordict: TensorDictBase, acted: Any) -> None:
        """Write what a policy has returned in a new TensorDict into the one that it was called with."""
        if not isinstance(acted, TensorDictBase):
            raise PolicyError(
                f"the policy returned {type(acted).__name__}, but was called with a TensorDict and "
                f"must return one. Write the action into it, or return a new one with the action. {self._why}"
            )
        try:
            tensordict.update(acted)
        except RuntimeError as error:  # which tells no sizes
            raise PolicyError(
                f"the policy returned a TensorDict of batch size {tuple(acted.batch_size)}, but was called with one of "
                f"{tuple(tensordict.batch_size)}. Return one row for each."
            ) from error


class _OnLeaves(BoundPolicy):
    """Calls a plain function with observation leaves and writes what it returns as the action.

    Args:
        function: what the user passed.
        in_keys: entries it is called with.
        write: puts what it returns into the TensorDict.
    """

    def __init__(self, function: Callable[..., Any], in_keys: list[Key], write: ActionWriter):
        super().__init__(function)
        self._in_keys, self._write, self._work = in_keys, write, work_of_row(function)
        write.takes_more = True

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        given = [tensordict.get(key) for key in self._in_keys]
        return self._write(tensordict, self._called(given, tensordict.batch_size))

    def _called(self, inputs: Sequence[Any], batch: torch.Size) -> Any:
        try:
            return _called(self._act, self._in_keys, inputs, self._work * batch.numel())
        except WRONG_FORM as error:
            if not isinstance(error, PolicyError):
                error.add_note(
                    f"The policy was called with the observations {self._in_keys}, and not with the TensorDict. {HOW_CALLED}"
                )
            raise

    def for_run(self, root: TensorDictBase) -> LeavesPolicy:
        named, batch = self._write.named, root.batch_size
        paths = {key: as_path(key) for key in self._write.actions}

        def act(inputs: Sequence[Tensor]) -> dict[Path, Any]:
            written = named(self._called(inputs, batch), batch)
            return {paths.get(key) or as_path(key): value for key, value in written.items()}

        return LeavesPolicy(tuple(map(as_path, self._in_keys)), tuple(paths.values()), act)


class ActionWriter:
    """Write what a user gives as the action, or as a tuple of actions, into a TensorDict.

    How many elements an action has is looked at in the first call only, unless ``checks_each`` is set.

    Attributes:
        takes_more: a tuple may hold more tensors after the actions, which become ``output1``, ``output2``, ...
        given_by: how messages begin: who gives what.
        cure: the verb that says how to give it.
    """

    given_by, cure = "the policy returned", "Return"
    takes_more = False

    def __init__(self, env: Stepping, *, checks_each: bool = False):
        self.actions: dict[Key, TensorSpec] = {
            key: env.full_action_spec[key] for key in env.action_keys
        }
        self.batch_dims = env.batch_dims
        self._shown = {as_path(key)[0] for key in env.full_observation_spec.keys(True, True)}
        self._checks_each, self._was_called = checks_each, False

    def __call__(self, tensordict: TensorDictBase, actions: Any) -> TensorDictBase:
        for key, action in self.named(actions, tensordict.batch_size).items():
            tensordict.set(key, action)
        return tensordict

    def named(self, actions: Any, batch: torch.Size) -> dict[Key, Any]:
        """Return what a user gave as one action or as a tuple, by key."""
        if not isinstance(actions, tuple):
            actions = (actions,)
        missing, further = len(self.actions) - len(actions), actions[len(self.actions) :]
        if missing > 0 or (further and not self.takes_more):
            raise PolicyError(
                f"{self.given_by} {len(actions)} values, but the env has the action keys "
                f"{list(self.actions)}. {self.cure} one tensor for each of them."
            )
        by_key = {}
        for key, action in zip(self.actions, actions, strict=False):
            if not isinstance(action, torch.Tensor) and self.actions[key].dtype is not None:
                action = self._as_tensor(action, key)
            if self._checks_each or not self._was_called:
                self._check_size(action, key, batch)
            by_key[key] = action
        for number, value in enumerate(further, 1):
            by_key[f"output{number}"] = self._further(value, number, batch)
        self._was_called = True
        if (calls := calls_of_run()) is not None:
            for key, value in by_key.items():
                by_key[key] = calls.recordable(key, value)
        return by_key

    def _further(self, value: Any, number: int, batch: torch.Size) -> torch.Tensor:
        """Check one that comes after the actions."""
        name = f"output{number}"
        if name in self._shown:
            raise PolicyError(
                f"{self.given_by} {number} values beside the actions {list(self.actions)}, which would be recorded as "
                f"{name!r}, but the env shows an entry of this name. Name the outputs: TensorDictModule(policy, "
                "in_keys=[...], out_keys=[...]), from tensordict.nn."
            )
        if not isinstance(value, torch.Tensor) or value.shape[: len(batch)] != batch:
            what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise PolicyError(
                f"{self.given_by} {what} as {name!r}, after the actions {list(self.actions)}. {self.cure} tensors "
                f"that begin with the batch axes {tuple(batch)}, or the actions alone."
            )
        return value

    def _as_tensor(self, action: Any, key: Key) -> Any:
        """Convert numbers and arrays to tensors."""
        try:
            return torch.as_tensor(action)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PolicyError(
                f"{self.given_by} {action!r}, of type {type(action).__name__}, as {key!r}, but "
                f"the env takes {self.actions[key]}. {self.cure} a tensor."
            ) from error

    def _check_size(self, action: Any, key: Key, batch: torch.Size) -> None:
        spec = self.actions[key]
        if spec.dtype is None or -1 in spec.shape:
            return
        shape = torch.Size((*batch, *spec.shape[self.batch_dims :]))
        if action.numel() != shape.numel() or action.shape[: len(batch)] != batch:
            raise PolicyError(
                f"{self.given_by} a tensor of shape {tuple(action.shape)} as {key!r}, but the "
                f"env takes {tuple(shape)}: {spec}. {shape_advice(action, spec, shape, self.cure)}"
            )


def _called(
    function: Callable[..., Any], keys: Sequence[Any], inputs: Sequence[Any], work: int
) -> Any:
    versions = versions_of(inputs)
    try:
        out = act_with_fitting_threads(work, function, *inputs)
    except Exception as error:
        _advise(error, inputs)
        raise
    if versions_of(inputs) != versions:
        raise changed_in_place(keys, inputs, versions)
    if (calls := calls_of_run()) is not None:
        calls.called(keys, inputs, versions)
    return out


def _advise(error: Exception, inputs: Iterable[Any]) -> None:
    """Add to an error of a policy how to cast what it was given, where float64 met a network of another dtype.

    Raises:
        PolicyError: (a TypeError) JAX refused the tensors.
    """
    if (
        isinstance(error, TypeError)
        and "torch.Tensor" in str(error)
        and "abstract array" in str(error)
    ):
        raise PolicyError(
            f"the policy computes in JAX, but was called with tensors of torch: {str(error).splitlines()[0]} Write it as "
            f"act({', '.join(_OF_JAX)}), and pass JaxPolicy(act, params)."
        ) from error
    is_double = any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in inputs)
    if is_double and isinstance(error, RuntimeError) and "dtype" in str(error):
        error.add_note(
            "The policy was given float64 observations, and its parameters have another dtype. Cast them: "
            "TransformedEnv(env, DoubleToFloat()), or make the network double()."
        )


# ------------------------------------------------------------------------------- TensorDictModules


class _OnModule(_OnTensorDict):
    """Calls a `TensorDictModule` as it is, or, where that is the same, the module inside it.

    A call of a `TensorDictModule` costs more than a small network: its dispatch, a look-up of pandas for each output,
    contexts. One that does nothing but read entries, call the module inside and write what that gives is read, called
    and written here: a rollout of one CartPole takes 47 us a step of CPU time, and 76 otherwise.

    Args:
        module: what the user passed, of that class and no subclass.
    """

    def __init__(self, module: TensorDictModule):
        super().__init__(module)
        self._module = module

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        module = self._module
        if type(tensordict) is not TensorDict or not _is_plain(module):
            return super().__call__(tensordict)
        given = [tensordict.get(key, None) for key in module.in_keys]
        if not all(type(leaf) is Tensor for leaf in given):
            return super().__call__(tensordict)
        work = self._work * tensordict.batch_size.numel()
        out = _called(module.module, module.in_keys, given, work)
        values = _own_tensors(out, module.out_keys)
        if values is None:
            return _given_out(module, out)(tensordict)
        for key, value in zip(module.out_keys, values, strict=True):
            if key != "_":
                tensordict.set(key, value)
        return tensordict

    def for_run(self, root: TensorDictBase) -> LeavesPolicy | None:
        module, batch, device = self._module, root.batch_size, root.device
        if not _is_plain(module):
            return None
        paths = [as_path(key) for key in module.out_keys]
        dims, work = len(batch), self._work * batch.numel()

        def act(inputs: Sequence[Tensor]) -> dict[Path, Any]:
            out = _called(module.module, module.in_keys, inputs, work)
            values = _own_tensors(out, paths)
            if values is not None and all(value.shape[:dims] == batch for value in values):
                return {
                    path: value
                    for path, value in zip(paths, values, strict=True)
                    if path != _DROPPED
                }
            td = TensorDict({}, batch_size=batch, device=device)
            return dict(leaves(_given_out(module, out)(td)))

        reads = tuple(map(as_path, module.in_keys))
        return LeavesPolicy(reads, tuple(path for path in paths if path != _DROPPED), act)


_DROPPED = ("_",)
"""The entry that a `TensorDictModule` does not write."""


def _is_plain(module: TensorDictModule) -> bool:
    """Check whether calling a module only reads entries, calls the module inside and writes what that gives.

    So it is if it holds the attributes of a module that was made of keys and a function, and no other. Then it has no
    hooks (``select_out_keys`` is one), keywords, strictness or replaced methods, is not compiled, and writes into the
    TensorDict that it is called with. Where entries that are there already are not computed, it is not plain.
    """
    attributes = vars(module)
    if skip_existing() or _has_any_global_hook() or not attributes.keys() <= _NAMES_IN_PLAIN:
        return False
    for name, value in _ALIKE_IN_PLAIN.items():
        if name not in attributes or attributes[name] != value:
            return False
    return True


_ONE, _OTHER = (
    vars(TensorDictModule(function, in_keys=[key], out_keys=[key]))
    for function, key in ((nn.Identity(), "one"), (abs, "other"))
)
_NAMES_IN_PLAIN = _ONE.keys() | _OTHER.keys()
_ALIKE_IN_PLAIN = {
    name: _ONE[name]
    for name in _ONE.keys() & _OTHER.keys() - {"training"}
    if _ONE[name] == _OTHER[name]
}
"""Attributes that are the same in all plain modules, whatever their function and keys."""


def _own_tensors(out: Any, keys: Sequence[Any]) -> Sequence[Tensor] | None:
    """Return what a module returned as a tensor for each key, as it may be recorded; None if it is anything else."""
    values = out if type(out) is tuple else (out,)
    if len(values) != len(keys) or not all(type(value) is Tensor for value in values):
        return None
    if (calls := calls_of_run()) is None:
        return values
    return [calls.recordable(key, value) for key, value in zip(keys, values, strict=True)]


def _given_out(module: TensorDictModule, out: Any) -> TensorDictModule:
    """Return a module that writes what another was found to return: trees, arrays, too many, ..."""
    return TensorDictModule(lambda *_: out, in_keys=module.in_keys, out_keys=module.out_keys)


def shape_advice(action: torch.Tensor, spec: TensorSpec, shape: torch.Size, cure: str) -> str:
    """Return how an action gets the shape that the env takes.

    Args:
        action: what the policy wrote, of another shape.
        spec: what the env takes, for one row.
        shape: that of the env's rows.
        cure: the verb that says how to give it, for example "Return".
    """
    if isinstance(spec, OneHot) and action.shape == shape[:-1]:
        return (
            f"For option numbers, make the env with categorical_action_encoding=True. {cure} "
            f"torch.nn.functional.one_hot(action, {spec.n}) otherwise."
        )
    if isinstance(spec, Categorical) and action.shape == (*shape, spec.n):
        return f"If these are scores of the options, {cure.lower()} scores.argmax(-1), or a sample."
    return f"{cure} one value for each element."
