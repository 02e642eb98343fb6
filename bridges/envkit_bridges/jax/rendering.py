"""Pictures of stored states of a stateless env, drawn by the library that it comes from.

This module finds the state of the simulator, and the model that the row steps with, in the data, and checks what is
asked of a picture of MuJoCo before it is drawn. How a simulator draws is its core's matter: an env that can be drawn
has a method ``render(states, **options) -> frames``.

Conventions
    states   list of states of one env, as its ``reset`` and ``step`` return them, leaves as NumPy arrays.
    frames   uint8 (H, W, 3) arrays, one for each state.
    options  keywords of ``render`` beside the states: ``height``, ``width``, ``camera``, and what else it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit.arrays.integers import as_int
from envkit.data.arguments import require_tensordict
from envkit.data.keywords import refuse_unknown
from envkit.data.transition import leaves
from envkit.errors import ArgumentError, MissingKeyError, UnsupportedError
from envkit.functional import EnvWrapper, WrapperState
from envkit.functional.structure import PyTree, is_typed_key
from envkit_bridges.dlpack import to_jax
from envkit_bridges.jax.compilation import simulator_name
from envkit_bridges.jax.engine import ProgramEngine
from envkit_bridges.libraries import Simulator, keywords_told, parameters_of


def picture(engine: ProgramEngine, td: TensorDictBase, row: int, **options: Any) -> torch.Tensor:
    """Draw one row of ``td``, whose batch is counted through: uint8 (H, W, 3)."""
    rows = _states_of(td).reshape(-1)
    row = _row_in(row, rows.shape[0])
    return _drawn(engine, rows[row : row + 1], **options)[0]


def pictures(
    engine: ProgramEngine, td: TensorDictBase, row: int, every: int, **options: Any
) -> torch.Tensor:
    """Draw the roots of one row of a rollout of batch size (*batch, T): uint8 (T / every, 3, H, W)."""
    every = as_int("every", every, least=1, meaning="1 to draw every step, 2 every second one")
    states = _states_of(td)
    if not td.ndim:
        raise ArgumentError(
            "render_rollout was given a TensorDict without a time axis. Pass what rollout gave, or one step to "
            "render(td)."
        )
    rows = states.flatten(0, -2) if td.ndim > 1 else states.unsqueeze(0)
    row = _row_in(row, rows.shape[0])
    return _drawn(engine, rows[row, ::every], **options).movedim(-1, 1)


def _states_of(td: TensorDictBase) -> Any:
    require_tensordict("td", td, "what reset, step or rollout gave")
    states = td.get("state", None)
    if not isinstance(states, TensorDictBase):
        raise MissingKeyError(
            f"the TensorDict has no 'state' to draw; it has {sorted(map(str, td.keys()))}. rollout records it, "
            "and so does unroll(..., record_state=True)."
        )
    return TensorDict({"state": states}, td.batch_size)


def _row_in(row: int, rows: int) -> int:
    row = as_int("row", row, least=0, meaning="the number of a row of the batch")
    if row >= rows:
        raise ArgumentError(
            f"row is {row}, but the TensorDict has {rows} rows. Pass 0 to {rows - 1}."
        )
    return row


def _drawn(engine: ProgramEngine, td: TensorDictBase, **options: Any) -> torch.Tensor:
    frames: list[np.ndarray] = []
    for simulator, states in _by_model(engine, td):
        if not hasattr(simulator, "render"):
            raise UnsupportedError(
                f"{simulator_name(simulator)} cannot be drawn: it has no method `render(states) -> frames`, uint8 "
                "arrays of shape (H, W, 3). Write one, or plot what it observes."
            )
        with keywords_told(
            f"render of {simulator_name(simulator)}", options, partial(_options_of, simulator)
        ):
            frames += [np.asarray(frame) for frame in simulator.render(states, **options)]
    if any(frame.dtype != np.uint8 or frame.shape[2:] != (3,) for frame in frames):
        found = sorted({f"{frame.dtype}{list(frame.shape)}" for frame in frames})
        raise ArgumentError(
            f"render of {simulator_name(engine.programs.env)} returned {found}, but must return uint8 of shape (H, W, 3). "
            "Correct the env."
        )
    return torch.from_numpy(np.stack(frames))


def _options_of(simulator: Simulator) -> list[str]:
    return parameters_of(simulator.render)[1:]


def _by_model(engine: ProgramEngine, td: TensorDictBase) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the states of a simulator, and it with the model that they were stepped with, in runs of one model."""
    engine.require_own_state(dict(leaves(td["state"])), td.batch_dims)
    found = {path: to_jax(leaf.contiguous(), copy=True) for path, leaf in leaves(td["state"])}
    state = jax.tree.map(_in_numpy, engine.programs.read_state(found))
    moments = [jax.tree.map(lambda leaf, at=at: leaf[at], state) for at in range(td.shape[0])]
    episodic: Any = engine.programs.env_given(engine.settings.model).env

    def drawn(moment: Any) -> list[bytes]:
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(moment.model)]

    for _, run in groupby(moments, drawn):
        states = list(run)
        yield _bare(episodic.env_with(states[0].model)), [_inmost(one) for one in states]


def _in_numpy(leaf: jax.Array) -> jax.Array | np.ndarray:
    return leaf if is_typed_key(leaf.dtype) else np.asarray(leaf)


def _bare(env: Simulator) -> Simulator:
    while isinstance(env, EnvWrapper):
        env = env.env
    return env


def _inmost(state: PyTree) -> PyTree:
    while isinstance(state, WrapperState):
        state = state.inner
    return state


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


def _require_camera(model: Any, camera: object) -> None:
    names = [model.camera(number).name for number in range(model.ncam)]
    if isinstance(camera, str):
        is_known = camera in names
    elif isinstance(camera, int):
        is_known = -1 <= camera < len(names)
    else:
        is_known = True  # None, or a camera of MuJoCo's own
    if not is_known:
        listed = ", ".join(f"{at} ({name!r})" for at, name in enumerate(names)) or "none"
        raise ArgumentError(
            f"camera is {camera!r}, but this model has {listed}. Pass one of these, or -1, the free camera."
        )
