"""Images as a network wants them: channels first, grey, of another size.

Torch operations only. Each works on one image at a time and remembers nothing.

Conventions
    picture  shape (*lead, height, width, channels), as simulators draw.
    image    shape (*lead, channels, height, width); every transform but `ToTensorImage` takes one.
    w, h     sizes of the last but one and of the last axis of an image, in this order: the reference
             API calls the rows of an image its width.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from envkit.data.arguments import as_bool, as_int
from envkit.errors import ArgumentError, SpecError, SpecFitError
from envkit.specs import TensorSpec, Unbounded
from envkit.transforms.core.base import Keys
from envkit.transforms.core.leafwise import LeafTransform, image_of

__all__ = ["CenterCrop", "Crop", "GrayScale", "Resize", "ToTensorImage"]


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
    """

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
        image = (
            value / 255 if divides else value
        )  # of bytes in the default dtype, as in the reference
        image = image.to(torch.get_default_dtype() if self.dtype is None else self.dtype)
        return image.unsqueeze(-4) if self.unsqueeze else image

    def extra_repr(self) -> str:
        return f"from_int={self.from_int}, unsqueeze={self.unsqueeze}, {super().extra_repr()}"


class GrayScale(_ImageTransform):
    """Turn the three colours of images into one channel of brightness.

    Source: ITU-R Recommendation BT.601, luma.

    Args:
        in_keys, out_keys: images; ``"pixels"``, in place.
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
    """

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
        if interpolation not in self._SMOOTH + self._STEPPED:
            raise ArgumentError(
                f"interpolation is {interpolation!r}, but must be one of "
                f"{self._SMOOTH + self._STEPPED}."
            )
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

    def extra_repr(self) -> str:
        return f"w={self.w}, h={self.h}, {super().extra_repr()}"


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
    """

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
        """Say where the rectangle begins in an image of this size."""
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
        if (rows, columns) == (self.w, self.h):
            return inside
        first, begin = max(-top, 0), max(-left, 0)
        image = value.new_zeros(*value.shape[:-2], self.w, self.h)
        image[..., first : first + rows, begin : begin + columns] = inside
        return image

    def extra_repr(self) -> str:
        return f"w={self.w}, h={self.h}, {super().extra_repr()}"


class CenterCrop(Crop):
    """Cut the middle out of images; a larger size puts zeros around them.

    Args:
        w: size of the last but one axis.
        h: size of the last axis; ``w`` by default.
        in_keys, out_keys: images; ``"pixels"``, in place.

    Raises:
        ArgumentError: see `Crop`.
    """

    computes_only = True

    def __init__(self, w: int, h: int | None = None, in_keys: Keys = None, out_keys: Keys = None):
        super().__init__(w, h, in_keys=in_keys, out_keys=out_keys)

    def _corner(self, rows: int, columns: int) -> tuple[int, int]:
        return _first_of_middle(rows, self.w), _first_of_middle(columns, self.h)


def _first_of_middle(size: int, wanted: int) -> int:
    """Say where the middle of an axis begins; an odd number of zeros around it leaves one more at the end."""
    return round((size - wanted) / 2) if wanted <= size else -((wanted - size) // 2)


def _sizes(w: int, h: int | None) -> tuple[int, int]:
    w = as_int("w", w, least=1, meaning="the rows of an image")
    return w, w if h is None else as_int("h", h, least=1, meaning="the columns of an image")
