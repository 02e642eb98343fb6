"""Frames of gymnasium envs: whether an env renders them, and what MuJoCo's envs need for that without a window."""

from __future__ import annotations

from typing import Any

from bridges import offscreen
from envkit.errors import ArgumentError

__all__ = ["prepare_frames", "require_frames"]


def require_frames(env: Any) -> None:
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
    prepare_frames(env)


def prepare_frames(env: Any) -> None:
    """Choose MuJoCo's backend before its first frame, where frames of ``env`` are arrays drawn by MuJoCo.

    Raises:
        RenderingError: no backend works here.
    """
    if getattr(env, "render_mode", None) in (None, "human"):
        return
    first = next(iter(getattr(env, "envs", ())), env)
    if hasattr(getattr(first, "unwrapped", first), "mujoco_renderer"):
        offscreen.prepare()
