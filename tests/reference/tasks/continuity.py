"""Whether the steps that a program stored are those of episodes, in the order in which they were made."""

from __future__ import annotations

from tensordict import TensorDictBase

__all__ = ["steps_follow_each_other"]


def steps_follow_each_other(data: TensorDictBase, key: str = "observation") -> bool:
    """Say whether each step begins with what the step before it in its episode has shown.

    Args:
        data: steps along the last axis, with numbers of trajectories or of steps.
        key: the entry that is compared.
    """
    following, root = data["next", key], data[key]
    axis = data.ndim - 1
    before, after = ([slice(None)] * axis + [part] for part in (slice(None, -1), slice(1, None)))
    before, after = tuple(before), tuple(after)
    goes_on = ~data["next", "done"][..., 0][before]
    numbers = data.get(("collector", "traj_ids"), None)
    if numbers is not None:
        goes_on &= numbers[before] == numbers[after]
    return bool(goes_on.any()) and following[before][goes_on].equal(root[after][goes_on])
