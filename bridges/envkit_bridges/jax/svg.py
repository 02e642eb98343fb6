"""An SVG drawing as an array of pixels.

pygame draws the shapes of an SVG file, and neither letters nor pictures inside it. So letters become outlines, drawn
with matplotlib's fonts, and drawings inside a drawing become a part of it, before pygame sees it. A drawing that shows
a PNG picture is that picture.

Conventions
    element  of the XML tree, attributes by name.
    frame    uint8 (H, W, 3), on white.
"""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from typing import Any
from xml.etree import ElementTree

import numpy as np

from envkit.errors import RenderingError
from envkit_bridges.libraries import quietly, require
from envkit_bridges.offscreen import be_silent

__all__ = ["frame_of"]

_HREF = "{http://www.w3.org/1999/xlink}href"
_FONT = "DejaVu Sans Mono"  # comes with matplotlib
_BOXES = frozenset(
    ("Last Resort", "Last Resort High-Efficiency")
)  # fonts with a box for every letter
_LEAST = 240  # pixels of a side of a PNG picture, whose own are cells


def frame_of(drawing: str) -> np.ndarray:
    """Draw an SVG text.

    Args:
        drawing: shapes, text, and drawings and PNG pictures as ``data:`` URIs.

    Returns:
        uint8 (H, W, 3), of the size that the drawing says.

    Raises:
        MissingLibraryError: (an ImportError) pygame or matplotlib is not installed.
        RenderingError: (a RuntimeError) no font here has one of its letters.

    Example:
        >>> from envkit_bridges.jax.svg import frame_of
        >>> dot = '<circle cx="4" cy="4" r="3" fill="red"/>'
        >>> svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8">{dot}</svg>'
        >>> frame_of(svg)[4, 4].tolist()
        [255, 0, 0]
    """
    root = _tree_of(drawing)
    for parent in list(root.iter()):
        for place, child in enumerate(list(parent)):
            if child.tag == "text":
                parent[place] = _outlined(child)
            elif child.tag == "image":
                kind, _, data = child.attrib[_HREF].partition("base64,")
                if "svg" not in kind:
                    return _enlarged(_pixels(base64.b64decode(data), "picture.png"))
                parent[place] = _inlined(child, base64.b64decode(data))
    return _pixels(ElementTree.tostring(root), "drawing.svg")


def _tree_of(drawing: str | bytes) -> ElementTree.Element:
    """Read an SVG file; pygame knows tags without a namespace only."""
    root = ElementTree.fromstring(drawing)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def _pixels(file: bytes, name: str) -> np.ndarray:
    be_silent()
    with quietly():
        pygame: Any = require("pygame")
    drawn = pygame.image.load(io.BytesIO(file), name)
    page = pygame.Surface(drawn.get_size())
    page.fill("white")
    page.blit(drawn, (0, 0))
    return pygame.surfarray.array3d(page).swapaxes(0, 1).copy()


def _enlarged(cells: np.ndarray) -> np.ndarray:
    times = -(-_LEAST // min(cells.shape[:2]))
    return cells.repeat(times, 0).repeat(times, 1)


def _inlined(image: ElementTree.Element, file: bytes) -> ElementTree.Element:
    """Give a drawing inside a drawing as a group of shapes, as large as there is room for, in the middle."""
    inner = _tree_of(file)
    sizes = inner.attrib.get("viewBox", f"0 0 {inner.get('width')} {inner.get('height')}").split()
    left, top, width, height = map(float, sizes)
    x, y, wide, high = (_number(image.get(name, "0")) for name in ("x", "y", "width", "height"))
    scale = min(wide / width, high / height)
    x, y = x + (wide - scale * width) / 2, y + (high - scale * height) / 2
    own = {key: value for key, value in inner.attrib.items() if key in ("fill", "stroke", "style")}
    place = f"translate({x - scale * left} {y - scale * top}) scale({scale})"
    group = ElementTree.Element("g", {**own, "transform": place})
    group.extend(list(inner))
    return group


def _outlined(text: ElementTree.Element) -> ElementTree.Element:
    """Give a line of text as one shape."""
    letters = text.text or ""
    size = _number(text.get("font-size", "16"))
    outline: Any = require("matplotlib.textpath").TextPath(
        (0, 0), letters, size, prop=_font(letters)
    )
    steps = "".join(
        f"{'MLQC'[min(code, 4) - 1] if code < 5 else 'Z'}{' '.join(map(str, points)) if code < 5 else ''}"
        for points, code in outline.iter_segments(simplify=False)
    )
    x, y = (_number(text.get(name, "0")) for name in ("x", "y"))
    shown = {key: value for key, value in text.attrib.items() if key in ("fill", "style")}
    place = f"{text.get('transform', '')} translate({x} {y}) scale(1 -1)".strip()
    return ElementTree.Element("path", {**shown, "d": steps, "transform": place})


def _number(text: str) -> float:
    return float(text.removesuffix("px"))


@lru_cache
def _font(letters: str) -> Any:
    """Find a font that has these letters, matplotlib's own first."""
    manager: Any = require("matplotlib.font_manager")
    own = manager.findfont(_FONT)
    others = (font.fname for font in manager.fontManager.ttflist if font.name not in _BOXES)
    for file in (own, *others):
        known = manager.get_font(file).get_charmap()
        if all(ord(letter) in known for letter in letters):
            return manager.FontProperties(fname=file)
    raise RenderingError(
        f"the drawing has the letters {letters!r}, and no font here has them. Install one that does, for Chinese and "
        "Japanese letters e.g. Noto Sans CJK (Debian, Ubuntu: apt-get install fonts-noto-cjk)."
    )
