"""Whether something is an env of envkit, and what other libraries' envs and members are called here: by names alone."""

from __future__ import annotations

from envkit.env.base import EnvBase
from envkit.errors import ArgumentTypeError
from envkit.installing import LIBRARIES

_MEMBERS = {
    "action_size": "action_spec.shape",
    "action_space": "action_spec",
    "num_envs": "batch_size.numel()",
    "observation_size": "observation_spec",
    "observation_space": "observation_spec",
    "seed": "set_seed(0)",
    "single_action_space": "action_spec_unbatched",
    "single_observation_space": "observation_spec_unbatched",
}


def called_here(name: str) -> str:
    """Return what is called so in other libraries and otherwise here, as the end of a message; else nothing."""
    return f"; here it is env.{_MEMBERS[name]}" if name in _MEMBERS else ""


def require_env(name: str, env: object, fix: str = "") -> None:
    """Check that something is an env of envkit.

    Args:
        name: what it is, for messages: an argument, or the result of a function.
        env: what was given.
        fix: what to pass, for messages, unless it is a class or an env of a library that has a wrapper here.

    Raises:
        ArgumentTypeError: it is something else, the class of an env included.
    """
    if isinstance(env, EnvBase):
        return
    description, wrapping = f"{env!r}, of type {type(env).__name__}", known_wrapping_of(env)
    fix = fix or "Pass GymEnv('CartPole-v1'), for example."
    if isinstance(env, type):
        description, fix = f"the class {env.__name__}", f"Build one: {env.__name__}(...)."
    elif wrapping is not None:
        fix = f"Wrap it: {wrapping}."
    raise ArgumentTypeError(f"{name} is {description}, but must be an env of envkit. {fix}")


def known_wrapping_of(env: object) -> str | None:
    """Return how to wrap an env of another library, as code; None of what comes from none that is known."""
    for kind in type(env).__mro__:
        library = LIBRARIES.get(kind.__module__.partition(".")[0])
        if library is not None and library.wrapper is not None:
            return f"{library.wrapper}(env)"
    return None


def wrapping_of(env: object) -> str:
    """Return how to wrap what is no env of envkit, as code; as one of Gymnasium's where its library is not known."""
    return known_wrapping_of(env) or "GymWrapper(env)"


def fix_of_result(result: object) -> str:
    """Return how a create function returns an env of envkit, in place of what it returned."""
    if result is None:
        return "End the function with return env."
    if isinstance(result, str):
        return f"Return an env, e.g. GymEnv({result!r})."
    if isinstance(result, type):
        return f"Build one: {result.__name__}(...)."
    return f"Wrap it: {wrapping_of(result)}."
