"""How an env is built: what every constructor takes beside its own arguments, and what follows ``__init__``."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import TYPE_CHECKING, Any

from torch import nn

from envkit.data.arguments import as_bool
from envkit.data.keywords import keywords_of
from envkit.late import late

__all__ = ["EnvMeta"]


class EnvMeta(ABCMeta):
    """Take out the keywords every env accepts, and finish the specs after ``__init__``.

    Type checkers do not see ``__call__``: they would take its arguments and result for those of every
    class, so that no keyword of a constructor were checked and every env were of an unknown type. The
    same holds for ``__new__`` of `EnvBase`. What is taken out here stands in `envkit.env.options.EnvOptions` for them.
    """

    if not TYPE_CHECKING:

        def __call__(
            cls,
            *args: Any,
            spec_locked: bool = True,
            auto_reset: bool = False,
            policy: nn.Module | None = None,
            **kwargs: Any,
        ) -> Any:
            as_bool("spec_locked", spec_locked)
            env = super().__call__(*args, **kwargs)
            if not isinstance(type(env), EnvMeta):  # __new__ may return something else
                return env
            env._after_init(spec_locked)
            if auto_reset:
                env = late("AutoResetEnv")(env)
            if policy is not None:
                env = late("with_policy_transforms")(env, policy)
            return env

    @property
    def __signature__(cls) -> inspect.Signature:
        """Show what the class takes, which `__call__` above would hide: completion asks for it."""
        _, *own = keywords_of(cls.__init__)
        names = {parameter.name for parameter in own}
        of_every_env = inspect.signature(EnvMeta.__call__).parameters.values()
        more = [
            parameter
            for parameter in of_every_env
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in names
        ]
        rest = [parameter for parameter in own if parameter.kind is parameter.VAR_KEYWORD]
        return inspect.Signature([*own[: len(own) - len(rest)], *more, *rest])
