"""Recorded sequences before they are learnt from: stretches of them, and returns over several steps.

For replay buffers and modules; an env has no recorded time. `RandomCropTensorDict` takes a random part of each sequence,
`BurnInTransform` what follows a burn-in. `MultiStep` decides which steps a multi-step return covers: up to n, never across
the end of an episode, the end of the data, or padding. `MultiStepTransform` does the same across writes to a replay buffer.
`Reward2GoTransform` covers all that are left.

Conventions
    data    TensorDict of batch size (*batch, T), with ``next`` for returns; time is the last batch axis unless
            another is named.
    start   first step of a stretch.
    window  the steps t, t+1, ..., t+k-1 of a return; k is its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import expand_as_right
from torch import nn

from envkit.arrays.integers import as_int
from envkit.data.arguments import as_number
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.data.timeline import seams, time_axis
from envkit.data.transition import leaves
from envkit.errors import ArgumentError, BatchSizeError, DoneError, MissingKeyError, PlacementError
from envkit.specs import Composite
from envkit.transforms.core.transform import Keys, Transform, as_keys


class RecordedTransform(Transform):
    """Base of transforms of recorded sequences, which no env takes."""

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        raise self._misplaced()

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        raise self._misplaced()

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        raise self._misplaced()

    def _misplaced(self) -> PlacementError:
        return PlacementError(
            f"{type(self).__name__} works on recorded sequences, and an env gives single steps. Call it on "
            "data, or give it to a replay buffer."
        )


class RandomCropTensorDict(RecordedTransform):
    """Take a random stretch of each recorded sequence.

    Args:
        sub_seq_len: length of the stretch. All starts that leave room for it are equally likely.
        sample_dim: batch axis that is time.
        mask_key: entry that is set where a step is no padding, which follows the steps; stretches of them
            alone are taken. Ignored where data has no such entry.

    Raises:
        ArgumentError: (a ValueError) ``sub_seq_len`` is below 0.
        PlacementError: (a RuntimeError, from forward) a sequence is shorter than the stretch, or data has
            no batch axis.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import RandomCropTensorDict
        >>> data = TensorDict(x=torch.arange(20.0).reshape(2, 10), batch_size=[2, 10])
        >>> RandomCropTensorDict(4)(data).batch_size
        torch.Size([2, 4])
    """

    _in_repr = ("sub_seq_len", "sample_dim")

    def __init__(self, sub_seq_len: int, sample_dim: int = -1, mask_key: Key | None = None):
        super().__init__()
        meaning = "the steps of a stretch"
        self.sub_seq_len = as_int("sub_seq_len", sub_seq_len, least=0, meaning=meaning)
        self.sample_dim = as_int("sample_dim", sample_dim, least=None, meaning="an axis")
        self.mask_key = mask_key

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return stretches, batch size ``(*batch, sub_seq_len)``; the input is not written to.

        Args:
            tensordict: sequences; batch axis ``sample_dim`` is time.
        """
        shape, axis = tensordict.shape, self.sample_dim
        if not shape:
            raise PlacementError(
                "RandomCropTensorDict takes a stretch of each sequence, but the data has no batch axis. "
                "Give it data of batch size (*batch, T)."
            )
        lengths = torch.full((*shape[:axis], 1, *shape[axis:][1:]), shape[axis])
        mask = None if self.mask_key is None else tensordict.get(self.mask_key, None)
        if mask is not None:
            lengths = mask.reshape(shape).sum(axis, keepdim=True).cpu()
        room = lengths - self.sub_seq_len + 1
        if int(room.min()) < 1:
            raise PlacementError(
                f"sub_seq_len is {self.sub_seq_len}, but the shortest sequence along axis {axis} of data "
                f"of batch size {tuple(shape)} has {int(lengths.min())} steps. Pass a smaller one, or longer "
                "sequences."
            )
        starts = (torch.rand(room.shape, dtype=torch.float64) * room).long()
        steps = torch.arange(self.sub_seq_len)
        steps = steps.reshape(-1, *(1,) * (len(shape) - axis % len(shape) - 1))
        return tensordict.gather(axis, (starts + steps).to(tensordict.device))


