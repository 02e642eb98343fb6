"""Whether what makes sub-envs takes the keywords it will be called with, told before any is built.

A pool builds its sub-envs when it starts. What can be told of a keyword without building is told where it is given;
of what takes any keyword nothing is known, and the sub-env itself refuses it.

Conventions
    maker  callable that returns an env: a class, a function, or a partial of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from envkit.data.arguments import refuse_unknown
from envkit.env.base import EnvBase

__all__ = ["require_known"]


def require_known(
    makers: Iterable[Callable[..., Any]], kwargs: Iterable[Mapping[str, Any]]
) -> None:
    """Check the keywords that each maker will be called with; equal ones are looked at once.

    A class whose constructor hands keywords on to a library may say which are known, by a class method
    ``require_keywords(*args, **kwargs)`` beside its ``__init__``, with the arguments of that.

    Raises:
        OptionError: (a TypeError) a keyword is unknown; the message names the nearest that is known.
    """
    seen = set()
    for maker, own in zip(makers, kwargs, strict=True):
        if (which := (id(maker), tuple(own))) not in seen:
            seen.add(which)
            _require_known(maker, own)


def _require_known(maker: Callable[..., Any], own: Mapping[str, Any]) -> None:
    args: tuple[Any, ...] = ()
    given = dict(own)
    if isinstance(maker, partial):
        maker, args, given = maker.func, maker.args, {**maker.keywords, **given}
    if not given:
        return
    if inspect.isclass(maker) and issubclass(maker, EnvBase):
        owner = next(base for base in maker.__mro__ if "__init__" in vars(base))
        if "require_keywords" in vars(owner):
            maker.require_keywords(*args, **given)  # type: ignore[attr-defined]
            return
    elif not inspect.isfunction(maker):
        return
    parameters = inspect.signature(maker, follow_wrapped=False).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        refuse_unknown(maker.__name__, given, list(parameters))
