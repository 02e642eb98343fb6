"""Several policies of one architecture as one module: each acts on its own rows.

This module decides which rows belong to which policy, and what policies must have in common. It knows torch and TensorDict; to
all that translates policies, what it makes is a module like any other.

Conventions
    group   rows of one policy: equal numbers of neighbouring rows, those of policy 0 first. So a batch of ``(policies, n)`` has
            the policies along its first axis.
    state   parameters and buffers by name, with the policies as a new first axis, as `torch.func.stack_module_state` gives them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from envkit.data.arguments import require_rows_of_policies
from envkit.data.paths import Path, as_key, as_path
from envkit.data.transition import leaves
from envkit.env.policy import takes_tensordict
from envkit.errors import ArgumentError, MissingKeyError, PolicyError
from envkit_bridges.policy.exporting import values_unread

State = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


def stacked(modules: Sequence[nn.Module]) -> StackedPolicies:
    """Return modules of one architecture as one module.

    Raises:
        PolicyError: (a TypeError) there is none, or one is no `torch.nn.Module`.
        ArgumentError: (a ValueError) they differ in more than the values of parameters and buffers.
    """
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise PolicyError(
                f"module {number} is {module!r}, of type {type(module).__name__}; expected a torch.nn.Module. Pass a list of "
                "modules of one architecture."
            )
    if not modules:
        raise PolicyError("the list of modules is empty; expected at least one. Pass [module].")
    for number, module in enumerate(modules):
        _require_like(modules[0], module, number)
    return on_state(modules[0], torch.func.stack_module_state(list(modules)))


def on_state(module: nn.Module, state: State) -> StackedPolicies:
    """Return one module for all policies whose parameters and buffers were stacked.

    Args:
        module: one of them, for its architecture. It is copied.
        state: parameters and buffers of all; their memory is used.

    Raises:
        ArgumentError: (a ValueError) ``state`` does not belong to ``module``.
    """
    kind = StackedPolicies
    if isinstance(module, TensorDictModuleBase):
        kind = StackedTensorDictModules
    elif takes_tensordict(module):
        kind = StackedOnTensorDict
    return kind(module, state)


class StackedPolicies(nn.Module):
    """Policies of one architecture: called with the rows of all, it lets each act on its own.

    Its parameters are those of one policy, with the policies as a new first axis. So an optimiser trains all of them at once.

    Args:
        module: one of the policies, see `on_state`.
        state: parameters and buffers of all.

    Attributes:
        num_policies: how many there are.
        each: a policy whose parameters and buffers are those of all.
    """

    def __init__(self, module: nn.Module, state: State):
        super().__init__()
        parameters, buffers = state
        like = dict(module.named_parameters()), dict(module.named_buffers())
        self.num_policies = _number_of_policies(like, state)
        self.each = copy.deepcopy(module)
        for name, parameter in self.each.named_parameters():
            parameter.data = parameters[name].detach()
        for name, buffer in self.each.named_buffers():
            buffer.data = buffers[name].detach()

    def forward(self, *observations: Tensor) -> Any:
        """Return what each policy returns for its group.

        Args:
            observations: with the rows of all policies along the first axis.

        Raises:
            BatchSizeError: (a RuntimeError) the number of rows is no multiple of the policies.
        """
        self.require_groups(observations[0].shape[0] if observations[0].ndim else 1)
        return self._act(
            tuple(map(self._grouped, observations)),
            self._called,
        )

    def require_groups(self, rows: int) -> None:
        """Check that each policy has as many rows as the others.

        Raises:
            BatchSizeError: (a RuntimeError) the number of rows is no multiple of the policies.
        """
        require_rows_of_policies("the population", (rows,), self.num_policies)

    def require_all_rows(self, td: TensorDictBase, rows: int | None = None) -> None:
        """Check that data is not a part of the rows, as asynchronous pools return it: policies would act on rows of others.

        Args:
            td: what the policies are called with.
            rows: of the env; None where it is not known.

        Raises:
            PolicyError: (a TypeError) some rows may be missing.
        """
        numbers = td.get("env_index", None)
        if numbers is None or td.numel() == rows:
            return
        fix = "Step all of them: td = pool.step(td)."
        if rows is None:
            fix = "Bind it to the pool, which has all of them after reset() and step(): policy.bound_to(pool)(td)."
        raise PolicyError(
            f"a population of {self.num_policies} policies was called with the rows {list(numbers)} of an asynchronous pool; "
            f"expected all rows, the first ones for the first policy. {fix}"
        )

    def unstacked(self, index: int) -> nn.Module:
        """Return one of the policies as a plain module, with copies of its parameters and buffers.

        Raises:
            IndexError: there is no such policy.

        Example:
            >>> import torch
            >>> from envkit import compile_policy
            >>> population = compile_policy([torch.nn.Linear(3, 1) for _ in range(4)])
            >>> population.module.each.weight.shape
            torch.Size([4, 1, 3])
            >>> population.module.unstacked(2)
            Linear(in_features=3, out_features=1, bias=True)
        """
        if not -self.num_policies <= index < self.num_policies:
            raise IndexError(
                f"there is no policy {index}; expected one of 0 to {self.num_policies - 1}. Pass the number of a policy."
            )
        place = range(self.num_policies)[index]
        module = copy.deepcopy(self.each)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data[place].clone()
        return module

    def _act(self, groups: Any, act: Callable[[Mapping[str, Tensor], Any], Any]) -> Any:
        """Return what ``act`` returns for the state and the group of each policy, joined along the rows."""
        named = {**dict(self.each.named_parameters()), **dict(self.each.named_buffers())}

        def acted(state: Mapping[str, Tensor], group: Any, zero: Tensor) -> Any:
            with _MemoryOfEach(zero):
                return act(state, group)

        zeros = torch.zeros(self.num_policies, device=next(iter(named.values())).device)
        with values_unread():
            outcome = torch.func.vmap(acted, randomness="different")(named, groups, zeros)
        return tree_map(lambda value: value.flatten(0, 1), outcome)

    def _called(self, state: Mapping[str, Tensor], arguments: Any) -> Any:
        """Call a policy with its state.

        Raises:
            PolicyError: (a TypeError) it assigned a buffer, whose new value would be lost.
        """
        lost: list[str] = []

        def look(module: nn.Module, *_: Any) -> None:
            buffers = module.named_buffers()
            lost.extend(name for name, buffer in buffers if buffer is not state[name])

        with self._looking(look):
            outcome = torch.func.functional_call(self.each, dict(state), arguments)
        if lost:
            raise PolicyError(
                f"the policies assign their buffers {lost} while they act, which would lose the new values in a population. Change "
                "them in place, as in self.mean.copy_(mean)."
            )
        return outcome

    def _looking(self, look: Callable[..., None]) -> AbstractContextManager[Any]:
        """Call a function after the policies that have buffers, while they still have those of their state."""
        has_buffers = next(self.each.buffers(), None) is not None
        return self.each.register_forward_hook(look) if has_buffers else nullcontext()

    def _grouped(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (self.num_policies, -1))


_EMPTY = {torch.empty, torch.empty_like, Tensor.new, Tensor.new_empty}


class _MemoryOfEach(TorchFunctionMode):
    """Let `torch.func.vmap` fill memory with other random numbers for each policy, as distributions do.

    Args:
        zero: 0 of a policy.
    """

    def __init__(self, zero: Tensor):
        super().__init__()
        self.zero = zero

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return torch.zeros_like(made) + self.zero.to(made.dtype) if func in _EMPTY else made


class StackedOnTensorDict(StackedPolicies):
    """The same for policies that take a TensorDict."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
        """Write what each policy writes for its group.

        Args:
            tensordict: batch size ``(rows, ...)``, with the rows of all policies along the first axis.

        Raises:
            BatchSizeError: (a RuntimeError) the number of rows is no multiple of the policies.
        """
        batch = tensordict.batch_size
        self.require_groups(batch[0] if batch else 1)
        groups = {
            path: self._grouped(value.reshape(-1, *value.shape[len(batch) :]))
            for path, value in self._read(tensordict).items()
        }

        def act(state: Mapping[str, Tensor], group: Mapping[Path, Tensor]) -> dict[Path, Tensor]:
            td = TensorDict({}, [batch.numel() // self.num_policies])
            for path, value in group.items():
                td.set(path, value)
            acted = self._called(state, (td,))
            return {path: value for path, value in leaves(acted) if value is not group.get(path)}

        for path, value in self._act(groups, act).items():
            tensordict.set(as_key(path), value.reshape((*batch, *value.shape[1:])))
        return tensordict

    def _read(self, tensordict: TensorDictBase) -> dict[Path, Tensor]:
        """List what policies may read."""
        return {path: value for path, value in leaves(tensordict) if isinstance(value, Tensor)}


class StackedTensorDictModules(StackedOnTensorDict, TensorDictModuleBase):
    """The same for TensorDictModules, which say what they read."""

    def __init__(self, module: Any, state: State):
        super().__init__(module, state)
        self.in_keys, self.out_keys = module.in_keys, module.out_keys

    def _read(self, tensordict: TensorDictBase) -> dict[Path, Tensor]:
        missing = [key for key in self.in_keys if tensordict.get(key, None) is None]
        if missing:
            raise MissingKeyError(
                f"the policies read {missing}, but the data has {sorted(map(str, tensordict.keys(True, True)))}. Rename their "
                "in_keys or the entries."
            )
        return {as_path(key): tensordict.get(key) for key in self.in_keys}


def _require_like(first: nn.Module, other: nn.Module, number: int) -> None:
    """Check that two modules have one architecture: the same parts, and in these the same numbers and forms of tensors.

    Raises:
        ArgumentError: (a ValueError) they do not.
    """
    one, two = _architecture(first), _architecture(other)
    differing = [name for name in (*one, *two) if one.get(name) != two.get(name)]
    if differing:
        found, expected = (shorten(str(had.get(differing[0], "nothing")), 60) for had in (two, one))
        raise ArgumentError(
            f"module {number} has {found} as {differing[0]}, but module 0 has {expected}; expected modules of one architecture, "
            "which differ in the values of parameters and buffers alone. Build all of them in the same way, and register a "
            "number that differs as a buffer."
        )


def _architecture(module: nn.Module) -> dict[str, Any]:
    """Describe a module by all that its copies have in common, by name."""
    described: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        described[f"module {prefix!r}"] = type(part).__qualname__
        for name, value in vars(part).items():
            path = f"{prefix}.{name}".lstrip(".")
            if isinstance(value, Tensor):
                described[f"tensor {path!r}"] = value.tolist()
            elif name not in _OF_ANY_MODULE:
                described[f"attribute {path!r}"] = _comparable(value)
    for kind, named in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for name, value in named:
            described[f"{kind} {name!r}"] = _form(value)
    return described


_OF_ANY_MODULE = frozenset(vars(nn.Module()))


def _comparable(value: Any) -> Any:
    """Return what an attribute of two copies has in common: values, also those in containers, code of functions, types of the rest."""
    if isinstance(value, bool | int | float | str | bytes | None):
        return value
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_comparable(each) for each in value]
    if isinstance(value, partial):
        return _comparable((value.func, value.args, value.keywords))
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{name}, {getattr(value, '__code__', '')}".rstrip(", ")


def _form(value: Tensor) -> str:
    wants_grad = ", requires_grad=True" if value.requires_grad else ""
    return f"{tuple(value.shape)} of {value.dtype}{wants_grad}"


def _number_of_policies(like: State, state: State) -> int:
    """Return how many policies were stacked.

    Raises:
        ArgumentError: (a ValueError) parameters or buffers do not belong to the module, or not to equally many policies.
    """
    numbers = set()
    for kind, expected, given in zip(("parameters", "buffers"), like, state, strict=True):
        if set(expected) != set(given):
            raise ArgumentError(
                f"the state has the {kind} {sorted(given)}, but the module has {sorted(expected)}. Pass one of the modules that "
                "were stacked, and (params, buffers) of torch.func.stack_module_state(modules)."
            )
        for name, value in given.items():
            if value.shape[1:] != expected[name].shape or not value.ndim:
                shape = ", ".join(["policies", *map(str, expected[name].shape)])
                raise ArgumentError(
                    f"{name!r} of the state has shape {tuple(value.shape)}; expected ({shape}). "
                    "Pass (params, buffers) of torch.func.stack_module_state(modules)."
                )
            numbers.add(len(value))
    if not numbers:
        raise ArgumentError(
            "the modules have no parameters and no buffers, so all of them do the same; expected some. Pass one of the modules."
        )
    if len(numbers) > 1:
        raise ArgumentError(
            f"the state has tensors of {sorted(numbers)} policies; expected one number for all. Pass (params, buffers) of "
            "torch.func.stack_module_state(modules)."
        )
    return numbers.pop()
