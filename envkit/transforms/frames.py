"""The last few frames of an episode in one entry: side by side, or their maximum; step by step, and in recorded data.

The frames before the newest one travel in the data, under a private name beside the entry they serve. So
rows may be stored, skipped and continued anywhere, and later transforms may change the entry itself. `elementwise`
joins frames; `episodes` says which reset an entry obeys. The end of an episode of recorded data is read from its own
flags, or said by a mask.

Conventions
    frame    value of an in_key at one moment.
    memory   the ``count - 1`` frames before the newest, joined along ``dim``, oldest first.
    window   the last ``count`` steps up to a step, or, looking ahead, the next ones from it on.
    padding  what stands for frames before the first one of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.arrays import elementwise
from envkit.arrays.elementwise import Array
from envkit.arrays.integers import as_int
from envkit.arrays.leaves import Changes, Leaves
from envkit.data.arguments import as_bool, as_number, require_option
from envkit.data.paths import Key, Path, as_key, as_path
from envkit.data.timeline import seams, time_axis
from envkit.errors import (
    KeyCollisionError,
    MissingKeyError,
    PlacementError,
    SpecError,
    UnsupportedError,
)
from envkit.lazy_imports import late
from envkit.specs import Bounded, BoundedContinuous, BoundedDiscrete, Composite, TensorSpec
from envkit.transforms.core.fusable import FusableTransform, LeavesOf, written
from envkit.transforms.core.leafwise import (
    LeafTransform,
    require_known,
    require_negative,
    require_regular,
    reshaped,
)
from envkit.transforms.core.transform import Keys
from envkit.transforms.episodes import EpisodeTransform
from envkit.transforms.postprocess import windows_ahead


def _require_window(N: int, padding: str) -> int:
    """Check how many frames are joined, which it gives, and what stands for those before the first.

    Raises:
        ArgumentTypeError: (a TypeError) ``N`` is no integer.
        ArgumentError: (a ValueError) ``N`` below 1, or an unknown padding.
    """
    N = as_int("N", N, least=1, meaning="how many frames to join")
    require_option("padding", padding, ("same", "constant"))
    return N


def cat_frames(
    tensor: torch.Tensor,
    N: int,
    dim: int,
    *,
    padding: Literal["same", "constant"] = "same",
    padding_value: float = 0.0,
    time_dim: int = -1,
    done_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Join each frame of a sequence with the ``N - 1`` before it, oldest first; see `CatFrames`.

    Args:
        tensor: frames, shape ``(*batch, T, *event)``.
        N: number of frames of a window.
        dim: axis along which they are joined, negative.
        padding: "same" takes the next frame of the window that is no padding; "constant" takes
            ``padding_value``.
        padding_value: see ``padding``.
        time_dim: the axis of time, negative.
        done_mask: which frames of each window belong to another episode and are padding, bool
            ``(*batch, T, N)``; what lies before the first frame always is.

    Returns:
        A new tensor, ``N`` times as long along ``dim``, of the same dtype and device.

    Raises:
        ArgumentError: (a ValueError) an axis is not negative, ``N`` below 1, or an unknown padding.

    Example:
        >>> import torch
        >>> from envkit import cat_frames
        >>> cat_frames(torch.tensor([[1.0], [2.0], [3.0]]), N=2, dim=-1, time_dim=-2)
        tensor([[1., 1.],
                [1., 2.],
                [2., 3.]])
    """
    _require_window(N, padding)
    axis = require_negative("time_dim", time_dim) % tensor.ndim
    place = torch.arange(N, device=tensor.device)
    first = torch.arange(tensor.shape[axis], device=tensor.device)[:, None] - (N - 1)
    padded = (first + place < 0).expand(*tensor.shape[: axis + 1], N)
    if done_mask is not None:
        padded = padded | done_mask
    nearest = torch.where(padded, N - 1, place).flip(-1).cummin(-1).values.flip(-1)
    fill = None if padding == "same" else padding_value
    return _joined(tensor, axis, first + nearest, padded, require_negative("dim", dim), fill)


