"""How an env is built: the keywords that every constructor takes beside its own arguments, and what follows ``__init__``.

A constructor that hands them on takes ``**options: Unpack[EnvOptions]``, from which signatures, completion and type
checkers have type, default and meaning of each. The device is not among them: each kind of env says what its own means.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from torch import nn

from envkit.data.arguments import as_bool
from envkit.data.keywords import Default, describe_keywords, keywords_of
from envkit.lazy_imports import late
from envkit.specs.annotations import BatchSize


class EnvOptions(TypedDict, total=False):
    """Keywords of every env.

    Args:
        batch_size: number of environments along each axis; None means one environment.
        run_type_checks: compare the dtypes of every reset and step, and the actions, with the specs
            (TypeError; ValueError where an action has another shape).
        allow_done_after_reset: accept done flags that are set right after a reset.
        spec_locked: lock the specs after construction.
        auto_reset: the simulator begins a new episode in the step that ends one; the result is an
            `AutoResetEnv`.
        policy: a module; what its recurrent parts need is appended, and the result then is a
            `TransformedEnv`.
    """

    batch_size: Annotated[BatchSize | None, Default(None)]
    run_type_checks: Annotated[bool, Default(False)]
    allow_done_after_reset: Annotated[bool, Default(False)]
    spec_locked: Annotated[bool, Default(True)]
    auto_reset: Annotated[bool, Default(False)]
    policy: Annotated[nn.Module | None, Default(None)]


TAKEN_HERE = ("batch_size", "run_type_checks", "allow_done_after_reset")
"""Keywords of ``__init__`` of `EnvBase`; the class itself takes the others when it is called."""


class EnvMeta(ABCMeta):
    """Take out the keywords every env accepts, and finish the specs after ``__init__``.

    Type checkers do not see ``__call__``: they would take its arguments and result for those of every
    class, so that no keyword of a constructor were checked and every env were of an unknown type. The
    same holds for ``__new__`` of `EnvBase`. The keywords taken out here are listed in `EnvOptions` for them.
    The docstring of each class describes all that it takes.
    """

    if not TYPE_CHECKING:

        def __init__(cls, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            describe_keywords(cls)

        def __call__(
            cls,
            *args: Any,
            spec_locked: bool = True,
            auto_reset: bool = False,
            policy: nn.Module | None = None,
            **kwargs: Any,
        ) -> Any:
            spec_locked = as_bool("spec_locked", spec_locked)
            auto_reset = as_bool("auto_reset", auto_reset)
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
