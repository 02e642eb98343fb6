"""Policies that are called with tensors: plain functions, and plain TensorDictModules without their TensorDict.

A call of a `TensorDictModule` costs more than a small network: its dispatch, a look-up of pandas for each
output, contexts. One that does nothing but read entries, call the module inside and write what that gives is
read, called and written here. Anything else that it could do (see `_is_plain`) is left to itself.
`tests/env/test_on_leaves.py` compares both.

Conventions
    leaves  tensors by position, as `LeavesPolicy.reads` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, skip_existing
from torch import Tensor
from torch.nn.modules import module as torch_modules

from envkit.data.paths import Key, Path, as_path
from envkit.data.transition import leaves
from envkit.env.policy_calls import calls_of_run, changed_in_place, versions_of
from envkit.env.stepping import Stepping
from envkit.errors import PolicyError
from envkit.specs import Categorical, OneHot, TensorSpec

HOW_CALLED = (
    "A policy is called with the observations: policy(observation). If its argument is named `td` or `tensordict`, or is "
    "annotated as a TensorDict, it is called with the TensorDict: policy(td)."
)
"""Which of its two forms a function or a plain module has, for messages; `takes_tensordict` decides it."""

WRONG_FORM = (AttributeError, IndexError, KeyError, TypeError)
"""Errors of a policy that may come from the other form: a tensor is no TensorDict."""


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


class CallOnLeaves:
    """Call a plain function on observation leaves and write what it returns as the action.

    Args:
        function: what the user passed.
        in_keys: entries it is called with.
        write: puts what it returns into the TensorDict.
    """

    def __init__(self, function: Callable[..., Any], in_keys: list[Key], write: ActionWriter):
        self._function, self._in_keys, self._write = function, in_keys, write
        write.takes_more = True

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        given = [tensordict.get(key) for key in self._in_keys]
        return self._write(tensordict, self._called(given))

    def _called(self, given: Sequence[Any]) -> Any:
        try:
            return _called(self._function, self._in_keys, given)
        except WRONG_FORM as error:
            if not isinstance(error, PolicyError):
                error.add_note(
                    f"The policy was called with the observations {self._in_keys}, and not with the TensorDict. {HOW_CALLED}"
                )
            raise

    def for_run(self, root: TensorDictBase) -> LeavesPolicy:
        """See `envkit.env.policy.ActsInRuns`."""
        called, named, batch = self._called, self._write.named, root.batch_size
        paths = {key: as_path(key) for key in self._write.actions}

        def act(given: Sequence[Tensor]) -> dict[Path, Any]:
            written = named(called(given), batch)
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
        found = {}
        for key, action in zip(self.actions, actions, strict=False):
            if not isinstance(action, torch.Tensor) and self.actions[key].dtype is not None:
                action = self._as_tensor(action, key)
            if self._checks_each or not self._was_called:
                self._check_size(action, key, batch)
            found[key] = action
        for number, value in enumerate(further, 1):
            found[f"output{number}"] = self._further(value, number, batch)
        self._was_called = True
        if (calls := calls_of_run()) is not None:
            for key, value in found.items():
                found[key] = calls.own(key, value)
        return found

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
        """Take numbers and arrays for tensors."""
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
                f"env takes {tuple(shape)}: {spec}. {self._advice(action, spec, shape)}"
            )

    def _advice(self, action: torch.Tensor, spec: TensorSpec, shape: torch.Size) -> str:
        """Return how an action gets the shape that the env takes."""
        if isinstance(spec, OneHot) and action.shape == shape[:-1]:
            return (
                f"For option numbers, make the env with categorical_action_encoding=True. {self.cure} "
                f"torch.nn.functional.one_hot(action, {spec.n}) otherwise."
            )
        if isinstance(spec, Categorical) and action.shape == (*shape, spec.n):
            return f"If these are scores of the options, {self.cure.lower()} scores.argmax(-1), or a sample."
        return f"{self.cure} one value for each element."


# ------------------------------------------------------------------------------- TensorDictModules


class CallModule:
    """Call a `TensorDictModule` as it is, or, where that is the same, the module inside it.

    Args:
        module: what the user passed, of that class and no subclass.
        otherwise: calls it as it is.
    """

    def __init__(
        self, module: TensorDictModule, otherwise: Callable[[TensorDictBase], TensorDictBase]
    ):
        self._module, self._otherwise = module, otherwise

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        module = self._module
        if type(tensordict) is not TensorDict or not _is_plain(module):
            return self._otherwise(tensordict)
        given = [tensordict.get(key, None) for key in module.in_keys]
        if not all(type(leaf) is Tensor for leaf in given):
            return self._otherwise(tensordict)
        out = _called(module.module, module.in_keys, given)
        found = _own_tensors(out, module.out_keys)
        if found is None:
            return _given_out(module, out)(tensordict)
        for key, value in zip(module.out_keys, found, strict=True):
            if key != "_":
                tensordict.set(key, value)
        return tensordict

    def for_run(self, root: TensorDictBase) -> LeavesPolicy | None:
        """See `envkit.env.policy.ActsInRuns`."""
        module, batch, device = self._module, root.batch_size, root.device
        if not _is_plain(module):
            return None
        paths = [as_path(key) for key in module.out_keys]
        dims = len(batch)

        def act(given: Sequence[Tensor]) -> dict[Path, Any]:
            out = _called(module.module, module.in_keys, given)
            found = _own_tensors(out, paths)
            if found is not None and all(value.shape[:dims] == batch for value in found):
                return {
                    path: value
                    for path, value in zip(paths, found, strict=True)
                    if path != _DROPPED
                }
            td = TensorDict({}, batch_size=batch, device=device)
            return dict(leaves(_given_out(module, out)(td)))

        reads = tuple(map(as_path, module.in_keys))
        return LeavesPolicy(reads, tuple(path for path in paths if path != _DROPPED), act)


def _called(function: Callable[..., Any], keys: Sequence[Any], given: Sequence[Any]) -> Any:
    versions = versions_of(given)
    try:
        out = function(*given)
    except Exception as error:
        add_advice(error, given)
        raise
    if versions_of(given) != versions:
        raise changed_in_place(keys, given, versions)
    if (calls := calls_of_run()) is not None:
        calls.called(keys, given, versions)
    return out


def add_advice(error: Exception, given: Iterable[Any]) -> None:
    """Add to an error of a policy how to cast what it was given, where float64 met a network of another dtype."""
    is_double = any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in given)
    if is_double and isinstance(error, RuntimeError) and "dtype" in str(error):
        error.add_note(
            "The policy was given float64 observations, and its parameters have another dtype. Cast them: "
            "TransformedEnv(env, DoubleToFloat()), or make the network double()."
        )


_DROPPED = ("_",)
"""The entry that a `TensorDictModule` does not write."""

_GLOBAL_HOOKS = (
    torch_modules._global_forward_hooks,
    torch_modules._global_forward_pre_hooks,
    torch_modules._global_backward_hooks,
    torch_modules._global_backward_pre_hooks,
)


def _is_plain(module: TensorDictModule) -> bool:
    """Check whether calling a module only reads entries, calls the module inside and writes what that gives.

    Not so with hooks (``select_out_keys`` is one), keywords, another method than the call, strictness,
    outputs in a new TensorDict, its own ``forward``, ``module.compile()``, or where entries that are
    there already are not computed.
    """
    own: Mapping[str, Any] = vars(module)
    return own.keys() >= _READ_HERE and not (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or any(_GLOBAL_HOOKS)
        or own["_kwargs"] is not None
        or own["method"] is not None
        or own["method_kwargs"]
        or own["_get_kwargs"]
        or own["strict"]
        or own["inplace"] is not True
        or not own.keys().isdisjoint(_REPLACEABLE)
        or own.get("_compiled_call_impl") is not None
        or skip_existing()
    )


_READ_HERE = frozenset(("_kwargs", "method", "method_kwargs", "_get_kwargs", "strict", "inplace"))
"""Attributes in which tensordict keeps how a module was made; a release that keeps something else is left to itself."""

_REPLACEABLE = frozenset(("forward", "_call_module", "_call_impl", "_write_to_tensordict"))
"""Methods that a user may have replaced on one module."""


def _own_tensors(out: Any, keys: Sequence[Any]) -> Sequence[Tensor] | None:
    """Return what a module returned as a tensor for each key, as it may be recorded; None if it is anything else."""
    found = out if type(out) is tuple else (out,)
    if len(found) != len(keys) or not all(type(value) is Tensor for value in found):
        return None
    if (calls := calls_of_run()) is None:
        return found
    return [calls.own(key, value) for key, value in zip(keys, found, strict=True)]


def _given_out(module: TensorDictModule, out: Any) -> TensorDictModule:
    """Return a module that writes what another was found to return: trees, arrays, too many, ..."""
    return TensorDictModule(lambda *_: out, in_keys=module.in_keys, out_keys=module.out_keys)
