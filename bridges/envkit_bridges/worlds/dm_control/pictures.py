"""What is asked of a picture that dm_control draws: whether its physics knows the camera, and can draw the size.

Conventions
    options  keywords of ``Physics.render``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from envkit.data.arguments import as_int
from envkit.data.keywords import refuse_unknown
from envkit.errors import ArgumentError, ArgumentTypeError
from envkit_bridges.libraries import parameters_of

__all__ = ["require_drawable", "require_mapping"]


def require_drawable(physics: Any, options: Mapping[str, Any]) -> None:
    """Check what is asked of a picture, before the library looks for something to draw it with.

    Raises:
        OptionError: (a TypeError) ``Physics.render`` does not know a keyword.
        ArgumentTypeError: (a TypeError) the camera is neither a number nor a name, or a size no int.
        ArgumentError: (a ValueError) the model has no such camera, or no frame of that size is kept for it.
    """
    refuse_unknown("render of dm_control", options, parameters_of(type(physics).render))
    _require_camera(physics.model, options.get("camera_id", -1))
    for side, kept in (("height", "offheight"), ("width", "offwidth")):
        if side in options:
            _require_size(physics.model, side, options[side], kept)


def require_mapping(name: str, value: Any, example: str) -> dict[str, Any]:
    """Give an argument that maps keywords to values as a dict; None is an empty one.

    Raises:
        ArgumentTypeError: (a TypeError) it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(
            f"{name} is {value!r}, of type {type(value).__name__}, but must be a dict of keywords. Pass "
            f"{name}={example}, say."
        )
    return dict(value)


def _require_camera(model: Any, camera: Any) -> None:
    names = [model.id2name(number, "camera") for number in range(model.ncam)]
    told = f"camera_id is {camera!r}, but this model has {_listed(names)}. Pass one of these, or -1, the free camera."
    if isinstance(camera, str):
        if camera not in names:
            raise ArgumentError(told)
        return
    try:
        number = operator.index(camera)
    except TypeError as error:
        raise ArgumentTypeError(told) from error
    if not -1 <= number < len(names):
        raise ArgumentError(told)


def _listed(names: list[str]) -> str:
    return ", ".join(f"{at} ({name!r})" for at, name in enumerate(names)) or "no camera of its own"


def _require_size(model: Any, side: str, value: Any, kept: str) -> None:
    number = as_int(side, value, least=1, meaning="the pixels of a frame")
    most = getattr(model.vis.global_, kept)
    if number > most:
        raise ArgumentError(
            f"{side} is {number}, but MuJoCo draws at most {most} for this model. Ask for less, or set "
            f"env.physics.model.vis.global_.{kept} = {number} and draw with env.render({side}={number})."
        )
