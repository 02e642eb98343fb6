"""What is asked of a picture of a MuJoCo model by a library's own ``render``, told before it is drawn.

Conventions
    options  keywords of ``render`` beside the states: ``height``, ``width``, ``camera``, and what else it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from envkit.data.arguments import as_int
from envkit.data.keywords import refuse_unknown
from envkit.errors import ArgumentError
from envkit_bridges.libraries import parameters_of

__all__ = ["require_drawable"]


def require_drawable(
    owner: str, render: Callable[..., Any], model: Any, options: Mapping[str, Any]
) -> None:
    """Check options against a renderer and a model, MuJoCo's ``MjModel``.

    Raises:
        OptionError: (a TypeError) ``render`` of ``owner`` does not know a keyword.
        ArgumentTypeError: (a TypeError) a size is no int.
        ArgumentError: (a ValueError) a size is below 1 or above what the model allows, or it has no such camera.
    """
    refuse_unknown(f"render of {owner}", options, parameters_of(render)[1:])
    for side, most in (
        ("height", model.vis.global_.offheight),
        ("width", model.vis.global_.offwidth),
    ):
        if side in options:
            number = as_int(side, options[side], least=1, meaning="the pixels of a frame")
            if number > most:
                raise ArgumentError(
                    f"{side} is {number}, but MuJoCo draws at most {most} for this model. Ask for less."
                )
    _require_camera(model, options.get("camera"))


def _require_camera(model: Any, camera: Any) -> None:
    names = [model.camera(number).name for number in range(model.ncam)]
    if isinstance(camera, str):
        is_known = camera in names
    elif isinstance(camera, int):
        is_known = -1 <= camera < len(names)
    else:
        is_known = True  # None, or a camera of MuJoCo's own
    if not is_known:
        listed = ", ".join(f"{at} ({name!r})" for at, name in enumerate(names)) or "none of its own"
        raise ArgumentError(
            f"camera is {camera!r}, but this model has {listed}. Pass one of these, or -1, the free camera."
        )
