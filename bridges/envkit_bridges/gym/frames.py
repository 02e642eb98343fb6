"""Frames of gymnasium envs: whether an env renders them, and what MuJoCo's envs need to draw the right ones.

A viewer of Gymnasium's MuJoCo envs makes its OpenGL context current once, when it is made. Drawn after another
viewer, or after whatever else draws in this process, it would draw in their context: wrong pictures, and no error. Here
its context is current whenever it draws, and when its textures are freed.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

import numpy as np

from envkit.errors import ArgumentError
from envkit_bridges import offscreen

if TYPE_CHECKING:
    from envkit_bridges.libraries import Simulator


def require_frames(env: Simulator) -> None:
    """Check that an env, or vector env, renders arrays, and make it able to on a machine without display.

    Raises:
        ArgumentError: (a ValueError) it was made with another render mode.
        RenderingError: it draws with MuJoCo, which cannot here.
    """
    if getattr(env, "render_mode", None) != "rgb_array":
        raise ArgumentError(
            f"from_pixels=True needs an env that renders rgb arrays, but its render_mode is "
            f"{getattr(env, 'render_mode', None)!r}. Make it with render_mode='rgb_array'."
        )
    if _draws_with_mujoco(next(iter(getattr(env, "envs", ())), env)):
        offscreen.prepare()


def shape_of_frame(env: Simulator) -> tuple[int, ...]:
    """Draw a frame of an env that was reset to see how large it is; of a vector env, that of one row.

    The renderer is removed again where it keeps more than the frame: MuJoCo's free camera keeps the aim of its first
    frame, which must be a frame that the user asked for.
    """
    if "envs" in vars(env):
        return shape_of_frame(env.envs[0])
    shape = np.shape(draw(env))
    if hasattr(env, "single_observation_space"):
        return shape[1:]
    if _draws_with_mujoco(env):
        renderer = env.unwrapped.mujoco_renderer
        renderer._viewers.pop(env.render_mode).free()
        renderer.viewer = None
    return shape


def draw(env: Simulator, *args: object, **kwargs: object) -> Any:
    """Render an env, or all of a vector env, without a window and in its own OpenGL context.

    Raises:
        RenderingError: it draws with MuJoCo, which cannot here.
    """
    if "envs" in vars(env) and not (args or kwargs):
        return tuple(draw(each) for each in env.envs)
    if getattr(env, "render_mode", None) != "human":
        offscreen.be_silent()
    if not _draws_with_mujoco(env):
        return env.render(*args, **kwargs)
    offscreen.prepare()
    renderer = env.unwrapped.mujoco_renderer
    before = renderer.viewer
    if before is not None:
        before.make_context_current()
    frame = env.render(*args, **kwargs)
    if renderer.viewer is not before:
        _free_in_its_context(renderer.viewer)
    return frame


def _draws_with_mujoco(env: Simulator) -> bool:
    return getattr(env, "render_mode", None) not in (None, "human") and hasattr(
        getattr(env, "unwrapped", env), "mujoco_renderer"
    )


def _free_in_its_context(viewer: Any) -> None:
    """Make a viewer free its textures in its own context, not in whichever is current when it is collected.

    At the latest when the program ends, while there still is a library to free them with.
    """
    context, drawn = viewer.opengl_context, viewer.con
    is_freed = False

    def free() -> None:
        nonlocal is_freed
        if not is_freed:
            is_freed = True
            atexit.unregister(free)
            context.make_current()
            drawn.free()
            context.free()

    viewer.free = free
    atexit.register(free)