def _joined(
    frames: torch.Tensor,
    axis: int,
    steps: torch.Tensor,
    padded: torch.Tensor,
    dim: int,
    fill: float | None,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """Join the frames of windows along ``dim``; see `_Episodes` for ``steps``, ``padded`` and ``before``."""
    frames = frames.movedim(axis, 0)
    index, blank = steps.movedim(-2, 0), padded.movedim(-2, 0)  # T first, like the frames
    shape = (*index.shape[:-1], *(1,) * (frames.ndim - index.ndim + 1))
    parts = []
    for number in range(index.shape[-1]):
        at = index[..., number].reshape(shape).expand(frames.shape)
        is_blank = blank[..., number].reshape(shape)
        part = frames.gather(0, at)
        if before is not None:
            part = torch.where(is_blank, before.movedim(axis, 0).gather(0, at), part)
            is_blank = is_blank & blank.roll(-1, -1)[..., number].reshape(shape)
        if fill is not None:
            part = part.masked_fill(is_blank, fill)
        parts.append(part.movedim(0, axis))
    return torch.cat(parts, dim)


class _Episodes:
    """Where the windows of recorded data begin and end.

    Attributes:
        axis: the time axis.
        steps: for each step and each frame of its window, the step it is taken from, int64
            ``(*batch, T, count)``; padded frames are taken from the end of the episode that is nearest.
        padded: which of these are padding, bool.
    """

    def __init__(self, td: TensorDictBase, done_key: Key, count: int, *, ahead: bool):
        self.axis = time_axis(td)
        ended = self._ended(td, done_key, is_needed=not ahead)
        ended = (ended | seams(td, ended, self.axis)).movedim(self.axis, -1)
        if ahead:
            self.steps, self.padded = windows_ahead(ended, count)
            return
        steps = torch.arange(td.shape[self.axis], device=td.device)
        wanted = steps[:, None] + torch.arange(1 - count, 1, device=td.device)
        first = torch.where(ended.roll(1, -1), steps, 0).cummax(-1).values
        self.steps = wanted.maximum(first[..., None])
        self.padded = self.steps != wanted

    def _ended(self, td: TensorDictBase, done_key: Key, *, is_needed: bool) -> torch.Tensor:
        """Return which steps end an episode, by their flags; none where the data does not tell, unless it must."""
        done = td.get(("next", *as_path(done_key)), None)
        if done is None and is_needed:
            raise MissingKeyError(
                f"frames of recorded data are joined within episodes, but the data has no "
                f"{('next', *as_path(done_key))} that says where they end. Record it, or pass done_key=."
            )
        if done is None:
            done = torch.zeros(td.batch_size, dtype=torch.bool, device=td.device)
        return done.flatten(td.batch_dims).any(-1) if done.ndim > td.batch_dims else done

    def windows(
        self,
        frames: torch.Tensor,
        dim: int,
        fill: float | None,
        *,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Join the frames of each window along ``dim``; padding is ``fill``, or the nearest frame.

        Args:
            before: frames that precede those of the same step; the one of an episode's first step comes
                before all of ``frames``.
        """
        return _joined(frames, self.axis, self.steps, self.padded, dim, fill, before)


class _Windowed(FusableTransform, EpisodeTransform, LeafTransform):
    """Base of transforms that need the last ``count`` frames."""

    _memory_name: str

    keeps_memory = True
    _changes_with_use = ("_own_windows",)

    def __init__(self, in_keys: Keys, out_keys: Keys, count: int, dim: int, reset_key: Key | None):
        super().__init__(in_keys, out_keys)
        self.count = count
        self.dim = require_negative("dim", dim)
        self.reset_key = reset_key
        self._own_windows: dict[Path, Any] = {}

    # ---------------------------------------------------------------------- for concrete transforms

    def _shown(self, window: Array) -> Array:
        """Make the outcome of a window of ``count`` frames."""
        raise NotImplementedError

    def _padding(self, frame: Array, constants: Mapping[str, Any]) -> Array:
        """Make the memory of an episode whose first frame this is."""
        return elementwise.tiled(frame, self.count - 1, self.dim)

    # ------------------------------------------------------------------------------------- one step

    def _memory_key(self, target: Key) -> Key:
        path = as_path(target)
        return as_key((*path[:-1], f"_{self._memory_name}_{path[-1]}"))

    def memory(self) -> list[Path]:
        return [as_path(self._memory_key(target)) for target in self.out_keys if self.count > 1]

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        changes: dict[Path, Any] = {}
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            frame, path = following.get(as_path(source)), as_path(self._memory_key(target))
            if frame is None:
                if not self.missing_tolerance:
                    raise self._missing(source, following, "Name an entry that is there.")
            elif self.count == 1:
                changes[as_path(target)] = self._shown(frame)
            else:
                memory = root.get(path)
                memory = self._padding(frame, constants) if memory is None else memory
                window = elementwise.pushed(memory, frame, self.dim)
                changes[as_path(target)] = self._shown(window)
                changes[path] = elementwise.recent(window, memory.shape[self.dim], self.dim)
        return changes

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        """Show the next frame as one of a run without episodes; its window belongs to this object.

        For who calls this by hand: in an env, `_step` and `_reset` keep the window in the data.
        """
        constants, windows = self.constants(), dict(self._own_windows)
        for source, path in zip(self.in_keys, self.memory(), strict=False):
            frame = next_td.get(source, None)
            if frame is not None and path not in windows:
                windows[path] = self._before_any(frame, constants)
        changes = self.step_leaves(
            Leaves(windows, next_td.batch_dims), LeavesOf(next_td), constants
        )
        self._own_windows = {path: changes.get(path, window) for path, window in windows.items()}
        return written(
            next_td, {path: leaf for path, leaf in changes.items() if path not in windows}
        )

    def _before_any(self, frame: Array, constants: Mapping[str, Any]) -> Array:
        """Make the memory of a window that is kept by hand."""
        return self._padding(frame, constants)

    def reset_leaves(self, fresh: Leaves, constants: Mapping[str, Any]) -> Changes:
        return self.step_leaves(Leaves({}, fresh.batch_dims), fresh, constants)

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        fresh = super()._reset(td, td_reset)
        for target in self.out_keys:
            level = self._level_of(target, self.reset_key)
            own_level = rules.governing_level(as_path(target)[:-1], self._levels())
            # the env itself keeps what is at this level, as later transforms have shown it
            shown = [] if own_level == level else [target]
            for key in (*shown, self._memory_key(target)):
                value = fresh.get(key, None)
                if value is not None:
                    fresh.set(key, self._kept_elsewhere(td, level, key, value))
        return fresh

    # --------------------------------------------------------------------------------------- specs

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        require_known(self, self.in_keys, output_spec, ("observation",), "in_keys=")
        return super().transform_output_spec(output_spec)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        if not isinstance(observation_spec, Composite):
            return self._spec_after(observation_spec)
        for target in self.out_keys:
            self._require_free(observation_spec, target)
        return self._with_memory(observation_spec.clone(), self._spec_after(observation_spec))

    def _require_free(self, spec: Composite, target: Key) -> None:
        if self.count > 1 and spec.get(self._memory_key(target), None) is not None:
            raise KeyCollisionError(
                f"two {type(self).__name__} transforms write {target!r}, and would share their memory. "
                "Give one of them another out_key."
            )

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        return self._with_memory(self._env().full_observation_spec, state_spec)

    def _with_memory(self, frames: Composite, spec: Composite) -> Composite:
        """Declare the memory of the frames that are observations."""
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            leaf = frames.get(source, None)
            if leaf is not None and self.count > 1:
                require_regular(self, source, leaf)
                self._require_axis(source, leaf, frames.ndim)
                spec[self._memory_key(target)] = self._joined_leaf(leaf, self.count - 1)
        return spec

    def _require_axis(self, source: Key, leaf: TensorSpec, batch_dims: int) -> None:
        if -self.dim > leaf.ndim - batch_dims:
            raise SpecError(
                f"{type(self).__name__} joins frames along axis {self.dim}, but {source!r} has shape "
                f"{tuple(leaf.shape)}, of which {batch_dims} axes are the batch. Pass another dim, or "
                "use UnsqueezeTransform before it."
            )

    def _joined_leaf(self, leaf: TensorSpec, count: int) -> TensorSpec:
        return reshaped(leaf, lambda tensor: torch.cat([tensor] * count, self.dim))


def _next_first(keys: list[Key]) -> list[int]:
    """Order keys, by their numbers, so that those under ``next`` come before their roots change."""
    return sorted(range(len(keys)), key=lambda number: as_path(keys[number])[0] != "next")


class CatFrames(_Windowed):
    """Join the last ``N`` frames of an episode along an axis, oldest first.

    In an env, the first frames of an episode are preceded by padding. Called on recorded data
    ``(*batch, T)``, it joins frames along time (the axis named "time", or the last one of the batch), within each
    episode. There the first frame of the data counts as the first one. So does a frame after a change of trajectory ids,
    and one whose root is not the ``next`` of the step before. Steps in another order than that of time
    are refused, and so is data of one axis without ids that is not named "time", unless its observations tell.

    Args:
        N: number of frames.
        dim: axis along which they are joined, negative.
        in_keys: frames; ``"pixels"`` by default.
        out_keys: where the windows go; in place by default.
        padding: "same" repeats the first frame of the episode; "constant" takes ``padding_value``.
        padding_value: see ``padding``.
        as_inverse: work on recorded data in the inverse pass, on the way into a replay buffer, instead
            of when called.
        reset_key: the `_reset` entry the frames obey; None finds it by place.
        done_key: the end of episodes in recorded data, under ``next``; ``"done"`` by default.
        future: on recorded data, join each frame with the ``N - 1`` after it.
        mask_key: on recorded data, write there which frames are padding, bool ``(*batch, T, N)``.

    Raises:
        ArgumentError: (a ValueError) ``N`` below 1, ``dim`` not negative, or another padding.
        PlacementError: (a RuntimeError and a ValueError) when specs are read: an env is around what works on
            recorded data only.
        UnsupportedError: (a NotImplementedError) when specs are read: an in_key is below ``next``.
        MissingKeyError: recorded data does not say where its episodes end; with ``future`` each row may be one.
        ArgumentError: (a ValueError) the steps of recorded data are not in the order of time, or nothing tells.

    Example:
        >>> from envkit import CatFrames, GymEnv
        >>> frames = CatFrames(3, -1, in_keys=["observation"], out_keys=["history"])
        >>> env = GymEnv("Pendulum-v1").append_transform(frames)
        >>> env.rollout(5)["history"].shape
        torch.Size([5, 9])
        >>> env.close()
    """

    _in_repr = ("N", "dim", "padding")

    _memory_name = "cat_frames"

    def __init__(
        self,
        N: int,
        dim: int,
        in_keys: Keys = None,
        out_keys: Keys = None,
        padding: str = "same",
        padding_value: float = 0,
        as_inverse: bool = False,
        reset_key: Key | None = None,
        done_key: Key | None = None,
        future: bool = False,
        mask_key: Key | None = None,
    ):
        keys = "pixels" if in_keys is None else in_keys
        N = _require_window(N, padding)
        super().__init__(keys, out_keys, N, dim, reset_key)
        self.padding = padding
        as_number("padding_value", padding_value, meaning="the number in place of missing frames")
        self.padding_value = padding_value
        self.as_inverse = as_bool("as_inverse", as_inverse)
        self.done_key: Key = "done" if done_key is None else done_key
        self.future = as_bool("future", future)
        self.mask_key = mask_key

    @property
    def N(self) -> int:
        """Number of frames that are joined; assignable."""
        return self.count

    @N.setter
    def N(self, value: int) -> None:
        self.count = as_int("N", value, least=1, meaning="how many frames to join")

    def make_rb_transform_and_sampler(self, batch_size: int, **sampler_kwargs: Any) -> tuple:
        """Return a transform and a sampler for a buffer of TorchRL that stores frames one by one.

        ``sample(n)`` joins ``n`` windows of ``N`` steps of an episode, at the root and below ``next``; out_keys are
        not stored, so they need their own names.

        Args:
            batch_size: of the buffer; not used here.
            **sampler_kwargs: of its `SliceSampler`.

        Raises:
            OptionError: (a TypeError) by them windows would be shorter than ``N`` steps.
        """
        return late("transform_and_sampler")(self, **sampler_kwargs)

    def constants(self) -> dict[str, Any]:
        return {"padding_value": self.padding_value}

    def _shown(self, window: Array) -> Array:
        return window

    def _padding(self, frame: Array, constants: Mapping[str, Any]) -> Array:
        if self.padding == "same":
            return super()._padding(frame, constants)
        return elementwise.padded(frame, self.N - 1, self.dim, constants["padding_value"])

    def _before_any(self, frame: Array, constants: Mapping[str, Any]) -> Array:
        fill = 0 if self.padding == "same" else constants["padding_value"]
        return elementwise.padded(frame, self.N - 1, self.dim, fill)

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return self._joined_leaf(leaf, self.N)

    def _joined_leaf(self, leaf: TensorSpec, count: int) -> TensorSpec:
        if self.padding == "constant" and isinstance(leaf, BoundedContinuous | BoundedDiscrete):
            low, high = leaf.low, leaf.high
            fill = torch.full_like(low, self.padding_value)
            leaf = Bounded(
                low.minimum(fill), high.maximum(fill), leaf.shape, leaf.device, leaf.dtype
            )
        return super()._joined_leaf(leaf, count)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        if self.future or self.as_inverse:
            name = "future" if self.future else "as_inverse"
            raise PlacementError(
                f"CatFrames({name}=True) works on recorded data and cannot be in an environment. "
                "Call it on a rollout, or give it to a replay buffer."
            )
        if self.mask_key is not None:
            raise PlacementError(
                f"mask_key is {self.mask_key!r}, but a CatFrames in an environment writes no mask of its padding. "
                "Leave mask_key out there, and call a CatFrames with it on recorded data."
            )
        following = [key for key in self.in_keys if as_path(key)[0] == "next"]
        if following:
            raise UnsupportedError(
                f"CatFrames reads {following}, but in an environment the frames of the next step are those of "
                "the root one step later. Name the entries without 'next'."
            )
        return super().transform_output_spec(output_spec)

    # ------------------------------------------------------------------------------- recorded data

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict if self.as_inverse else self.unfolding(tensordict)

    @property
    def _is_forward(self) -> bool:
        return True  # with as_inverse it cannot be in an env

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        return self.unfolding(td) if self.as_inverse else super()._inv_call(td)

    def unfolding(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Join the frames of recorded data, in place, whatever ``as_inverse`` says; see the class.

        Args:
            tensordict: data of batch size ``(*batch, T)``.

        Raises:
            UnsupportedError: (a NotImplementedError) with ``future`` an entry is joined at the root and under
                ``next``.
        """
        td = tensordict
        episodes = _Episodes(td, self.done_key, self.N, ahead=self.future)
        fill = None if self.padding == "same" else self.padding_value
        for number in _next_first(self.in_keys):
            source, target = self.in_keys[number], self.out_keys[number]
            path = as_path(source)
            has_root = path[0] == "next" and as_key(path[1:]) in self.in_keys
            if has_root and self.future:
                raise UnsupportedError(
                    f"CatFrames(future=True) cannot join both {as_key(path[1:])!r} and {source!r}: they look "
                    "ahead from other steps. Name one of them."
                )
            roots = td.get(as_key(path[1:]), None) if has_root else None
            frames = td.get(source, None)
            if frames is None:
                self._convert(td, [source], [target], self._shown)  # says what is missing
                continue
            td.set(target, episodes.windows(frames, self.dim, fill, before=roots))
        if self.mask_key is not None:
            td.set(self.mask_key, episodes.padded.movedim(-2, episodes.axis))
        return td


class TimeMaxPool(_Windowed):
    """Take the element-wise maximum of the last ``T`` frames of an episode.

    At the start of an episode, of those there are. Called on recorded data, see `CatFrames`.

    Args:
        in_keys: frames; ``"observation"`` by default.
        out_keys: where the maxima go; in place by default.
        T: number of frames.
        reset_key: the `_reset` entry the frames obey; None finds it by place.

    Raises:
        ArgumentError: (a ValueError) ``T`` is below 1.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import TimeMaxPool
        >>> done = torch.zeros(3, 1, dtype=torch.bool)
        >>> following = TensorDict(done=done, batch_size=[3])
        >>> frames = torch.tensor([[1.0], [3.0], [2.0]])
        >>> data = TensorDict(
        ...     observation=frames, next=following, batch_size=[3], names=["time"]
        ... )
        >>> TimeMaxPool(T=2)(data)["observation"].flatten()
        tensor([1., 3., 3.])
    """

    _in_repr = ("T",)

    _memory_name = "time_max_pool"

    def __init__(
        self, in_keys: Keys = None, out_keys: Keys = None, T: int = 1, reset_key: Key | None = None
    ):
        T = as_int("T", T, least=1, meaning="how many frames to look at")
        super().__init__("observation" if in_keys is None else in_keys, out_keys, T, -1, reset_key)

    @property
    def T(self) -> int:
        """Number of frames that are looked at; assignable."""
        return self.count

    @T.setter
    def T(self, value: int) -> None:
        self.count = as_int("T", value, least=1, meaning="how many frames to look at")

    def _shown(self, window: Array) -> Array:
        return elementwise.peak(window, self.T, self.dim)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        episodes = _Episodes(tensordict, "done", self.T, ahead=False)
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            self._convert(
                tensordict,
                [source],
                [target],
                lambda frames: self._shown(episodes.windows(frames, self.dim, None)),
            )
        return tensordict
