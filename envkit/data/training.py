"""Prepare a batch for training: advantages by GAE, and minibatches.

Both read a batch as `rollout` and collectors give it, on the device where it is, and know no environment and no loss.

Conventions
    batch    TensorDict of batch size (*batch, T) with ``("next", "reward")``, ``done`` and ``terminated``; time is the
             axis that is named ``"time"``, otherwise the last batch axis (see `envkit.data.timeline`).
    reward   shape (*batch, T, *F), F being (1,) unless the env has several rewards; values have its shape.
    padding  steps that ``("collector", "mask")`` or ``"mask"`` marks with False.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (tensordict ships no types, and what is given is not known)
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.data.arguments import require_tensordict
from envkit.data.timeline import seams, step_entry, time_axis
from envkit.errors import ArgumentError, MissingKeyError
from envkit.specs.annotations import EnvData

_VALUE = "state_value"


def generalized_advantage_estimate(
    gamma: float | torch.Tensor,
    lmbda: float | torch.Tensor,
    state_value: torch.Tensor,
    next_state_value: torch.Tensor,
    reward: torch.Tensor,
    done: torch.Tensor,
    terminated: torch.Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute advantages and value targets from tensors; `gae` does so from a batch.

    With ``V`` the value and ``V'`` that of the next observation, backwards in time::

        delta[t]     = reward[t] + gamma * V'[t] * ~terminated[t] - V[t]
        advantage[t] = delta[t] + gamma * lmbda * ~done[t] * advantage[t + 1]
        target[t]    = advantage[t] + V[t]

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016), eq. 16.

    Args:
        gamma: discount of a step; a number, or a tensor that broadcasts to the shape of ``reward``.
        lmbda: weight of longer returns, from 0 to 1, in the same form.
        state_value: value of each observation, floats.
        next_state_value: value of each next observation, floats.
        reward: of each step.
        done: bool, True at the last step of a trajectory.
        terminated: bool, True where no reward follows; ``done`` by default. A time limit does not terminate.
        time_dim: axis of time. All tensors have one shape, ``(*batch, T, F)`` where it is -2.

    Returns:
        Advantage and value target, in the dtype of ``next_state_value``. Gradients flow to the values.

    Raises:
        ArgumentError: (a ValueError) the tensors have unlike shapes or no axis ``time_dim``, or the values are no floats.

    Example:
        >>> import torch
        >>> from envkit import generalized_advantage_estimate
        >>> value, next_value = torch.ones(3, 1), torch.ones(3, 1)
        >>> done = torch.tensor([[False], [False], [True]])
        >>> reward = torch.full((3, 1), 2.0)
        >>> advantage, target = generalized_advantage_estimate(
        ...     0.5, 0.5, value, next_value, reward, done
        ... )
        >>> advantage[:, 0].tolist()
        [1.9375, 1.75, 1.0]
    """
    terminated = done if terminated is None else terminated
    _require_fit(
        time_dim,
        state_value=state_value,
        next_state_value=next_state_value,
        reward=reward,
        done=done,
        terminated=terminated,
    )
    dtype = torch.promote_types(state_value.dtype, torch.get_default_dtype())
    alive, goes_on = (~terminated).to(dtype), (~done).to(dtype)
    delta = reward + gamma * alive * next_state_value - state_value
    weight = (lmbda * gamma) * goes_on
    carried: Any = 0
    advantages: list[torch.Tensor] = []
    steps = zip(_by_time(delta, time_dim), _by_time(weight, time_dim), strict=True)
    for delta_now, weight_now in reversed(list(steps)):
        carried = delta_now + carried * weight_now
        advantages.append(carried)
    advantages.reverse()
    advantage = torch.stack(advantages).movedim(0, time_dim) if advantages else delta
    advantage = advantage.to(next_state_value.dtype)
    return advantage, advantage + state_value


def _by_time(values: torch.Tensor, time_dim: int) -> tuple[torch.Tensor, ...]:
    """Return the values of each moment; laid out moment by moment, each is read from memory that lies together."""
    return values.movedim(time_dim, 0).contiguous().unbind(0)


