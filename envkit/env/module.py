"""An env as a torch module, and whether a subclass, or a user on one env, has overridden a public method of it.

Fast ways do many things at once: they step and reset in one call, run a whole rollout, run inside
another env. They do not call `step` or `reset` for that. `EnvModule` is the one guard they all ask, so
that an override is honoured on every way. It knows neither specs nor steps.

An env is a `torch.nn.Module`, since modules inside of it (transforms, policies) must move, be saved and be listed with
it. Its hooks, casts and registers are there, and `dir` does not show them.

`torch.compile` takes a call of an env as one step that it does not look into: programs of JAX, simulators, processes
and TensorDicts by name are none of what it compiles. Code before and after the call is compiled, and a policy that an
env calls stays compiled if it was compiled by itself.

Conventions
    fast way   what does the work of some methods without calling them.
    written    a class that brings fast ways names in ``_fast_path_bypasses`` the methods that they stand for, as
               they are in that class. A method that a derived class defines is an override.
    resume     go on from a state dict, and the data carried into the next step, as the env that gave it would.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, cast

import torch
from torch import nn

from envkit.env.facts import Facts
from envkit.env.own_state import OwnState
from envkit.env.thread_lock import CALLS, InUse, hold_calls
from envkit.errors import FusionError, NotCallableError

_DRAWING = frozenset(("rand_action",))


class EnvModule(OwnState):
    """The root of environments: moved, listed, saved and left like a torch module, and never called.

    The calls of every class, overrides in a subclass too, hold the env (see `thread_lock`) and are hidden
    from torch's compiler.
    """

    _in_use: InUse

    if TYPE_CHECKING:  # nn.Module's would give every misspelt name a type
        __getattr__: None  # type: ignore[assignment, misc]

    _fast_path_bypasses: ClassVar[frozenset[str]] = frozenset()
    """Methods that the fast ways of this class replace without calling them."""

    _defined_since: ClassVar[frozenset[str]] = frozenset()
    """Names defined by classes that are derived from the one that says what it passes by."""

    _passed_by_override: ClassVar[bool] = False
    """Whether one of them stands for a method that a fast way does not call."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        hold_calls(cls)
        _hide_calls(cls)
        names: set[str] = set()
        for base in cls.__mro__:
            if "_fast_path_bypasses" in vars(base):
                break
            names.update(vars(base))
        cls._defined_since = frozenset(names)
        cls._passed_by_override = bool(names & cls._fast_path_bypasses)

    def _overrides(self, names: frozenset[str]) -> bool:
        """Check whether one of these methods was overridden, by a subclass or on this very env."""
        return not (self._defined_since.isdisjoint(names) and vars(self).keys().isdisjoint(names))

    @property
    def _steps_by_itself(self) -> bool:
        """Whether resets and steps are those of the class, so that a fast way may stand for them."""
        if self._passed_by_override:
            return False
        return self.__dict__.keys().isdisjoint(self._fast_path_bypasses)

    @property
    def _steps_otherwise(self) -> str | None:
        """The class of the env that steps, this one or one inside, if it does so in another way than its fast ways."""
        return None if self._steps_by_itself else type(self).__name__

    @property
    @abstractmethod
    def _facts(self) -> Facts:
        """Facts about the env that hold while its specs and settings stay."""

    @property
    def _draws_own_actions(self) -> bool:
        """Whether random actions come from an override of `rand_action`, or from rules of the env's own, here or inside."""
        return self._overrides(_DRAWING) or self._facts.draws_own_actions

    @property
    def _may_be_fused(self) -> bool:
        """Whether a program may stand for this env: nothing is overridden, here or in an env inside."""
        return self._steps_by_itself

    def _require_no_override(self, *, draws: bool) -> None:
        """Check that a whole run may be one program; with ``draws`` random actions are drawn in it.

        Raises:
            FusionError: what the env makes of a step, a reset or a draw would be passed by.
        """
        names = self._fast_path_bypasses | _DRAWING if draws else self._fast_path_bypasses
        if self._overrides(names):
            changed = sorted(names & (self._defined_since | vars(self).keys()))
            raise FusionError(
                f"unroll runs the programs of the env alone and would pass by what {type(self).__name__} "
                f"makes of {', '.join(changed)}. Use rollout(steps, break_when_any_done=False), which calls "
                "them."
            )

    # --------------------------------------------------------------------------------- as a module

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Environments are not called like modules.

        Raises:
            NotCallableError: (a NotImplementedError) always.
        """
        raise NotCallableError(
            f"{type(self).__name__} is an environment: call its step or reset. If it was passed "
            "where a create function is expected, pass `lambda: env_class(...)` instead. If code of TorchRL "
            "called it, pass that code to_torchrl(env)."
        )

    def __dir__(self) -> list[str]:
        """List what users use: of the names of `torch.nn.Module` some."""
        return _shown(type(self), super().__dir__())

    # ----------------------------------------------------------------------------------- states

    def record_for_resume(self, mode: bool = True) -> Self:
        """Record the episodes of simulators, so that `state_dict` holds where they are; returns self.

        Only envs on simulators that must be played again record something: the actions of the episode. Others
        resume without. Call it before the first reset. From then on, `state_dict` raises where the episode under way
        cannot be restored exactly.

        Args:
            mode: False stops it, and drops what was recorded. Episodes under way are then no part of a state dict: where
                that is loaded, new ones begin.
        """
        return self

    def _movable_objects(self) -> Iterator[object]:
        """Yield the objects that steps change, which no two rows of a batch may share: envs and simulators."""
        if cast(Any, self).batch_locked:
            yield self

    def _visit_transforms(self, visit: Callable[[Any, Any], Any], earlier: Any) -> Any:
        """Call a function with the transforms around each env there is in this one, where it lives; gives the answers.

        Args:
            visit: see `envkit.env.learning`; worker processes are sent it.
            earlier: its second argument: `ALL`, or what an earlier call answered, each part to where it came from.
        """
        return None

    # ------------------------------------------------------------------------------ place and life

    def cpu(self) -> Self:
        """Move the env to the CPU; returns self."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move the env to a CUDA device; returns self."""
        return self.to(
            device if isinstance(device, torch.device) else torch.device("cuda", device or 0)
        )

    @abstractmethod
    def close(self, *, raise_if_closed: bool = False) -> None:
        """Release what the env holds; see `EnvBase.close`."""

    def __enter__(self) -> Self:
        """Return the env itself; what follows ``with`` closes it in the end."""
        return self

    def __exit__(self, *failure: object) -> None:
        self.close(raise_if_closed=False)


