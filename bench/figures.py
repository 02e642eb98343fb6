"""Draw what `bench.scaling` recorded: steps per second against batch size, and what one step costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.report import Figure

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
_TITLE = re.compile(r"(\w+) spring x (\d+) on \w+, against batch size")
_COLOURS = {"bare": "0.45", "envkit": "C0", "TorchRL": "C3"}


def draw(figures: list[Figure]) -> None:
    """Write docs/figures/scaling.png and costs.png; the machine with most batch sizes is drawn."""
    lines = [
        (figure, found)
        for figure in figures
        if figure.bench == "scaling" and (found := _TITLE.fullmatch(figure.title))
    ]
    machines = [figure.machine for figure, _ in lines]
    machine = max(dict.fromkeys(machines), key=machines.count)
    by_work: dict[str, dict[int, Figure]] = {}
    for figure, found in lines:
        if figure.machine == machine:
            by_work.setdefault(figure.work, {})[int(found[2])] = figure
    title = f"Brax {lines[0][1][1]} (spring), {machine}"
    _draw_speeds(by_work, title)
    _draw_costs(by_work, title)


def _axes(title: str, height: float):
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=(6.4, height), dpi=130, layout="constrained")
    axes = sheet.subplots()
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return sheet, axes


def _draw_speeds(by_work: dict[str, dict[int, Figure]], title: str) -> None:
    sheet, axes = _axes(title, 4.2)
    for work, line in by_work.items():
        rows = sorted(line)
        axes.plot(
            rows,
            [line[size].speed or 0.0 for size in rows],
            label=work,
            color=_COLOURS[work.split()[0]],
            linestyle="-" if "scan" in work or "unroll" in work else "--",
            marker="o" if work.startswith("envkit") else "",
            markersize=4,
        )
    sizes = sorted({size for line in by_work.values() for size in line})
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="environment steps per second")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(
        frameon=False,
        fontsize=8,
        title="solid: one program, dashed: step by step",
        title_fontsize=8,
    )
    sheet.savefig(FOLDER / "scaling.png", metadata={"Software": None})


def _draw_costs(by_work: dict[str, dict[int, Figure]], title: str) -> None:
    """Stack shares of envkit's step; what comes out below nothing is noise, and drawn as nothing."""
    scan, loop, ours = (
        by_work[name] for name in ("bare lax.scan", "bare jit + dlpack loop", "envkit stepwise")
    )
    sizes = sorted(set(scan) & set(loop) & set(ours))
    step_us = {size: size / speed * 1e6 for size in sizes if (speed := ours[size].speed)}
    simulator = [min(ours[size].value, 1.0) for size in sizes]  # ratios are those to the scan
    bare = [min(ours[size].value / loop[size].value, 1.0) for size in sizes]
    parts = {
        "simulator (lax.scan)": simulator,
        "hand-off (bare jit + dlpack loop)": [max(b - s, 0.0) for b, s in zip(bare, simulator, strict=True)],
        "Python (envkit)": [1 - max(b, s) for b, s in zip(bare, simulator, strict=True)],
    }  # fmt: skip
    sheet, axes = _axes(f"What a step costs: {title}", 3.6)
    bottom = [0.0] * len(sizes)
    for (name, shares), colour in zip(parts.items(), ("0.6", "C1", "C0"), strict=True):
        axes.bar(range(len(sizes)), shares, bottom=bottom, width=0.7, label=name, color=colour)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axes.set(
        ylabel="share of one envkit step", ylim=(0, 1), xlabel="batch size (one step of the batch)"
    )
    labels = [f"{size:,}\n{step_us[size] / 1e3:.1f} ms" for size in sizes]
    axes.set_xticks(range(len(sizes)), labels)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.08))
    sheet.savefig(FOLDER / "costs.png", metadata={"Software": None})
