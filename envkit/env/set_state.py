"""Where a reset begins: at a state of the env's own choice, or at the one that is in the data.

Conventions
    set_state  True: at the state in the data; False: at one that the env chooses; None: as `_reset` likes, which
               mostly is at a new one.
    supports   ``_supports_set_state = True`` in a class: its `_reset` takes ``set_state``, always True or
               False, and honours it.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from envkit.data.paths import has_entry
from envkit.errors import ArgumentError, SetStateError


def refuse_state_left_out(*, set_state: bool | None, select_reset_only: bool) -> None:
    """Check that a reset which shall begin at a state is shown that state.

    Raises:
        ArgumentError: (a ValueError) ``select_reset_only`` leaves it out.
    """
    if set_state and select_reset_only:
        raise ArgumentError(
            "set_state=True begins at the state in the data, which select_reset_only=True leaves out. Pass one of them."
        )


def start_keywords(env: Any, td: TensorDictBase | None, set_state: bool | None) -> dict[str, Any]:
    """Return the keywords that tell `_reset` of ``env`` where to begin; ``td`` is what it is given.

    Raises:
        SetStateError: see `refuse_start`.
    """
    if set_state:
        refuse_start(env)
    if env._hands_resets_on:
        return {} if set_state is None else {"set_state": set_state}
    if not env._supports_set_state:
        return {}
    if set_state is None:
        set_state = td is not None and any(has_entry(td, key) for key in env.state_keys)
    return {"set_state": set_state}


def refuse_start(env: Any) -> None:
    """Check that an env can begin at a state that it is given.

    Raises:
        SetStateError: (a NotImplementedError) the simulator here or inside cannot.
    """
    if kind := env._facts.no_start_at_state:
        raise SetStateError(
            f"{kind} cannot begin at a state that it is given, as set_state=True asks for. Where the state is "
            "in the data, as that of a stateless env is, step from that data without a reset. If _reset of "
            "your class can, say so there, _supports_set_state = True, and take the keyword set_state."
        )