def _hide_calls(cls: type) -> None:
    """Hide the calls that a class defines from torch's compiler."""
    for name in CALLS & vars(cls).keys():
        if isfunction(call := vars(cls)[name]):
            setattr(cls, name, torch.compiler.disable(call, reason="an env is opaque"))


_USED = frozenset(
    [
        *("to", "cpu", "cuda", "train", "eval", "training", "requires_grad_", "zero_grad"),
        *("state_dict", "load_state_dict", "apply", "register_buffer", "add_module"),
        *("parameters", "buffers", "children", "modules"),
        *("named_parameters", "named_buffers", "named_children", "named_modules"),
    ]
)
"""Attributes of a module that an env uses."""

_HIDDEN = {*dir(nn.Module), *vars(nn.Module())} - {*dir(object), *_USED}

_OURS = ("torch", "envkit", "envkit_bridges")


def _shown(cls: type, names: Iterable[str]) -> list[str]:
    """Return the names that an env of this class has, without those that only modules need.

    A name that a user's class defines stays, whatever torch means by it.
    """
    users = (kind for kind in cls.__mro__ if kind.__module__.partition(".")[0] not in _OURS)
    own = {name for kind in users if kind is not object for name in vars(kind)}
    return sorted(name for name in {*names} if name not in _HIDDEN or name in own)
