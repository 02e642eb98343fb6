"""What a drawing in SVG looks like."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from envkit.errors import RenderingError
from envkit_bridges.worlds.pgx import frame_of

RED, WHITE = [255, 0, 0], [255, 255, 255]


def svg(inside, size=20):
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}">{inside}</svg>'


def test_shapes_are_drawn_on_white():
    frame = frame_of(svg('<rect x="0" y="0" width="10" height="5" fill="red"/>'))

    assert frame.shape == (20, 20, 3) and frame.dtype == np.uint8
    assert frame[2, 5].tolist() == RED
    assert frame[2, 15].tolist() == frame[10, 5].tolist() == WHITE


def test_text_is_drawn_upright_where_it_begins_within_its_group():
    text = '<text x="2" y="12" font-size="10px" fill="red">L</text>'
    frame = frame_of(svg(f'<g transform="translate(5 0)">{text}</g>'))

    ink = (frame != WHITE).any(-1)
    rows, columns = ink.any(1).nonzero()[0], ink.any(0).nonzero()[0]
    assert rows[0] >= 3 and rows[-1] <= 12
    assert columns[0] >= 7 and columns[-1] < 16
    assert ink[rows[-1]].sum() > ink[rows[0]].sum()  # the foot of an L


def test_a_drawing_inside_a_drawing_fills_its_place_and_keeps_its_form():
    inner = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4 8"><rect width="4" height="8" fill="red"/></svg>'
    data = base64.b64encode(inner.encode()).decode()
    image = (
        '<image x="10" y="0" width="8" height="8" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'xlink:href="data:image/svg+xml;base64,{data}"/>'
    )

    frame = frame_of(svg(image))

    assert frame[4, 14].tolist() == RED  # half as wide as its place, in the middle
    assert frame[4, 10].tolist() == frame[4, 17].tolist() == frame[12, 14].tolist() == WHITE


def test_letters_that_no_font_has_are_told():
    with pytest.raises(RenderingError, match=r"no font here has them\. Install one"):
        frame_of(svg('<text x="0" y="9">\U0010fffd</text>'))
