"""Whether a subclass, or a user on one env, has put a method of its own in the place of a public one.

Fast ways do many things at once: they step and reset in one call, run a whole rollout, run inside
another env. They do not call `step` or `reset` for that. `Overridable` is the one guard they all ask, so
that an override is honoured on every way.

Conventions
    fast way   what does the work of some methods without calling them.
    written    a class that brings fast ways names in ``_passes_by`` the methods that they stand for, as
               they are in that class. What classes derived from it define is an override.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from envkit.env.exclusive import InUse, hold_calls
from envkit.env.opaque import hide_calls
from envkit.errors import FusionError

__all__ = ["Overridable"]


class Overridable(nn.Module):
    """The root of environments: public calls are guarded, and what is overridden is known.

    The calls of every class, overrides in a subclass too, hold the env (see `exclusive`) and are hidden
    from torch's compiler (see `opaque`).
    """

    _in_use: InUse

    if TYPE_CHECKING:  # nn.Module's would give every misspelt name a type
        __getattr__: None  # type: ignore[assignment, misc]

    _passes_by: ClassVar[frozenset[str]] = frozenset()
    """What the fast ways of this class do without calling it."""

    _defined_since: ClassVar[frozenset[str]] = frozenset()
    """What is defined by classes that are derived from the one that says what it passes by."""

    _passed_by_override: ClassVar[bool] = False
    """Whether one of them stands for a method that a fast way does not call."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        hold_calls(cls)
        hide_calls(cls)
        names: set[str] = set()
        for base in cls.__mro__:
            if "_passes_by" in vars(base):
                break
            names.update(vars(base))
        cls._defined_since = frozenset(names)
        cls._passed_by_override = bool(names & cls._passes_by)

    def _overrides(self, names: frozenset[str]) -> bool:
        """Say whether one of these methods was overridden, by a subclass or on this very env."""
        return not (self._defined_since.isdisjoint(names) and vars(self).keys().isdisjoint(names))

    @property
    def _steps_by_itself(self) -> bool:
        """Whether resets and steps are those of the class, so that a fast way may stand for them."""
        if self._passed_by_override:
            return False
        return self.__dict__.keys().isdisjoint(self._passes_by)

    @property
    def _draws_its_own(self) -> bool:
        """Whether random actions come from an override of `rand_action`, here or in an env inside."""
        return self._overrides(_DRAWING)

    @property
    def _may_be_fused(self) -> bool:
        """Whether a program may stand for this env: nothing is overridden, here or in an env inside."""
        return self._steps_by_itself

    def _require_no_override(self, *, draws: bool) -> None:
        """Check that a whole run may be one program; with ``draws`` random actions are drawn in it.

        Raises:
            FusionError: what the env makes of a step, a reset or a draw would be passed by.
        """
        names = self._passes_by | _DRAWING if draws else self._passes_by
        if self._overrides(names):
            changed = sorted(names & (self._defined_since | vars(self).keys()))
            raise FusionError(
                f"unroll runs the programs of the env alone and would pass by what {type(self).__name__} "
                f"makes of {', '.join(changed)}. Use rollout(steps, break_when_any_done=False), which calls "
                "them."
            )


_DRAWING = frozenset(("rand_action",))
