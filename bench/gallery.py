"""Draw the picture of docs/worlds.md: one frame of an environment of each library that can draw.

Each library draws the frame itself, after some random steps.

Run: ``make gallery``, or ``python -m bench.gallery [--out FILE]``; needs the extras ``worlds`` and ``navix``
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envkit import EnvBase, make

FILE = Path(__file__).parents[1] / "docs" / "figures" / "gallery.png"
COLUMNS, WIDTH = (
    4,
    1280,
)  # pixels; the text can be read where the page shows the picture 400 pixels wide
GAP, LABEL = 12, 44
PAPER, INK = "white", "#22303c"


@dataclass(frozen=True)
class Tile:
    """One frame.

    Attributes:
        library: what is written above it.
        env: id of the environment.
        steps: random steps before it is drawn.
        options: keywords of `make`.
        drawn: keywords of the renderer.
        pixels: the frame is this entry of the data; "" asks the environment to draw.
        seed: of the environment.
    """

    library: str
    env: str
    steps: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    drawn: dict[str, Any] = field(default_factory=dict)
    pixels: str = ""
    seed: int = 0


_LARGE = {"height": 480, "width": 480}
_ON_CPU = {"num_envs": 1, "device": "cpu"}
TILES = (
    Tile("Gymnasium", "gym/Ant-v5", 20, {"render_mode": "rgb_array", **_LARGE}),
    Tile("DeepMind Control", "dm_control/cheetah/run", 20, {"render_kwargs": _LARGE}),
    Tile("Brax", "brax/inverted_pendulum", 10, {**_ON_CPU, "backend": "spring"}, _LARGE),
    Tile("MuJoCo Playground", "playground/CartpoleBalance", 10, _ON_CPU, _LARGE),
    Tile("gymnax", "gymnax/Breakout-MinAtar", 12, _ON_CPU),
    Tile("Jumanji", "jumanji/PacMan-v1", 5, _ON_CPU),
    Tile("pgx", "pgx/chess", 24, _ON_CPU),
    Tile("pgx", "pgx/go_9x9", 40, _ON_CPU),
    Tile("pgx", "pgx/connect_four", 20, _ON_CPU),
    Tile(
        "Craftax",
        "craftax/Craftax-Classic-Symbolic-v1",
        0,
        _ON_CPU,
        {"block_pixel_size": 64},
    ),
    Tile("XLand-MiniGrid", "xminigrid/XLand-MiniGrid-R4-13x13", 0, _ON_CPU),
    Tile("Navix", "navix/Navix-DoorKey-8x8-v0", 0, _ON_CPU),
    Tile("JaxMARL", "jaxmarl/storm", 3, _ON_CPU),
    Tile("JaxMARL", "jaxmarl/MPE_simple_tag_v3", 10, _ON_CPU),
    Tile("PettingZoo", "pettingzoo/butterfly/pistonball_v6", 40, {"render_mode": "rgb_array"}),
    Tile("built-in", "envkit/Chess", 24, {"pixels": True}, pixels="pixels"),
)


def frame_of(tile: Tile) -> np.ndarray:
    """Step an environment and let its library draw it; uint8 (H, W, 3)."""
    torch.manual_seed(tile.seed)
    env: EnvBase = make(tile.env, seed=tile.seed, **tile.options)
    try:
        td: Any = env.reset()
        for _ in range(tile.steps):
            _, td = env.step_and_maybe_reset(env.rand_action(td))
        if tile.pixels:
            shown = td[tile.pixels].movedim(0, -1)
        else:
            drawing: Any = env
            shown = drawing.render(td, **tile.drawn) if "state" in td.keys() else drawing.render()
    finally:
        env.close()
    return np.asarray(shown)


def draw(frames: list[tuple[str, np.ndarray]], file: Path) -> None:
    """Write frames with the names of their libraries above them into one PNG."""
    import matplotlib
    from PIL import Image, ImageChops, ImageDraw, ImageFont

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(fonts / "DejaVuSans.ttf", 28)
    side = (WIDTH - GAP * (COLUMNS + 1)) // COLUMNS
    rows = -(-len(frames) // COLUMNS)
    sheet = Image.new("RGB", (WIDTH, rows * (LABEL + side + GAP) + GAP), PAPER)
    pen = ImageDraw.Draw(sheet)
    for place, (label, frame) in enumerate(frames):
        row, column = divmod(place, COLUMNS)
        left, top = GAP + column * (side + GAP), GAP + row * (LABEL + side + GAP)
        pen.text((left + side / 2, top + LABEL / 2), label, INK, font, anchor="mm")
        picture = Image.fromarray(frame)
        margins = ImageChops.invert(picture).getbbox()  # white ones are left out
        picture = picture.crop(margins)
        scale = side / max(picture.size)
        size = (round(picture.width * scale), round(picture.height * scale))
        # cells of a grid keep their edges where a small picture grows
        kind = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
        at = (left + (side - size[0]) // 2, top + LABEL + (side - size[1]) // 2)
        sheet.paste(picture.resize(size, kind), at)
    sheet.save(file, optimize=True)
    print(f"{file}: {sheet.size}, {file.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    """Draw all frames."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE, help="a PNG; default: that of the docs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    draw([(tile.library, frame_of(tile)) for tile in TILES], given.out)


if __name__ == "__main__":
    main()
