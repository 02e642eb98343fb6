"""How an env is built: the keywords that every constructor takes beside its own arguments, and what follows ``__init__``.

A constructor that hands them on takes ``**options: Unpack[EnvOptions]``, from which type checkers have name and type of
each. The device is not among them: each kind of env says what its own means.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import Any, TypedDict, TypeVar

from torch import nn

from envkit.data.arguments import as_bool
from envkit.data.keywords import signature_of
from envkit.env.seeding import checked_seed
from envkit.lazy_imports import late
from envkit.specs.annotations import BatchSize

T = TypeVar("T")


class EnvOptionsWithoutSeed(TypedDict, total=False):
    """Keywords of every env but ``seed``, for constructors that name it themselves; see `EnvOptions`."""

    batch_size: BatchSize | None
    run_type_checks: bool
    allow_done_after_reset: bool
    spec_locked: bool
    auto_reset: bool
    policy: nn.Module | None


class EnvOptions(EnvOptionsWithoutSeed, total=False):
    """Keywords of every env.

    Args:
        batch_size: number of environments along each axis; None means one environment.
        run_type_checks: compare the dtypes of every reset and step, and the actions, with the specs
            (TypeError; ValueError where an action has another shape).
        allow_done_after_reset: accept done flags that are set right after a reset.
        spec_locked: lock the specs after construction; the default is True.
        auto_reset: the simulator begins a new episode in the step that ends one; the result is an
            `AutoResetEnv`.
        policy: a module; what its recurrent parts need is appended, and the result then is a
            `TransformedEnv`.
        seed: given to `set_seed` of the finished env, which starts the workers of a pool. None, the default, seeds
            nothing. It seeds random actions of that env alone: where others are around it (`TransformedEnv`, pools), seed
            the outermost one.
    """

    seed: int | None


class CallOptions(TypedDict, total=False):
    """Those of `EnvOptions` that the class of every env takes when it is called, for constructors that take no others."""

    spec_locked: bool
    auto_reset: bool
    policy: nn.Module | None
    seed: int | None


TAKEN_HERE = ("batch_size", "run_type_checks", "allow_done_after_reset")
"""Keywords of ``__init__`` of `EnvBase`; the class itself takes the others when it is called."""


class EnvMeta(ABCMeta):
    """Finish an env after ``__init__``.

    Four keywords of `EnvOptions` are about a finished env, so they are taken here, whatever ``__init__`` takes. A ``seed``
    that ``__init__`` names is left to it.
    """

    def __call__(
        cls: type[T],
        *args: Any,
        spec_locked: bool = True,
        auto_reset: bool = False,
        policy: nn.Module | None = None,
        **kwargs: Any,
    ) -> T:
        spec_locked = as_bool("spec_locked", spec_locked)
        auto_reset = as_bool("auto_reset", auto_reset)
        seed = None
        if "seed" in kwargs and "seed" not in inspect.signature(cls.__init__).parameters:
            seed = kwargs.pop("seed")
        if seed is not None:
            checked_seed(seed)
        env: Any = super().__call__(*args, **kwargs)
        if not isinstance(type(env), EnvMeta):  # __new__ may return something else
            return env
        env._after_init(spec_locked)
        if auto_reset:
            env = late("AutoResetEnv")(env)
        if policy is not None:
            env = late("with_policy_transforms")(env, policy)
        if seed is not None:
            env.set_seed(seed)
        return env

    @property
    def __signature__(cls) -> inspect.Signature:
        """What a class takes: Python would show the parameters of ``__call__`` alone."""
        shown = signature_of(cls).parameters
        of_every_env = inspect.signature(EnvMeta.__call__).parameters
        more = {name: one for name, one in of_every_env.items() if one.kind is one.KEYWORD_ONLY}
        more["seed"] = inspect.Parameter("seed", inspect.Parameter.KEYWORD_ONLY, default=None)
        both = {**shown, **{name: more[name] for name in more if name not in shown}}
        return inspect.Signature(sorted(both.values(), key=lambda parameter: parameter.kind))
