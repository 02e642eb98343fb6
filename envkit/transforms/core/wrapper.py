"""Base classes of envs that wrap another env, and answer with it for all that they do not define.

`Wrapper` decides which attributes are those of the wrapped env. It does not know transforms.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

from tensordict import TensorDictBase
from torch import nn

from envkit.env.base import EnvBase
from envkit.env.facts import Facts
from envkit.errors import BypassError


class Wrapper(EnvBase):
    """Base of envs around another env, ``base_env``.

    Attributes that neither the class nor the instance has are those of the base env, unless their name
    begins with two underscores.
    """

    base_env: EnvBase
    _hands_resets_on = True

    def __init__(self, base_env: EnvBase):
        nn.Module.__init__(self)  # what EnvBase would set is asked of the base env
        self.base_env = base_env
        self._in_use = base_env._in_use

    if not TYPE_CHECKING:  # which has their types from EnvBase
        _seeded_parts = property(attrgetter("base_env._seeded_parts"))

        @EnvBase.batch_locked.getter
        def batch_locked(self) -> bool:
            """True when the base env accepts its own batch size only."""
            return self.base_env.batch_locked

    @property
    def is_closed(self) -> bool:
        """Whether the base env is closed."""
        return self.base_env.is_closed

    @property
    def run_type_checks(self) -> bool:
        """Whether the base env compares dtypes with its specs."""
        return self.base_env.run_type_checks

    @run_type_checks.setter
    def run_type_checks(self, value: bool) -> None:
        self.base_env.run_type_checks = value

    @property
    def allow_done_after_reset(self) -> bool:
        """Whether the base env accepts done flags that are set right after a reset."""
        return self.base_env.allow_done_after_reset

    @allow_done_after_reset.setter
    def allow_done_after_reset(self, value: bool) -> None:
        self.base_env.allow_done_after_reset = value

    @property
    def keeps_last_output(self) -> bool:
        """Whether the base env gives the last known values of what was not reset."""
        return self.base_env.keeps_last_output

    def _find_facts(self) -> Facts:
        return self.base_env._facts

    @property
    def _draws_own_actions(self) -> bool:
        """Whether random actions come from an override of `rand_action`, or from rules of the env's own, here or inside."""
        return super()._draws_own_actions or self.base_env._draws_own_actions

    @property
    def _steps_otherwise(self) -> str | None:
        return self.base_env._steps_otherwise

    @property
    def _may_be_fused(self) -> bool:
        return super()._may_be_fused and self.base_env._may_be_fused

    def _require_no_override(self, *, draws: bool) -> None:
        super()._require_no_override(draws=draws)
        self.base_env._require_no_override(draws=draws)

    def _movable_objects(self) -> Iterator[object]:
        yield from self.base_env._movable_objects()

    def _visit_transforms(self, visit: Any, earlier: Any) -> Any:
        return self.base_env._visit_transforms(visit, earlier)

    def record_for_resume(self, mode: bool = True) -> Self:
        """Record the episodes of the base env, see `EnvBase.record_for_resume`."""
        self.base_env.record_for_resume(mode)
        return self

    def _leave_episodes(self, call: str) -> None:
        self.base_env._leave_episodes(call)

    if not TYPE_CHECKING:  # a misspelt name would pass

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if hasattr(type(self), name):  # a property failed: say why, do not ask another env
                    return object.__getattribute__(self, name)
                if name.startswith("__") or "base_env" not in self.__dict__.get("_modules", {}):
                    raise
            if name.startswith("async_") and hasattr(self.base_env, name):
                raise BypassError(
                    f"{type(self).__name__} has no {name!r}: the rows of {type(self.base_env).__name__} would pass by the "
                    "transforms. Put them inside the envs of the pool: "
                    "AsyncEnvPool([lambda: TransformedEnv(make(), transform)])."
                )
            return getattr(self.base_env, name)

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Close the base env."""
        self.base_env.close(raise_if_closed=raise_if_closed)


class TransformHolder(Wrapper):
    """Attributes of an env that its transforms use."""

    _reads_specs = False
    """Whether transforms are asked for their specs now; some complete their settings there."""

    @abstractmethod
    def _env_before(self, transform: Any) -> TransformHolder:
        """Return the env as ``transform``, one of this env's, sees it."""

    @abstractmethod
    def steps_first(self, transform: Any) -> bool:
        """Check whether ``transform``, one of this env's, comes right after the base env."""

    @abstractmethod
    def _step_inverted(self, td: TensorDictBase) -> TensorDictBase:
        """Step with an input that the inverse pass has gone through already."""

    @abstractmethod
    def _changed(self) -> None:
        """Forget what was read from the specs; it is read again at the next use."""