class BurnInTransform(RecordedTransform):
    """Run modules over the first steps of recorded sequences, and begin the rest with what they remember.

    For recurrent policies whose recorded hidden states are out of date. No gradient is kept.

    Args:
        modules: modules that take sequences, most often one with a hidden state.
        burn_in: number of steps that are run and left out.
        out_keys: the hidden states; those the modules write below ``next`` by default.

    Raises:
        ArgumentError: (a ValueError) ``burn_in`` is negative, or leaves no step of the data; or a module
            reads and writes no TensorDicts.
        MissingKeyError: (from forward) the data or the modules give no such hidden state.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from envkit import BurnInTransform
        >>> class Total(torch.nn.Module):
        ...     def forward(self, x, hidden):
        ...         total = x.cumsum(-2) + hidden[..., :1, :]
        ...         return total, total
        >>> module = TensorDictModule(
        ...     Total(), in_keys=["x", "hidden"], out_keys=["y", ("next", "hidden")]
        ... )
        >>> data = TensorDict(x=torch.ones(5, 1), hidden=torch.zeros(5, 1), batch_size=[5])
        >>> rest = BurnInTransform(module, burn_in=2)(data)
        >>> rest.batch_size, rest["hidden"][0]
        (torch.Size([3]), tensor([2.]))
    """

    def __init__(
        self,
        modules: Sequence[TensorDictModuleBase] | TensorDictModuleBase,
        burn_in: int,
        out_keys: Keys = None,
    ):
        is_one = isinstance(modules, TensorDictModuleBase) or not isinstance(modules, Iterable)
        several: list[Any] = [modules] if is_one else list(cast(Iterable[Any], modules))
        for module in several:
            if not isinstance(module, TensorDictModuleBase):
                raise ArgumentError(
                    f"BurnInTransform was given {type(module).__name__}, but takes modules that read and write "
                    "TensorDicts. Wrap it: TensorDictModule(module, in_keys=[...], out_keys=[...])."
                )
        burn_in = as_int("burn_in", burn_in, least=0, meaning="a number of steps")
        written = {as_path(key) for module in several for key in module.out_keys}
        hidden = sorted(as_key(path[1:]) for path in written if path[0] == "next" and path[1:])
        read = sorted(
            {as_key(as_path(key)) for module in several for key in module.in_keys}, key=str
        )
        super().__init__(read, hidden if out_keys is None else as_keys(out_keys))
        # no submodules: they belong to the policy
        self.modules_to_run: tuple[TensorDictModuleBase, ...] = tuple(several)
        self.burn_in = burn_in

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the rest, batch size ``(*batch, T - burn_in)``; the input is not written to.

        Args:
            tensordict: sequences, batch size ``(*batch, T)``.
        """
        if not self.burn_in:
            return tensordict
        time = tensordict.batch_dims - 1
        if time < 0 or tensordict.shape[time] <= self.burn_in:
            raise ArgumentError(
                f"burn_in is {self.burn_in}, but the data has batch size {tuple(tensordict.shape)}: no step is "
                "left. Record longer sequences."
            )
        steps = slice(None, self.burn_in), slice(self.burn_in, None)
        early, rest = (cast(TensorDictBase, tensordict[..., part]).copy() for part in steps)
        with torch.no_grad():
            for module in self.modules_to_run:
                early = module(early)
        for key in self.out_keys:
            last, begun = early.get(("next", *as_path(key)), None), rest.get(key, None)
            if last is None or begun is None:
                raise MissingKeyError(
                    f"BurnInTransform begins {key!r} with what the modules remember, but "
                    f"{'the data' if begun is None else 'they'} gave no such entry: data has "
                    f"{sorted(map(str, early.keys(True, True)))}. Pass out_keys=."
                )
            begun = begun.clone()
            begun.select(time, 0).copy_(last.select(time, -1))
            rest.set(key, begun)
        return rest

    def extra_repr(self) -> str:
        return f"burn_in={self.burn_in}, in_keys={self.in_keys}, out_keys={self.out_keys}"


# Flags that say where an episode is cut, whether or not the state after it has a value.
_CUTS = ("done", "truncated")
_MASKS: tuple[Key, ...] = ("mask", ("collector", "mask"))


def _number_of_steps(n_steps: int) -> int:
    return as_int("n_steps", n_steps, least=1, meaning="the longest window")


class MultiStep(nn.Module):
    """Turn single-step transitions into n-step ones.

    For each step t, with k the number of steps until ``n_steps``, the end of the episode or the end of
    the data, whichever comes first: ``next.reward`` is ``sum_{i<k} gamma**i * r[t+i]``, and the
    observations in ``next`` and ``terminated`` are those of step t+k-1: a target that is
    ``reward + gamma * value(next) * ~terminated`` takes no value after the end of an episode.
    ``done`` and ``truncated`` stay those of t, so that episodes are still cut where they end. Where the
    data has no ``terminated``, it is added: ``done``, but for what was ``truncated``.

    An episode also ends where trajectory ids change, or the next root is not the ``next`` of the step: between the parts of
    workers or rollouts that were joined. Time is the axis of that name, or the last one. Steps in another order than that
    of time are refused, and so is data of one axis without ids that is not named "time", unless its observations tell.

    Adds ``steps_to_next_obs`` (k, int64), ``gamma`` (``gamma**k``), ``nonterminal`` (k > 1) of shape
    ``(*batch, T)``, and ``("next", "original_reward")``.

    Args:
        gamma: discount, in (0, 1].
        n_steps: longest window.
        reward_keys: rewards in ``next``.
        done_key: the flag in ``next`` that ends an episode, shape ``(*batch, T, 1)``.
        mask_key: mask of the steps that are no padding, shape ``(*batch, T)``; None looks for
            ``mask`` and ``("collector", "mask")``.
        done_keys: entries of ``next`` that stay those of t; by default all that are named ``done`` or
            ``truncated``. TorchRL keeps ``("done", "terminated", "truncated")``.

    Raises:
        ArgumentError: (a ValueError) ``n_steps`` is below 1, or ``gamma`` outside (0, 1].

    Example:
        >>> from envkit import GymEnv, MultiStep
        >>> env = GymEnv("CartPole-v1")
        >>> data = MultiStep(gamma=0.5, n_steps=2)(env.rollout(3))
        >>> data["next", "reward"].flatten()
        tensor([1.5000, 1.5000, 1.0000])
        >>> data["steps_to_next_obs"].flatten()
        tensor([2, 2, 1])
        >>> env.close()
    """

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        *,
        reward_keys: Keys = "reward",
        done_key: Key = "done",
        mask_key: Key | None = None,
        done_keys: Keys = None,
    ):
        super().__init__()
        n_steps = _number_of_steps(n_steps)
        self.gamma = as_number("gamma", gamma, above=0, most=1, meaning="the discount")
        self.n_steps = n_steps
        self.reward_keys = as_keys(reward_keys)
        self.done_key = done_key
        self.mask_key = mask_key
        self.done_keys = None if done_keys is None else as_keys(done_keys)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return data with n-step returns, batch size ``(*batch, T)``; the input is not written to.

        Args:
            tensordict: transitions, batch size ``(*batch, T)``.

        Raises:
            ArgumentError: (a ValueError) the data has no axis of time, or its steps are not in the order of time.
        """
        axis, last = time_axis(tensordict), tensordict.batch_dims - 1
        if axis != last:
            return self(tensordict.transpose(axis, last)).transpose(axis, last)
        td = tensordict.copy()
        following = self._with_terminated(td.get("next"))
        valid = self._valid(td)
        reaches = self._reaches(td, following, valid)
        length = torch.stack(reaches).sum(0)
        original = {key: following.get(key) for key in self.reward_keys}
        shown = self._from_last(following, length)
        for key, reward in original.items():
            shown.set(key, self._return(reward, reaches))
            path = as_path(key)
            shown.set(as_key((*path[:-1], f"original_{path[-1]}")), reward)
        td.set("next", shown)
        td.set("steps_to_next_obs", length)
        td.set("gamma", self.gamma ** length.to(torch.get_default_dtype()))
        td.set("nonterminal", (length > 1) & valid)
        return td

    def _with_terminated(self, following: TensorDictBase) -> TensorDictBase:
        level = as_path(self.done_key)[:-1]
        key = as_key((*level, "terminated"))
        if self.done_keys is not None or following.get(key, None) is not None:
            return following
        done, truncated = (
            following.get(as_key((*level, name)), None) for name in ("done", "truncated")
        )
        if done is None:
            return following
        return following.copy().set(key, done if truncated is None else done & ~truncated)

    def _valid(self, td: TensorDictBase) -> torch.Tensor:
        for key in _MASKS if self.mask_key is None else (self.mask_key,):
            mask = td.get(key, None)
            if mask is not None:
                return mask.reshape(td.batch_size)
        return torch.ones(td.batch_size, dtype=torch.bool, device=td.device)

    def _reaches(
        self, td: TensorDictBase, following: TensorDictBase, valid: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return for i = 0, 1, ... whether the window of each step holds the i-th step after it."""
        ended = following.get(self.done_key).reshape((*following.shape, -1)).any(-1)
        goes_on = ~(ended | seams(td, ended, td.batch_dims - 1))
        goes_on[..., :-1] &= valid[..., 1:]
        goes_on[..., -1] = False
        reaches = [torch.ones_like(valid)]
        for number in range(1, min(self.n_steps, valid.shape[-1])):
            reaches.append(reaches[-1] & _later(goes_on, number - 1))
        return reaches

    def _return(self, reward: torch.Tensor, reaches: list[torch.Tensor]) -> torch.Tensor:
        axis = reaches[0].ndim - 1
        total = torch.zeros_like(reward)
        for number, reach in enumerate(reaches):
            held = expand_as_right(reach, reward)
            total = total + self.gamma**number * held * _later(reward, number, axis)
        return total

    def _from_last(self, following: TensorDictBase, length: torch.Tensor) -> TensorDictBase:
        """Take every entry but rewards and flags that say where episodes are cut from the last step of the window."""
        axis = length.ndim - 1
        last = torch.arange(length.shape[-1], device=length.device) + length - 1
        shown = following.copy()
        for path, value in leaves(following):
            if self._stays(path) or not isinstance(value, torch.Tensor):
                continue
            shown.set(as_key(path), value.gather(axis, expand_as_right(last, value)))
        return shown

    def _stays(self, path: Path) -> bool:
        """Whether an entry of ``next`` is not taken from the last step of the window."""
        kept = {as_path(key) for key in (*self.reward_keys, self.done_key, *(self.done_keys or ()))}
        return path in kept or (self.done_keys is None and path[-1] in _CUTS)


def _later(value: torch.Tensor, steps: int, axis: int = -1) -> torch.Tensor:
    """Return at each time the value of ``steps`` steps later; zero (False) beyond the end."""
    rest = value.narrow(axis, steps, value.shape[axis] - steps)
    return torch.cat([rest, torch.zeros_like(value.narrow(axis, 0, steps))], axis)


class MultiStepTransform(RecordedTransform):
    """Turn what is written to a replay buffer into n-step transitions, across writes.

    The last ``n_steps`` steps of what was written are kept back until their windows are complete, so each write
    gives the steps that became complete, and None where there are none. See `MultiStep` for what a step
    becomes, and where episodes end. Windows at the end of a worker's part are shorter.
    Give it to a replay buffer.

    Args:
        n_steps: longest window; may be changed at any time.
        gamma: discount.
        reward_keys, done_key, done_keys, mask_key: see `MultiStep`.

    Raises:
        ArgumentError: (a ValueError) ``n_steps`` is below 1, or ``gamma`` outside (0, 1].
        BatchSizeError: (a RuntimeError) a write has other batch axes than the one before.
        ArgumentError: (a ValueError) a write has no axis of time, or its steps are not in the order of time.

    Example:
        >>> from envkit import GymEnv, MultiStepTransform
        >>> env = GymEnv("CartPole-v1")
        >>> n_step = MultiStepTransform(n_steps=2, gamma=0.5)
        >>> written = n_step.inv(env.rollout(5))
        >>> written["next", "reward"].flatten()
        tensor([1.5000, 1.5000, 1.5000])
        >>> env.close()
    """

    _changes_with_use = ("_held",)

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: Keys = None,
        done_key: Key | None = None,
        done_keys: Keys = None,
        mask_key: Key | None = None,
    ):
        super().__init__()
        self._windows = MultiStep(
            gamma,
            n_steps,
            reward_keys="reward" if reward_keys is None else reward_keys,
            done_key="done" if done_key is None else done_key,
            done_keys=done_keys,
            mask_key=mask_key,
        )
        self._held: TensorDictBase | None = None

    gamma = property(attrgetter("_windows.gamma"), doc="The discount.")
    reward_keys = property(attrgetter("_windows.reward_keys"), doc="Rewards in ``next``.")
    done_key = property(
        attrgetter("_windows.done_key"), doc="The flag in ``next`` that ends an episode."
    )
    done_keys = property(
        attrgetter("_windows.done_keys"),
        doc="Entries of ``next`` that stay those of the first step.",
    )
    mask_key = property(
        attrgetter("_windows.mask_key"), doc="Mask of the steps that are no padding."
    )

    @property
    def n_steps(self) -> int:
        """The longest window; assignable."""
        return self._windows.n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        self._windows.n_steps = _number_of_steps(value)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled data as it is."""
        return tensordict

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase | None:  # type: ignore[override]
        axis, last = time_axis(td), td.batch_dims - 1
        if axis != last:
            written = self._inv_call(td.transpose(axis, last))
            return None if written is None else written.transpose(axis, last)
        held = self._held
        if held is not None and held.shape[:-1] != td.shape[:-1]:
            raise BatchSizeError(
                f"MultiStepTransform was given data of batch size {tuple(td.shape)} after {tuple(held.shape)}. "
                "All that is written to one buffer must have the same axes beside the time."
            )
        whole = td if held is None else torch.cat([held, td], -1)
        complete = whole.shape[-1] - self.n_steps
        self._held = whole[..., max(complete, 0) :].clone()
        return self._windows(whole)[..., :complete] if complete > 0 else None


class Reward2GoTransform(Transform):
    """Add up, for each step, the rewards from there to the end of its episode, discounted.

    Works in the inverse pass, on the way into a replay buffer, or as ``transform.inv(data)``: data
    must hold whole episodes. Rewards after the last end of an episode are added up to the end of the data, or to where
    another trajectory begins; see `MultiStep` for how that is found.

    Args:
        gamma: discount.
        in_keys: rewards; ``("next", "reward")`` by default.
        out_keys: where the sums go; in place by default.
        done_key: the flag in ``next`` that ends an episode; ``truncated`` beside it ends one too.

    Raises:
        ArgumentError: (a ValueError) it is put into an environment.
        DoneError: (a RuntimeError) no episode ends in the data.
        ArgumentError: (a ValueError) the steps are not in the order of time, or nothing tells.

    Example:
        >>> from envkit import GymEnv, Reward2GoTransform
        >>> env = GymEnv("CartPole-v1", max_episode_steps=3)
        >>> data = Reward2GoTransform(gamma=0.5).inv(env.rollout(3))
        >>> data["next", "reward"].flatten()
        tensor([1.7500, 1.5000, 1.0000])
        >>> env.close()
    """

    _in_repr = ("gamma",)

    def __init__(
        self,
        gamma: float | torch.Tensor = 1.0,
        in_keys: Keys = None,
        out_keys: Keys = None,
        done_key: Key = "done",
    ):
        keys = [("next", "reward")] if in_keys is None else as_keys(in_keys)
        super().__init__(in_keys_inv=keys, out_keys_inv=keys if out_keys is None else out_keys)
        as_number("gamma", gamma, meaning="the discount")
        self.gamma = gamma
        self.done_key = done_key

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled data as it is."""
        return tensordict

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        axis, ended = time_axis(td), self._ended(td)
        ended = ended | seams(td, ended, axis)
        for source, target in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            reward = td.get(source, None)
            if reward is None:
                raise self._missing(source, td, "Pass in_keys=.")
            td.set(target, self._to_go(reward, expand_as_right(~ended, reward), axis))
        return td

    def _ended(self, td: TensorDictBase) -> torch.Tensor:
        """Return which steps ended an episode, shape ``(*batch, T)``."""
        path = as_path(self.done_key)
        ended = td.get(("next", *path), None)
        if ended is None or not bool(ended.any()):
            raise DoneError(
                f"no episode ends in the data, where {('next', *path)} is never set, but a sum goes to the end of an episode. "
                "Record whole episodes."
            )
        truncated = td.get(("next", *path[:-1], "truncated"), None)
        ended = ended if truncated is None else ended | truncated
        return ended.flatten(td.batch_dims).any(-1) if ended.ndim > td.batch_dims else ended

    def _to_go(self, reward: torch.Tensor, goes_on: torch.Tensor, axis: int) -> torch.Tensor:
        left, sums = torch.zeros_like(reward.select(axis, 0)), []
        steps = zip(reward.unbind(axis), goes_on.unbind(axis), strict=True)
        for now, more in reversed(list(steps)):
            left = now + self.gamma * torch.where(more, left, 0)
            sums.append(left)
        return torch.stack(sums[::-1], axis)

    def _refuse_env(self) -> None:
        raise ArgumentError(
            "Reward2GoTransform needs whole episodes and cannot be in an environment. Call "
            "transform.inv(data), or give it to a replay buffer."
        )


def windows_ahead(ended: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next ``count`` steps from each step on, with its episode's last one repeated, and which are repeats.

    Args:
        ended: where an episode ends, bool ``(*batch, T)``.
        count: steps of a window.

    Returns:
        Numbers of steps, int64, and bools, each of shape ``(*batch, T, count)``.
    """
    steps = torch.arange(ended.shape[-1], device=ended.device)
    wanted = steps[:, None] + torch.arange(count, device=ended.device)
    last = torch.where(ended, steps, len(steps) - 1).flip(-1).cummin(-1).values.flip(-1)
    nearest = wanted.minimum(last[..., None])
    return nearest, nearest != wanted
