"""The form in which a simulator answers: five values of a step, two of a reset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envkit.errors import EncodingError


def step_answer(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return the five values of a step.

    Raises:
        EncodingError: (a RuntimeError) it returned something else.
    """
    if isinstance(result, tuple | list) and len(result) == 5:
        return result  # type: ignore[return-value]
    fix = "Correct the env's step."
    if isinstance(result, tuple | list) and len(result) == 4:
        fix = (
            "Envs of the old gym return done: return it as terminated, and a time limit as truncated, as "
            "shimmy.GymV21CompatibilityV0(env=env) does."
        )
    raise EncodingError(
        f"step of the simulator returned {_form(result)}, but must return five values, "
        f"(observation, reward, terminated, truncated, info). {fix}"
    )


def reset_answer(result: Any) -> tuple[Any, Any]:
    """Return the two values of a reset.

    Raises:
        EncodingError: (a RuntimeError) it returned something else, such as an observation alone.
    """
    if isinstance(result, tuple | list) and len(result) == 2:
        observation, info = result
        if type(info) is dict or info is None or isinstance(info, Mapping):
            return observation, info
    raise EncodingError(
        f"reset of the simulator returned {_form(result)}, but must return two values, (observation, info), the second "
        "of which is a dict. Correct the env's reset: return observation, {}."
    )


def _form(result: Any) -> str:
    if isinstance(result, tuple | list):
        kinds = ", ".join(type(value).__name__ for value in result)
        return f"{len(result)} values ({kinds})"
    return "None" if result is None else f"one value of type {type(result).__name__}"
