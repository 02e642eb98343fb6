"""Which OpenGL backend MuJoCo draws with where there is no window: EGL, else OSMesa, whichever works here.

MuJoCo and dm_control read the environment variable ``MUJOCO_GL`` when they are imported, Gymnasium's MuJoCo envs
at their first frame. Without it all of them open a window (GLFW), which fails where there is no display. An EGL
that is installed may fail as well, and PyOpenGL, once imported for one backend, draws with no other in that
process. So each backend is tried in its own process, which draws a picture, and the first that succeeds is
written into ``MUJOCO_GL``, where processes that are started later find it.

This module alone decides that. It knows no envs. `in_memory` takes what a library draws with matplotlib, as arrays: no
window opens either.

Conventions
    backend  value of ``MUJOCO_GL``: "egl" (GPU, or Mesa on the CPU), "osmesa" (CPU), "glfw", ...
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np

from envkit.errors import RenderingError
from envkit.process_wide import alone
from envkit_bridges.libraries import require

CURE = (
    "Install Mesa's software renderer (Debian, Ubuntu: apt-get install libosmesa6), or a driver with EGL; "
    "no restart is needed"
)
"""How to make rendering work on a machine without display and GPU."""

_BACKENDS = ("egl", "osmesa")
_SECONDS = 120
_DRAW = """
import importlib, os
import mujoco
importlib.import_module("mujoco." + os.environ["MUJOCO_GL"])  # mujoco itself would not say why that fails
model = mujoco.MjModel.from_xml_string('''
<mujoco><worldbody><light pos="0 0 3"/><geom type="sphere" size="1" rgba="1 0 0 1"/></worldbody></mujoco>''')
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 8, 8) as renderer:
    renderer.update_scene(data)
    assert renderer.render().any(), "the picture is black"
"""
_choosing = threading.Lock()


def be_silent() -> None:
    """Stop pygame, which draws many games, from opening a sound device: without one ALSA fills the terminal.

    ``SDL_AUDIODRIVER`` that is set already stays.
    """
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")


def is_chosen() -> bool:
    """Check whether the backend is settled, so that nothing need be tried before a picture is drawn."""
    return bool(os.environ.get("MUJOCO_GL")) or not sys.platform.startswith("linux")


def prepare() -> str:
    """Make MuJoCo's renderers draw without a window in this process, and in those started from now on.

    Call it before a picture is drawn. The first call tries the backends, about a second each, unless ``MUJOCO_GL``
    is set: a backend that the user chose is neither tried nor replaced. Other systems than Linux keep the
    default of the libraries.

    Returns:
        The backend.

    Raises:
        RenderingError: (a RuntimeError) none works; the message says what to install.
        ImportError: MuJoCo is not installed.
    """
    require("mujoco")
    with _choosing:
        if is_chosen():
            return os.environ.get("MUJOCO_GL") or "glfw"
        backend = _first_that_draws()
        _use(backend)
        return backend


def _first_that_draws() -> str:
    failures = []
    for backend in _BACKENDS:
        failure = failure_of(backend)
        if failure is None:
            return backend
        failures.append(f"{backend}: {failure}")
    raise RenderingError(
        f"MuJoCo cannot render here without a window, neither with EGL nor with OSMesa ({'; '.join(failures)}). "
        f"{CURE}."
    )


def failure_of(backend: str) -> str | None:
    """Draw a picture in its own process; say why that failed, None where it did not."""
    variables = {**os.environ, "MUJOCO_GL": backend}
    try:
        drawn = subprocess.run(
            [sys.executable, "-c", _DRAW],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no picture after {_SECONDS} s"
    if drawn.returncode == 0:
        return None
    if drawn.returncode < 0:
        return f"killed by signal {-drawn.returncode}"
    told = [line for line in drawn.stderr.splitlines() if line and not line.startswith(" ")]
    errors = [line for line in told if "Error" in line]
    return (errors or told or ["no picture"])[0]


def _use(backend: str) -> None:
    """Write a backend down, for this process too, where libraries have read the variable already."""
    os.environ["MUJOCO_GL"] = backend
    try:
        importlib.import_module(f"mujoco.{backend}")
        for name in ("mujoco.rendering.classic.gl_context", "dm_control._render"):
            if name in sys.modules:
                importlib.reload(sys.modules[name])
    except Exception as error:
        del os.environ["MUJOCO_GL"]
        raise RenderingError(
            f"MuJoCo renders here with {backend!r}, but not in this process ({error}): PyOpenGL was imported for "
            f"another backend before. Set MUJOCO_GL={backend} before Python is started."
        ) from error


@contextlib.contextmanager
def in_memory() -> Iterator[Callable[[], np.ndarray]]:
    """Make pyplot draw into memory, and yield a function that reads its current figure as a frame.

    Figures that are made inside are closed at the end; the user's own figures and backend stay.

    Raises:
        MissingLibraryError: (an ImportError) matplotlib is not installed.
    """
    with alone():
        yield from _in_memory()


def _in_memory() -> Iterator[Callable[[], np.ndarray]]:
    pyplot = require("matplotlib.pyplot")
    backend, is_interactive = require("matplotlib").get_backend(), pyplot.isinteractive()
    before = set(pyplot.get_fignums())

    def frame() -> np.ndarray:
        canvas = pyplot.gcf().canvas
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

    pyplot.switch_backend("Agg")
    pyplot.ion()  # else libraries show their figures, which Agg cannot
    try:
        yield frame
    finally:
        for number in set(pyplot.get_fignums()) - before:
            pyplot.close(number)
        pyplot.switch_backend(backend)
        pyplot.interactive(is_interactive)
