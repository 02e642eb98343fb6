"""Pictures: drawn by a simulator, given the form that a network wants, kept as a video until they are asked for.

The transforms of images use torch operations only; each works on one image at a time and remembers nothing.
`VideoRecorder` decides which frames are kept and how a batch becomes one frame. The writer of files is a
logger's business: any object with ``log_video(name=, video=, step=)``.

Conventions
    picture  shape (*lead, height, width, channels), as simulators draw.
    image    shape (*lead, channels, height, width); every transform of images but `ToTensorImage` takes one.
    w, h     sizes of the last but one and of the last axis of an image, in this order: TorchRL
             API calls the rows of an image its width.
    frame    uint8, shape (3, height, width).
    video    uint8, shape (1, frames, 3, height, width).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.nn import functional

from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool, as_bool_or_none, require_callable, require_option
from envkit.data.paths import as_path
from envkit.env.base import EnvBase
from envkit.errors import ArgumentError, NoParentError, SpecError, SpecFitError
from envkit.specs import Bounded, Composite, NonTensor, TensorSpec, Unbounded
from envkit.transforms.core.leafwise import LeafTransform, image_of
from envkit.transforms.core.transform import Keys, Transform
from envkit.transforms.episodes import EpisodeTransform


class PixelRenderTransform(Transform):
    """Add what the base env's ``render`` returns after each reset and step.

    The spec is read from one rendered frame; where nothing can be rendered before the first reset, the
    base env is reset for that.

    Args:
        out_keys: where the frames go; one key.
        preproc: function applied to each rendered array, before it becomes a tensor of shape
            ``(*batch, *event)``.
        as_non_tensor: record what is drawn as an object, whatever its shape. None does so where an env with a batch
            draws one picture of all its rows.
        render_method: name of the method of the base env.
        pass_tensordict: call the method with the data of the root or of ``next`` first.
        **kwargs: passed on to it.

    Raises:
        SpecError: the frames do not have the batch size of the env in front, and are no objects.

    Example:
        >>> from envkit import GymEnv, PixelRenderTransform
        >>> env = GymEnv("CartPole-v1", render_mode="rgb_array")
        >>> env = env.append_transform(PixelRenderTransform(out_keys=["pixels"]))
        >>> env.reset()["pixels"].shape
        torch.Size([400, 600, 3])
        >>> env.close()
    """

    only_adds_done = False  # a frame is drawn after the step, before a reset

    def __init__(
        self,
        out_keys: Keys = None,
        preproc: Callable[[Any], Any] | None = None,
        as_non_tensor: bool | None = None,
        render_method: str = "render",
        pass_tensordict: bool = False,
        **kwargs: object,
    ):
        super().__init__(out_keys=["pixels"] if out_keys is None else out_keys)
        require_callable("preproc", preproc, is_optional=True)
        self.preproc = preproc
        self.as_non_tensor = as_bool_or_none("as_non_tensor", as_non_tensor)
        self.render_method = render_method
        self.pass_tensordict = as_bool("pass_tensordict", pass_tensordict)
        self.render_kwargs = kwargs
        self._spec: TensorSpec | None = None

    def _base(self) -> EnvBase:
        if self.container is None:
            raise NoParentError(
                "PixelRenderTransform renders an environment and works only in one: "
                "TransformedEnv(env, PixelRenderTransform())."
            )
        return self.container.base_env

    def _drawn(self, td: TensorDictBase | None) -> Any:
        draw = getattr(self._base(), self.render_method)
        seen = (td,) if self.pass_tensordict else ()
        return draw(*seen, **self.render_kwargs)

    def _prepared(self, drawn: Any) -> Any:
        """Apply ``preproc``; arrays are copied, since a simulator may draw into the same memory again."""
        if isinstance(drawn, list | tuple) and not self.as_non_tensor:  # one for each sub-env
            drawn = np.stack([np.asarray(part) for part in drawn])
        if self.preproc is not None:
            drawn = self.preproc(drawn)
        return np.array(drawn) if isinstance(drawn, np.ndarray) else drawn

    def _frame(self, drawn: Any) -> torch.Tensor:
        """Bring a prepared picture into the form of the entry."""
        env, frame = self._base(), torch.as_tensor(drawn)
        batch = env.batch_size
        if frame.shape[: len(batch)] != batch:
            raise SpecError(
                f"{self.render_method} of {env} gives shape {tuple(frame.shape)}, but it must begin "
                f"with the batch size {tuple(batch)} of the env. Render each sub-env, e.g. with the "
                "transform inside the create function, or pass as_non_tensor=True to record it as it is."
            )
        return frame if env.device is None else frame.to(env.device)

    def _call(self, next_td: TensorDictBase) -> TensorDictBase:
        drawn = self._prepared(self._drawn(next_td))
        if self.as_non_tensor:
            return next_td.set_non_tensor(self.out_keys[0], drawn)
        return next_td.set(self.out_keys[0], self._frame(drawn))

    _reset = Transform._reset_like_step

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        if self._spec is None:
            self._spec = self._read_spec()
        observation_spec[self.out_keys[0]] = self._spec.clone()
        return observation_spec

    def _read_spec(self) -> TensorSpec:
        env = self._base()
        try:
            drawn = self._drawn(None)
        except Exception:  # simulators differ in how they say that there is nothing to draw yet
            drawn = self._drawn(env.reset())
        drawn, batch = self._prepared(drawn), env.batch_size
        if self.as_non_tensor is None:
            shape = tuple(getattr(drawn, "shape", ()))
            is_picture = len(shape) == 3 and shape[-1] == 3
            self.as_non_tensor = is_picture and shape[: len(batch)] != batch
        if self.as_non_tensor:
            return NonTensor(batch, env.device, example_data=drawn)
        frame = self._frame(drawn)
        if frame.dtype == torch.uint8:
            return Bounded(0, 255, frame.shape, dtype=torch.uint8, device=frame.device)
        return Unbounded(frame.shape, dtype=frame.dtype, device=frame.device)


class _ImageTransform(LeafTransform):
    """Base of transforms of images; ``"pixels"`` by default."""

    def __init__(self, in_keys: Keys = None, out_keys: Keys = None):
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        self._require_image(leaf)
        return image_of(leaf, self._apply_transform)

    def _require_image(self, leaf: TensorSpec) -> None:
        if leaf.ndim < 3:
            raise SpecError(
                f"{type(self).__name__} takes images of three axes, but the entry has shape "
                f"{tuple(leaf.shape)}. Pass another in_keys=, or unsqueeze it first."
            )


class ToTensorImage(_ImageTransform):
    """Turn pictures into images, and bytes into numbers from 0 to 1.

    Args:
        from_int: divide by 255; by default only what is no floating-point picture.
        unsqueeze: put an axis of size one before the last three.
        dtype: dtype of the images; the default float dtype if not given.
        in_keys, out_keys: pictures, and where the images go; ``"pixels"``, in place.
        shape_tolerant: leave the axes alone if the last one has not 3 channels.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import ToTensorImage
        >>> picture = torch.full((4, 6, 3), 255, dtype=torch.uint8)
        >>> image = ToTensorImage()(TensorDict(pixels=picture))["pixels"]
        >>> image.shape, image.dtype, image.max()
        (torch.Size([3, 4, 6]), torch.float32, tensor(1.))
    """

    _in_repr = ("from_int", "unsqueeze")

    computes_only = True

    def __init__(
        self,
        from_int: bool | None = None,
        unsqueeze: bool = False,
        dtype: torch.dtype | None = None,
        *,
        in_keys: Keys = None,
        out_keys: Keys = None,
        shape_tolerant: bool = False,
    ):
        super().__init__(in_keys, out_keys)
        self.from_int = None if from_int is None else as_bool("from_int", from_int)
        self.unsqueeze = as_bool("unsqueeze", unsqueeze)
        self.dtype = dtype
        self.shape_tolerant = as_bool("shape_tolerant", shape_tolerant)

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        divides = not value.is_floating_point() if self.from_int is None else self.from_int
        if not self.shape_tolerant or value.shape[-1] == 3:
            value = value.movedim(-1, -3)
        image = value / 255 if divides else value  # bytes become the default dtype
        image = image.to(torch.get_default_dtype() if self.dtype is None else self.dtype)
        return image.unsqueeze(-4) if self.unsqueeze else image


class GrayScale(_ImageTransform):
    """Turn the three colours of images into one channel of brightness.

    Source: ITU-R Recommendation BT.601, luma.

    Args:
        in_keys, out_keys: images; ``"pixels"``, in place.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import GrayScale
        >>> GrayScale()(TensorDict(pixels=torch.zeros(3, 4, 6)))["pixels"].shape
        torch.Size([1, 4, 6])
    """

    computes_only = True

    WEIGHTS = (0.2989, 0.587, 0.114)

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        red, green, blue = value.unbind(-3)
        r, g, b = self.WEIGHTS
        return (r * red + g * green + b * blue).to(value.dtype).unsqueeze(-3)

    def _require_image(self, leaf: TensorSpec) -> None:
        super()._require_image(leaf)
        if leaf.shape[-3] != 3:
            raise SpecError(
                f"GrayScale takes images of three channels, but the entry has shape "
                f"{tuple(leaf.shape)}, with {leaf.shape[-3]}. Use ToTensorImage before it."
            )


class Resize(_ImageTransform):
    """Scale images to another size.

    Args:
        w: size of the last but one axis.
        h: size of the last axis; ``w`` by default.
        interpolation: "bilinear" or "bicubic", both with antialiasing, "nearest" or "nearest-exact".
        in_keys, out_keys: images; ``"pixels"``, in place.

    Images of integers keep their dtype; values are rounded.

    Raises:
        ArgumentError: (a ValueError) a size below 1, or another interpolation.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import Resize
        >>> Resize(2, 3)(TensorDict(pixels=torch.zeros(3, 4, 6)))["pixels"].shape
        torch.Size([3, 2, 3])
    """

    _in_repr = ("w", "h")

    computes_only = True

    _SMOOTH = ("bilinear", "bicubic")
    _STEPPED = ("nearest", "nearest-exact")

    def __init__(
        self,
        w: int,
        h: int | None = None,
        interpolation: str = "bilinear",
        in_keys: Keys = None,
        out_keys: Keys = None,
    ):
        super().__init__(in_keys, out_keys)
        self.w, self.h = _sizes(w, h)
        require_option("interpolation", interpolation, self._SMOOTH + self._STEPPED)
        self.interpolation = interpolation

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        if value.shape[-2:] == (self.w, self.h):
            return value
        images = value.reshape(-1, *value.shape[-3:])
        exact = value.is_floating_point()
        resized = functional.interpolate(
            images if exact else images.to(torch.float32),
            (self.w, self.h),
            mode=self.interpolation,
            antialias=self.interpolation in self._SMOOTH,
        )
        if not exact:
            info = torch.iinfo(value.dtype)
            resized = resized.round().clamp(info.min, info.max).to(value.dtype)
        return resized.reshape(*value.shape[:-2], self.w, self.h)

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        self._require_image(leaf)
        if self.interpolation == "bicubic":  # overshoots
            return Unbounded((*leaf.shape[:-2], self.w, self.h), leaf.device, leaf.dtype)
        return image_of(leaf, self._apply_transform)


class Crop(_ImageTransform):
    """Cut a rectangle out of images; what of it lies beyond the image is zero.

    Args:
        w: size of the last but one axis.
        h: size of the last axis; ``w`` by default.
        top, left: first row and column of the rectangle; negative ones lie before the image.
        in_keys, out_keys: images; ``"pixels"``, in place.

    Raises:
        ArgumentError: (a ValueError) a size below 1.
        SpecFitError: (a RuntimeError) a value has no rows and columns.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import Crop
        >>> image = torch.arange(9.0).reshape(1, 3, 3)
        >>> Crop(2, 1, top=1)(TensorDict(pixels=image))["pixels"]
        tensor([[[3.],
                 [6.]]])
    """

    _in_repr = ("w", "h")

    computes_only = True

    def __init__(
        self,
        w: int,
        h: int | None = None,
        top: int = 0,
        left: int = 0,
        in_keys: Keys = None,
        out_keys: Keys = None,
    ):
        super().__init__(in_keys, out_keys)
        self.w, self.h = _sizes(w, h)
        self.top = as_int("top", top, least=None, meaning="the first row of the rectangle")
        self.left = as_int("left", left, least=None, meaning="its first column")

    def _corner(self, rows: int, columns: int) -> tuple[int, int]:
        """Return where the rectangle begins in an image of this size."""
        return self.top, self.left

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        if value.ndim < 2:
            raise SpecFitError(
                f"{type(self).__name__} cuts rows and columns out of images, but the value has shape "
                f"{tuple(value.shape)}. Pass another in_keys=, or unsqueeze it first."
            )
        top, left = self._corner(*value.shape[-2:])
        inside = value[
            ..., max(top, 0) : max(top + self.w, 0), max(left, 0) : max(left + self.h, 0)
        ]
        rows, columns = inside.shape[-2:]
        above, before = min(max(-top, 0), self.w), min(max(-left, 0), self.h)
        below, behind = self.w - above - rows, self.h - before - columns
        return functional.pad(inside, (before, behind, above, below))


class CenterCrop(Crop):
    """Cut the middle out of images; a larger size puts zeros around them.

    Args:
        w: size of the last but one axis.
        h: size of the last axis; ``w`` by default.
        in_keys, out_keys: images; ``"pixels"``, in place.

    Raises:
        ArgumentError: see `Crop`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import CenterCrop
        >>> image = torch.arange(9.0).reshape(1, 3, 3)
        >>> CenterCrop(1)(TensorDict(pixels=image))["pixels"]
        tensor([[[4.]]])
    """

    computes_only = True

    def __init__(self, w: int, h: int | None = None, in_keys: Keys = None, out_keys: Keys = None):
        super().__init__(w, h, in_keys=in_keys, out_keys=out_keys)

    def _corner(self, rows: int, columns: int) -> tuple[int, int]:
        return _first_of_middle(rows, self.w), _first_of_middle(columns, self.h)


def _first_of_middle(size: int, wanted: int) -> int:
    """Return where the middle of an axis begins; an odd number of zeros around it leaves one more at the end."""
    return round((size - wanted) / 2) if wanted <= size else -((wanted - size) // 2)


def _sizes(w: int, h: int | None) -> tuple[int, int]:
    w = as_int("w", w, least=1, meaning="the rows of an image")
    return w, w if h is None else as_int("h", h, least=1, meaning="the columns of an image")


class VideoRecorder(EpisodeTransform, LeafTransform):
    """Record what an env shows; `dump` hands the video to a logger.

    One frame is kept for each step and each reset of the whole env. A batch is tiled into one frame: put
    the recorder around a batched env, not into its workers, whose recorders are out of reach. Called on
    data, every row of the batch is a frame.

    Args:
        logger: object with ``log_video(name=, video=, step=, **kwargs)``, such as a `VideoFolder` or a
            logger of TorchRL; None: `dump` returns the video.
        tag: name of the video.
        in_keys: pictures or images of three channels or a grey one, bytes or numbers from 0 to 1; ``"pixels"``.
        skip: keep every ``skip``-th frame; by default every second one of a single env, else all.
        center_crop: cut frames to this square.
        make_grid: tile a batch into one frame; True by default.
        out_keys: where the unchanged entries go; in place by default.
        fps: frames per second, passed on to the logger.
        max_frames: most frames kept; what comes later is dropped until the next `dump`.
        dump_on_done: dump when a step ends the episode (of all rows at once).
        **kwargs: more keywords for ``log_video``.

    Raises:
        ArgumentError: (a ValueError) a batch is recorded with ``make_grid=False``, or ``skip`` is below 1.
        SpecError: when specs are read: the entry is no picture.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import VideoRecorder
        >>> recorder = VideoRecorder()
        >>> frames = torch.zeros(5, 3, 8, 8, dtype=torch.uint8)
        >>> data = recorder(TensorDict(pixels=frames, batch_size=[5]))
        >>> recorder.dump().shape
        torch.Size([1, 5, 3, 8, 8])
    """

    _in_repr = ("tag",)

    _changes_with_use = ("_frames", "_seen", "_dumped")

    def __init__(
        self,
        logger: Any = None,
        tag: str | None = None,
        in_keys: Keys = None,
        skip: int | None = None,
        center_crop: int | None = None,
        make_grid: bool | None = None,
        out_keys: Keys = None,
        fps: int | None = None,
        max_frames: int | None = None,
        dump_on_done: bool = False,
        **kwargs: object,
    ):
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)
        if skip is not None:
            skip = as_int("skip", skip, least=1, meaning="1, which keeps every frame, or more")
        if max_frames is not None:
            max_frames = as_int(
                "max_frames", max_frames, least=0, meaning="the most frames to keep"
            )
        if len(self.in_keys) != 1:
            raise ArgumentError(
                f"in_keys is {self.in_keys}, but a VideoRecorder records one entry. Use one for each."
            )
        self.logger = logger
        self.tag = "video" if tag is None else tag
        self.skip = skip
        self.make_grid = None if make_grid is None else as_bool("make_grid", make_grid)
        self.max_frames = max_frames
        self.dump_on_done = as_bool("dump_on_done", dump_on_done)
        self.video_kwargs = kwargs if fps is None else {**kwargs, "fps": fps}
        self._crop = None if center_crop is None else CenterCrop(center_crop)
        self._frames: list[torch.Tensor] = []
        self._seen = self._dumped = 0

    @property
    def frames(self) -> torch.Tensor | None:
        """The frames since the last `dump`, uint8 ``(frames, 3, height, width)``; None if none."""
        return torch.stack(self._frames) if self._frames else None

    def dump(self, suffix: str | None = None, **kwargs: object) -> torch.Tensor | None:
        """Hand the video to the logger, and begin another one.

        Args:
            suffix: put behind the tag.
            **kwargs: keywords for ``log_video`` of this video, over those of the recorder.

        Returns:
            The video, ``(1, frames, 3, height, width)``; None when nothing was recorded.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import VideoFolder, VideoRecorder
            >>> recorder = VideoRecorder(VideoFolder("videos"), tag="play")
            >>> frames = torch.zeros(5, 3, 16, 16, dtype=torch.uint8)
            >>> data = recorder(TensorDict(pixels=frames, batch_size=[5]))
            >>> recorder.dump("first").shape
            torch.Size([1, 5, 3, 16, 16])
        """
        frames, self._frames, self._seen = self.frames, [], 0
        if frames is None:
            return None
        video = frames[None]
        if self.logger is not None:
            name = self.tag if suffix is None else f"{self.tag}_{suffix}"
            options = {**self.video_kwargs, **kwargs}
            self.logger.log_video(name=name, video=video, step=self._dumped, **options)
        self._dumped += 1
        return video

    # ----------------------------------------------------------------------------------- recording

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def _step(self, td: TensorDictBase, next_td: TensorDictBase) -> TensorDictBase:
        self._record(next_td, self._default_skip())
        shown = self._call(next_td)
        if self.dump_on_done and bool(self._env()._rows_done(shown).all()):
            self.dump()
        return shown

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        mask = self._reset_mask(td, as_path(self.in_keys[0])[:-1])
        if mask is None or bool(mask.all()):
            self._record(td_reset, self._default_skip())
        return self._call(td_reset)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Record every row of data."""
        for row in tensordict.reshape(-1) if tensordict.batch_dims else [tensordict]:
            self._record(row, 1)
        return self._call(tensordict)

    def _default_skip(self) -> int:
        return 1 if len(self._env().batch_size) else 2

    def _record(self, td: TensorDictBase, default_skip: int) -> None:
        value = td.get(self.in_keys[0], None)
        if value is None:
            return
        self._seen += 1
        full = self.max_frames is not None and len(self._frames) >= self.max_frames
        if self._seen % (self.skip or default_skip) or full:
            return
        images = _as_images(value.detach().cpu()).flatten(0, -4)
        if self._crop is not None:
            images = self._crop._apply_transform(images)
        if len(images) > 1 and self.make_grid is False:
            raise ArgumentError(
                f"VideoRecorder got {len(images)} images for one frame, but make_grid=False. Let it tile "
                "them, or record one env."
            )
        self._frames.append(_tiled(images))

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        if leaf.ndim < 3 or not {1, 3} & {leaf.shape[-1], leaf.shape[-3]}:
            raise SpecError(
                f"VideoRecorder records pictures with three channels or one, last or before the last two axes, "
                f"but the entry has shape {tuple(leaf.shape)}. Pass another in_keys=."
            )
        return leaf.clone()


def _as_images(value: torch.Tensor) -> torch.Tensor:
    """Return bytes with three channels before the last two axes, and one batch axis at least."""
    if value.shape[-1] == 3 or value.shape[-3] not in (1, 3):
        value = value.movedim(-1, -3)
    if value.shape[-3] == 1:
        value = value.expand(*value.shape[:-3], 3, *value.shape[-2:])
    if value.is_floating_point():
        value = value * 255
    return value.clamp(0, 255).to(torch.uint8)[None]


def _tiled(images: torch.Tensor) -> torch.Tensor:
    """Lay images ``(n, 3, height, width)`` out in a grid that is about as wide as high."""
    count, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    grid = images.new_zeros(rows * columns, channels, height, width)
    grid[:count] = images
    grid = grid.reshape(rows, columns, channels, height, width)
    return grid.permute(2, 0, 3, 1, 4).reshape(channels, rows * height, columns * width)
