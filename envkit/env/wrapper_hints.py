"""What other libraries' envs and members are called here: for messages, by names alone."""

from __future__ import annotations

__all__ = ["called_here", "known_wrapping_of", "wrapping_of"]

_WRAPPERS = {
    "brax": "BraxWrapper",
    "craftax": "CraftaxWrapper",
    "dm_control": "DMControlWrapper",
    "gymnasium": "GymWrapper",
    "gymnax": "GymnaxWrapper",
    "jaxmarl": "JaxMARLWrapper",
    "jumanji": "JumanjiWrapper",
    "mpe2": "PettingZooWrapper",
    "mujoco_playground": "PlaygroundWrapper",
    "navix": "NavixWrapper",
    "pettingzoo": "PettingZooWrapper",
    "pgx": "PgxWrapper",
    "torchrl": "TorchRLWrapper",
    "xminigrid": "XMiniGridWrapper",
}

_MEMBERS = {
    "action_size": "action_spec.shape",
    "action_space": "action_spec",
    "observation_size": "observation_spec",
    "observation_space": "observation_spec",
    "seed": "set_seed(0)",
    "single_action_space": "action_spec_unbatched",
    "single_observation_space": "observation_spec_unbatched",
}


def called_here(name: str) -> str:
    """Say what is called so in other libraries and otherwise here, as the end of a message; else nothing."""
    return f"; here it is env.{_MEMBERS[name]}" if name in _MEMBERS else ""


def known_wrapping_of(env: object) -> str | None:
    """Say how to wrap an env of another library, as code; None of what comes from none that is known."""
    libraries = [kind.__module__.partition(".")[0] for kind in type(env).__mro__]
    known = [_WRAPPERS[library] for library in libraries if library in _WRAPPERS]
    return f"{known[0]}(env)" if known else None


def wrapping_of(env: object) -> str:
    """Say how to wrap what is no env of envkit, as code; as one of Gymnasium's where its library is not known."""
    return known_wrapping_of(env) or "GymWrapper(env)"
