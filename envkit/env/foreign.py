"""Which wrapper makes an env of another library one of ours: for messages, by the names of classes alone."""

from __future__ import annotations

__all__ = ["known_wrapping_of", "wrapping_of"]

_WRAPPERS = {
    "brax": "BraxWrapper",
    "dm_control": "DMControlWrapper",
    "gymnasium": "GymWrapper",
    "gymnax": "GymnaxWrapper",
    "jumanji": "JumanjiWrapper",
    "mpe2": "PettingZooWrapper",
    "mujoco_playground": "PlaygroundWrapper",
    "pettingzoo": "PettingZooWrapper",
    "torchrl": "TorchRLWrapper",
}


def known_wrapping_of(env: object) -> str | None:
    """Say how to wrap an env of another library, as code; None of what comes from none that is known."""
    libraries = [kind.__module__.partition(".")[0] for kind in type(env).__mro__]
    known = [_WRAPPERS[library] for library in libraries if library in _WRAPPERS]
    return f"{known[0]}(env)" if known else None


def wrapping_of(env: object) -> str:
    """Say how to wrap what is no env of envkit, as code; as one of Gymnasium's where its library is not known."""
    return known_wrapping_of(env) or "GymWrapper(env)"