def _require_fit(time_dim: int, **tensors: torch.Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ArgumentError(
            f"the tensors have the shapes {shapes}; expected one shape for all. A value needs the trailing axis of "
            "the reward: pass value.unsqueeze(-1) where that is missing."
        )
    ndim = tensors["reward"].ndim
    if not -ndim <= time_dim < ndim:
        raise ArgumentError(
            f"time_dim is {time_dim}, but the tensors have {ndim} axes. Pass the axis of time."
        )
    for name in ("state_value", "next_state_value"):
        if not tensors[name].is_floating_point():
            raise ArgumentError(
                f"{name} has dtype {tensors[name].dtype}; expected floats. Convert it with .float()."
            )


@torch.no_grad()
def gae(
    batch: TensorDictBase,
    value: Callable[[TensorDictBase], Any] | None = None,
    *,
    gamma: float | torch.Tensor,
    lmbda: float | torch.Tensor,
    time_dim: int | None = None,
) -> EnvData:
    """Add ``advantage`` and ``value_target`` to a batch, by generalised advantage estimation.

    The formula is that of `generalized_advantage_estimate`. A terminated step has no future; a truncated one has
    the value of its last observation, and nothing is carried over from the episode after it. A trajectory also
    ends where ``traj_ids`` change, and where the next observation is not that of the step. Steps in another order than
    that of time are refused. So is data of one axis without ids that is not named ``"time"``, unless its observations
    tell. Padding has an advantage of 0 and changes no other step. A truncated step whose last observation is missing
    (``("next", "final_missing")``) has an advantage of 0, and its own value as target. After `MultiStep`, a step is discounted by
    ``gamma ** steps_to_next_obs``.

    Args:
        batch: data, batch size ``(*batch, T)``. It is not written to.
        value: gives the value of each observation. It is called with the batch and with its ``next``, and returns the
            values, in the shape of the reward, or writes them as ``state_value``, as a TensorDictModule does.
            None takes ``state_value`` and ``("next", "state_value")`` from the batch.
        gamma: discount of a step; a number, or a tensor of the first batch axes, as ``(policies,)`` for a batch of
            ``(policies, n, T)``.
        lmbda: weight of longer returns, from 0 to 1, in the same form.
        time_dim: batch axis of time; None takes the axis that is named ``"time"``, otherwise the last one.

    Returns:
        A shallow copy of the batch with ``advantage``, ``value_target``, ``state_value`` and ``("next", "state_value")``,
        each in the shape of the reward, without gradients.

    Raises:
        DataTypeError: (a TypeError) ``batch`` is no TensorDict.
        MissingKeyError: (a KeyError) an entry is absent.
        ArgumentError: (a ValueError) the batch has no axis of time, its steps are not in the order of time, or a value has
            another shape than the reward. Or ``gamma`` or ``lmbda`` is a tensor of other axes.

    Example:
        >>> import torch
        >>> from envkit import GymEnv, gae
        >>> critic = torch.nn.Linear(3, 1)
        >>> data = GymEnv("Pendulum-v1").rollout(8)
        >>> data = gae(data, lambda td: critic(td["observation"]), gamma=0.99, lmbda=0.95)
        >>> data["advantage"].shape
        torch.Size([8, 1])
    """
    require_tensordict("batch", batch, "what rollout or a collector gives")
    time = time_axis(batch, time_dim)
    data = batch.copy()
    following: Any = data.get("next")
    now, after = _valued(data, value, "the batch"), _valued(following, value, '"next" of the batch')
    reward = _entry(following, "reward")
    done, terminated = _flags(following, reward)
    ended = _entry(following, "done").reshape(*data.batch_size, -1).any(-1)
    done = done | _over(seams(data, ended, time, is_time=time_dim is not None), data, reward)
    discount, weight = (
        _of_leading_axes(name, number, data, reward)
        for name, number in (("gamma", gamma), ("lmbda", lmbda))
    )
    steps = data.get("steps_to_next_obs", None)
    if steps is not None:
        discount = discount ** _over(steps, data, reward).to(now.dtype)
    mask = step_entry(data, "mask")
    shown, beyond = now, after
    if mask is not None:
        is_step = _over(mask, data, reward)
        reward, shown, beyond = (values.where(is_step, 0) for values in (reward, now, after))
    missing = following.get(rules.FINAL_MISSING, None)
    if missing is not None:
        is_unknown = missing.expand_as(reward)
        beyond = beyond.where(~is_unknown, 0)
        reward = reward.where(~is_unknown | terminated, shown)
    advantage, target = generalized_advantage_estimate(
        discount, weight, shown, beyond, reward, done, terminated, time_dim=time
    )
    return data.update({"advantage": advantage, "value_target": target})


def _valued(
    td: TensorDictBase, value: Callable[[TensorDictBase], Any] | None, where: str
) -> torch.Tensor:
    """Return the values of a moment, and write them down."""
    try:
        values: Any = td if value is None else value(td)
    except (AttributeError, TypeError) as error:
        error.add_note(
            "value was called with a TensorDict. Pass lambda td: critic(td['observation']), or a TensorDictModule "
            f"that writes {_VALUE!r}."
        )
        raise
    if isinstance(values, TensorDictBase):
        entry = values.get(_VALUE, None)
        if entry is None:
            raise MissingKeyError(
                f"there is no {_VALUE!r} in {where}{'' if value is None else ' after value was called'}; there are "
                f"{sorted(map(str, td.keys()))}. Pass value, a function that returns the values or writes {_VALUE!r}."
            )
        values = entry
    td.set(_VALUE, values)
    return values


def _entry(following: TensorDictBase, name: str) -> torch.Tensor:
    entry: Any = following.get(name, None)
    if entry is None:
        raise MissingKeyError(
            f'"next" of the batch has no {name!r}; it has {sorted(map(str, following.keys()))}. Pass data of a rollout, '
            "or call generalized_advantage_estimate with the tensors."
        )
    return entry


def _flags(following: TensorDictBase, reward: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    done = _entry(following, "done")
    terminated = following.get("terminated", None)
    flags = [done, done if terminated is None else cast(torch.Tensor, terminated)]
    first, second = (flag.expand_as(reward) for flag in flags)
    return first, second


def _over(steps: torch.Tensor, data: TensorDictBase, reward: torch.Tensor) -> torch.Tensor:
    """Show one number a step in the axes of the reward."""
    axes = (1,) * (reward.ndim - data.batch_dims)
    return steps.reshape(*data.batch_size, *axes).expand_as(reward)


def _of_leading_axes(
    name: str, number: float | torch.Tensor, data: TensorDictBase, reward: torch.Tensor
) -> Any:
    """Show a number of each entry along the first batch axes in the axes of the reward."""
    if not isinstance(number, float | int):
        number = torch.as_tensor(number)
    if not isinstance(number, torch.Tensor) or not number.ndim:
        return number
    if number.shape != data.batch_size[: number.ndim]:
        raise ArgumentError(
            f"{name} has shape {tuple(number.shape)}, but the batch has batch size {tuple(data.batch_size)}. Pass a number, or a "
            f"tensor of its first axes, e.g. of shape {tuple(data.batch_size[:1])}."
        )
    return number.reshape(*number.shape, *(1,) * (reward.ndim - number.ndim)).to(reward.device)


def minibatches(
    batch: TensorDictBase,
    batch_size: int,
    *,
    epochs: int = 1,
    drop_last: bool = False,
    keep_dims: int = 0,
    generator: torch.Generator | None = None,
) -> Iterator[EnvData]:
    """Return the steps of a batch in random order, in parts of ``batch_size``, each step once in each epoch.

    An epoch shuffles all entries at once, and its parts are views of that copy. So leave out what the loss does not read:
    ``batch.select("observation", "action", ...)``. Padding is left out.

    Args:
        batch: data of any batch size; all batch axes are shuffled together.
        batch_size: steps of a part.
        epochs: how many times to go through the data, in another order each time.
        drop_last: leave out the rest of an epoch that fills no part; by default it is a smaller part.
        keep_dims: how many of the first batch axes stay as they are, 1 for a batch of ``(policies, n, T)``. Only the steps
            behind them are shuffled, all in one order.
        generator: of the order, on the device of the data; torch's own by default.

    Returns:
        An iterator over parts, TensorDicts of batch size ``(batch_size,)``, behind the axes that are kept.

    Raises:
        DataTypeError: (a TypeError) ``batch`` is no TensorDict.
        ArgumentError: (a ValueError) ``batch_size`` or ``epochs`` is below 1, the batch has no axis to shuffle, or it has
            fewer steps than ``batch_size`` and ``drop_last`` would leave out all. Or axes are kept, and there is padding.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import minibatches
        >>> batch = TensorDict({"observation": torch.arange(12.0).reshape(3, 4, 1)}, [3, 4])
        >>> [tuple(part.batch_size) for part in minibatches(batch, 5)]
        [(5,), (5,), (2,)]
        >>> [tuple(part.batch_size) for part in minibatches(batch, 2, keep_dims=1)]
        [(3, 2), (3, 2)]
    """
    require_tensordict("batch", batch, "what rollout or a collector gives")
    size = as_int("batch_size", batch_size, least=1, meaning="the number of steps of a part")
    count = as_int("epochs", epochs, least=1, meaning="how many times to go through the data")
    kept_axes = as_int("keep_dims", keep_dims, least=0, meaning="the number of axes to keep")
    if batch.batch_dims <= kept_axes:
        raise ArgumentError(
            f"the batch has batch size {tuple(batch.batch_size)} and keep_dims is {kept_axes}; expected at least one batch axis "
            "behind those that are kept. Pass data of a rollout."
        )
    mask = step_entry(batch, "mask")
    if kept_axes and mask is not None and not bool(mask.all()):
        raise ArgumentError(
            f"the batch has padding, so its entries along the first {kept_axes} axes have different numbers of steps. Pass "
            "keep_dims=0, or a batch without padding."
        )
    is_whole = mask is None or kept_axes
    steps: Any = batch.flatten(kept_axes, -1) if is_whole else batch[mask]
    number = steps.batch_size[-1]
    if not number:
        raise ArgumentError(
            f"the batch has batch size {tuple(batch.batch_size)} and no step that is not padding; expected at least one. Pass data of a "
            "rollout."
        )
    if drop_last and number < size:
        raise ArgumentError(
            f"the batch has {number} steps, fewer than batch_size={size}, so drop_last=True leaves out all of them. "
            "Pass a smaller batch_size."
        )
    return _shuffled(steps, size, count, drop_last, generator)


def _shuffled(
    steps: Any, size: int, epochs: int, drop_last: bool, generator: torch.Generator | None
) -> Iterator[EnvData]:
    tensors = (leaf for leaf in steps.values(True, True) if isinstance(leaf, torch.Tensor))
    device, number = next((leaf.device for leaf in tensors), None), steps.batch_size[-1]
    kept = number - number % size if drop_last else number
    for _ in range(epochs):
        order = torch.randperm(number, generator=generator, device=device)
        yield from steps[..., order[:kept]].split(size, -1)
