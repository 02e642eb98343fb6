"""Draw recorded figures: steps per second against batch size, and ratios to the bare simulator.

Each picture is drawn twice, with dark and with light lines on a transparent ground: the site shows the one that suits its mode.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.report import Figure, Row

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
_TITLE = re.compile(r"(\w+) spring x (\d+) on \w+, against batch size")
_MODES = {"": ("0.15", "0.45"), "_dark": ("0.85", "0.6")}  # colour of text, and of the simulator
_WIDTH = 4.4  # inches: a page on a window of 400 pixels shows it at 0.87 of its size
_COLOURS = {"envkit": "#2a87d0", "TorchRL": "#d9534f", "gymnasium": "#c98a00"}


def draw(figures: list[Figure], rows: list[Row]) -> None:
    """Write docs/figures/scaling.svg and ratios.svg, and both for dark pages.

    ``figures`` are the last of each work: of them, the machine with most batch sizes is drawn. ``rows`` are the lines of the table of speeds.
    """
    lines = [
        (figure, title_match)
        for figure in figures
        if figure.bench == "scaling" and (title_match := _TITLE.fullmatch(figure.title))
    ]
    machines = [figure.machine for figure, _ in lines]
    machine = max(dict.fromkeys(machines), key=machines.count)
    by_work: dict[str, dict[int, Figure]] = {}
    for figure, title_match in lines:
        if figure.machine == machine:
            by_work.setdefault(figure.work, {})[int(title_match[2])] = figure
    title = f"Brax {lines[0][1][1]} (spring), {machine}"
    for mode, (text, bare) in _MODES.items():
        _draw_speeds(by_work, title, mode, text, bare)
        _draw_ratios(rows, mode, text, bare)


def _axes(title: str, height: float, text: str) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure as Sheet

    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(dict.fromkeys(names, text)):
        sheet = Sheet(figsize=(_WIDTH, height), layout="constrained")
        axes = sheet.subplots()
        axes.set_title(title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    return sheet, axes


def _save(sheet: Any, name: str) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "envkit"}):  # equal figures give equal files
        sheet.savefig(FOLDER / f"{name}.svg", transparent=True, metadata={"Date": None})


def _draw_speeds(
    by_work: dict[str, dict[int, Figure]], title: str, mode: str, text: str, bare: str
) -> None:
    sheet, axes = _axes(title, 4.8, text)
    for work, line in by_work.items():
        rows = sorted(line)
        axes.plot(
            rows,
            [line[size].speed or 0.0 for size in rows],
            label=work,
            color=_COLOURS.get(work.split()[0], bare),
            linestyle="-" if "scan" in work or "unroll" in work else "--",
            marker="o" if work.startswith("envkit") else "",
            markersize=4,
        )
    sizes = sorted({size for line in by_work.values() for size in line})
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="environment steps per second")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    sheet.legend(
        loc="outside lower center",
        frameon=False,
        fontsize=9.5,
        labelcolor=text,
        title="solid: one program, dashed: step by step",
        title_fontsize=9.5,
        ncols=2,
    ).get_title().set_color(text)
    _save(sheet, f"scaling{mode}")


def _draw_ratios(rows: list[Row], mode: str, text: str, bare: str) -> None:
    """Draw a line for each row that has a bare simulator: a dot for each library, a bar for its spread over rounds."""
    sheet, axes = _axes("Speed relative to the bare simulator,\n2 CPU cores", 6.4, text)
    shown = [row for row in rows if row.cells[0] is not None][::-1]
    for place, name in ((1, "envkit"), (2, "gymnasium"), (3, "TorchRL")):
        points = [(y, one) for y, row in enumerate(shown) if (one := row.cells[place])]
        values = [one.value for _, one in points]
        spread = [
            [one.value - one.low for _, one in points],
            [one.high - one.value for _, one in points],
        ]
        axes.errorbar(
            values,
            [y for y, _ in points],
            xerr=spread,
            fmt="o",
            markersize=5,
            elinewidth=1,
            color=_COLOURS[name],
            label=name,
        )
    axes.axvline(1.0, color=bare, linewidth=1, linestyle="--")
    axes.set(xscale="log", xlabel="1 is the bare simulator")
    axes.set_xlim(left=0.01)
    axes.set_xticks([0.01, 0.1, 0.5, 1, 2], ["0.01", "0.1", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.set_yticks([])
    axes.set_ylim(-0.5, len(shown))
    for y, row in enumerate(shown):
        label = row.label.replace("`", "")
        place = axes.get_yaxis_transform()
        axes.text(0.01, y + 0.3, label, fontsize=9.5, color=text, transform=place, va="center")
    axes.grid(alpha=0.3, axis="x")
    sheet.legend(frameon=False, fontsize=9.5, labelcolor=text, loc="outside lower center", ncols=3)
    _save(sheet, f"ratios{mode}")
