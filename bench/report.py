"""Hold what the benches recorded against its targets: on the terminal, as a page, README's table, tested versions and pictures.

Of each comparison on each machine the last recorded line counts, work by work: a short run that left out a peer
does not hide what was measured of it before. Nothing is measured here.

Run: ``python -m bench.report`` (``make bench`` does at its end; ``--check``, which ``make docs`` runs, says what is old); writes docs/benchmark_log.md, the table of
speeds between its markers in README.md and docs/benchmarks.md, that of tested versions in docs/install.md, and
docs/figures/scaling*.svg and ratios*.svg.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bench.targets import TARGETS, Target

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmark_log.md"
README = ROOT / "README.md"
SUMMARY = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- speeds, by python -m bench.report -->", "<!-- end of speeds -->"
INSTALL = ROOT / "docs" / "install.md"
BEGIN_TESTED, END_TESTED = (
    "<!-- tested versions, by python -m bench.report -->",
    "<!-- end of tested versions -->",
)
_TESTED = ("torch", "tensordict", "jax", "numpy", "brax", "gymnasium", "mujoco", "torchrl")
_NO_FIGURES = {
    "rounds",
    "cores",
    "seeds",
    "threads_per_core",
    "updates",
}  # numbers of a line that measure nothing
_NO_SPEEDS = {"demo", "gpu_day", "matrix", "mutate"}  # what these record is no speed
_STEPS = re.compile(r", [\d,]+ steps (a round|a batch|in one program)")


@dataclass(frozen=True)
class Figure:
    """One work of one comparison on one machine, or one number that a line records beside others."""

    bench: str
    title: str
    machine: str
    run: str  # when it was recorded, ISO 8601; works of one comparison share it
    work: str
    speed: float | None  # steps per second; None where the value is no ratio of speeds
    value: float  # the ratio to the reference, or the number
    low: float
    high: float
    reference: str | None
    whole: str = ""  # when the run of `make bench` began that recorded it; empty outside of one
    cpu: str | None = None

    @property
    def date(self) -> str:
        """The day of the run."""
        return self.run[:10]


def recorded(folder: Path = RESULTS) -> Iterator[Figure]:
    """Read every recorded figure, in the order of the lines."""
    for file in sorted(folder.glob("*.jsonl")):
        if file.stem not in _NO_SPEEDS:
            for line in file.read_text().splitlines():
                yield from _figures(file.stem, json.loads(line))


def read(folder: Path = RESULTS) -> list[Figure]:
    """Read the last figure of each work from all recorded lines, in the order of first appearance."""
    last: dict[tuple[str, ...], Figure] = {}
    for figure in recorded(folder):
        last[figure.bench, figure.title, figure.machine, figure.work] = figure
    newest = {(f.bench, f.title, f.machine): f for f in last.values()}
    for figure in last.values():
        key = (figure.bench, figure.title, figure.machine)
        newest[key] = max(newest[key], figure, key=lambda f: f.run)
    return [  # a ratio to what is the reference no longer says nothing beside the others
        figure
        for figure in last.values()
        if figure.reference == newest[figure.bench, figure.title, figure.machine].reference
    ]


def _figures(bench: str, line: dict[str, Any]) -> Iterator[Figure]:
    if "title" not in line or "rehearsal" in line:
        return
    machine = line.get("accelerator") or f"{line.get('cores')} cores"
    where = (bench, _STEPS.sub("", line["title"]), machine, line["date"])
    whole = line.get("run", ""), line.get("cpu")
    for row in line.get("works", line.get("rows", [])):
        name = row.get("work") or row["env"]
        if "ratio" in row:
            spread = row.get("ratio_low", row["ratio"]), row.get("ratio_high", row["ratio"])
            reference = line.get("reference", "")
            speed = row.get("steps_per_s")
            yield Figure(*where, name, speed, row["ratio"], *spread, reference, *whole)
        else:
            yield from _numbers(where, row, f"{name}: ")
    yield from _numbers(where, line, "")


def _numbers(
    where: tuple[str, str, str, str], row: dict[str, Any], prefix: str
) -> Iterator[Figure]:
    for name, number in row.items():
        if isinstance(number, dict) and name != "versions":
            yield from _numbers(where, number, f"{prefix}{name}: ")
        if isinstance(number, bool) or name in _NO_FIGURES:
            continue
        if isinstance(number, int | float):
            yield Figure(*where, prefix + name, None, number, number, number, None)


@dataclass(frozen=True)
class Judged:
    """A target and what was measured of it on one machine."""

    target: Target
    title: str
    machine: str
    value: float
    low: float
    high: float

    @property
    def met(self) -> bool:
        """Say whether the value reaches the target."""
        value, least = self.value, self.target.bound == "least"
        return value >= self.target.value if least else value <= self.target.value


def judge(figures: list[Figure]) -> list[Judged]:
    """Hold figures against the targets; a target that nobody measured gives none."""
    return [
        Judged(target, figure.title, figure.machine, *_measured(target, figure, figures))
        for target in TARGETS
        for figure in figures
        if (figure.bench, figure.work) == (target.bench, target.work)
        and fnmatchcase(figure.title, target.title)
        and (not target.over or _rivals(target, figure, figures))
    ]


def _measured(target: Target, figure: Figure, figures: list[Figure]) -> tuple[float, float, float]:
    if target.over:
        rival = max(_rivals(target, figure, figures), key=lambda other: other.value)
        return figure.value / rival.value, figure.low / rival.high, figure.high / rival.low
    if target.rows:
        assert figure.speed is not None
        step_us = target.rows / figure.speed * 1e6  # the reference takes ratio times as long
        value, high, low = (step_us * (1 - r) for r in (figure.value, figure.low, figure.high))
        return value, low, high
    return figure.value, figure.low, figure.high


def _rivals(target: Target, figure: Figure, figures: list[Figure]) -> list[Figure]:
    same = (figure.bench, figure.title, figure.machine)
    return [f for f in figures if (f.bench, f.title, f.machine) == same and f.work in target.over]


def number(value: float) -> str:
    """Write a number in two decimals, or what there is of it."""
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.2f}"
        if abs(value) >= 0.01
        else f"{value:.2g}"
    )


def speed(value: float) -> str:
    """Write steps per second in thousands or millions."""
    if value >= 1e6:
        return f"{value / 1e6:.1f} M"
    return f"{value / 1e3:.1f} k" if value < 2e4 else f"{value / 1e3:.0f} k"


def _wanted(target: Target) -> str:
    unit = " µs a step more" if target.rows else " x" if target.over else ""
    return f"{'≥' if target.bound == 'least' else '≤'} {target.value:g}{unit}"


def _against(target: Target) -> str:
    return f" against {' or '.join(target.over)}" if target.over else ""


def page(figures: list[Figure]) -> str:
    """Write docs/benchmark_log.md."""
    judged = judge(figures)
    missed = sum(not one.met for one in judged)
    parts = [
        "---\nnosearch: true\n---\n",
        "# Benchmark log\n",
        "<!-- Written by `python -m bench.report` from bench/results: do not edit. -->\n",
        "This page lists the last recorded figure of each work on each kind of machine. "
        "[Performance](benchmarks.md) is the short version.\n",
        "A ratio is a speed divided by that of the reference, measured in turns in the same run. "
        "The value is the median over rounds; the spread is its lowest and highest round. "
        "Compare ratios, not seconds: the machines are shared, and machines with the same number of cores may differ.\n",
        "`make bench` measures again, adds lines to `bench/results/` and writes this page. "
        "The lines there hold the versions of the libraries and all older figures.\n",
        "## Targets\n",
        f"{len(judged) - missed} of {len(judged)} are met. A work that was measured on several kinds of machine has a line for each. "
        "[Performance notes](performance.md) say why the others miss, and what was tried.\n",
        "| | work | machine | target | measured | spread |\n| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {'met' if one.met else '**missed**'} | {one.title}: {one.target.work}{_against(one.target)} | {one.machine} | "
            f"{_wanted(one.target)} | {number(one.value)} | {_spread(one.low, one.high)} |"
            for one in judged
        ),
        *(
            f"| not measured | {target.title}: {target.work}{_against(target)} | | {_wanted(target)} | | |"
            for target in _unmeasured(judged)
        ),
    ]
    for bench in dict.fromkeys(figure.bench for figure in figures):
        parts += ["", f"## bench.{bench}\n", _purpose(bench) + "\n", *_tables(bench, figures)]
    return "\n".join(parts).rstrip() + "\n"


def _unmeasured(judged: list[Judged]) -> list[Target]:
    return [target for target in TARGETS if not any(one.target == target for one in judged)]


def _spread(low: float, high: float) -> str:
    return "" if low == high else f"{number(low)} to {number(high)}"


def _purpose(bench: str) -> str:
    source = (ROOT / "bench" / f"{bench}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].replace("\n", " ")


def _tables(bench: str, figures: list[Figure]) -> Iterator[str]:
    of_bench = [figure for figure in figures if figure.bench == bench]
    speeds = [figure for figure in of_bench if figure.speed is not None]
    others = [figure for figure in of_bench if figure.speed is None]
    if speeds:
        yield "| comparison | work | steps/s | ratio | spread | machine | date |\n| --- | --- | --- | --- | --- | --- | --- |"
        yield from _rows(speeds)
    if speeds and others:
        yield ""
    if others:
        yield "| what | | value | machine | date |\n| --- | --- | --- | --- | --- |"
        yield from _rows(others)


def _rows(figures: list[Figure]) -> Iterator[str]:
    seen = None
    groups = list(dict.fromkeys((f.title, f.machine) for f in figures))
    for f in sorted(figures, key=lambda f: groups.index((f.title, f.machine))):
        title = "" if (f.title, f.machine) == seen else f.title
        seen = (f.title, f.machine)
        if f.speed is None:
            yield f"| {title} | {f.work} | {number(f.value)} | {f.machine} | {f.date} |"
        else:
            ratio = "reference" if f.work == f.reference else number(f.value)
            spread = _spread(f.low, f.high)
            yield f"| {title} | {f.work} | {speed(f.speed)} | {ratio} | {spread} | {f.machine} | {f.date} |"


# Rows of README's table: label, bench, title; then works of the simulator alone, envkit, gymnasium, TorchRL, envkit with
# `compile_policy` where a module acts in the work of envkit.
_README_ROWS = (
    ("CartPole × 32 in worker processes, a policy acts", "gym_pool", "CartPole-v1 x 32",
     "bare loop, one process", "envkit ParallelEnv", "gymnasium AsyncVectorEnv", "TorchRL ParallelEnv",
     "envkit ParallelEnv, compile_policy"),
    ("CartPole × 32 in this process", "gym_pool", "CartPole-v1 x 32",
     "bare loop, one process", "envkit SerialEnv", "gymnasium SyncVectorEnv", "TorchRL SerialEnv", ""),
    ("CartPole, one env", "gym_pool", "one CartPole-v1, a policy acts",
     "bare loop", "envkit GymEnv", "", "TorchRL GymEnv", "envkit GymEnv, compile_policy"),
    ("HalfCheetah × 8, 2 worker processes", "gym_pool", "HalfCheetah-v5 x 8",
     "bare loop, one process", "envkit ParallelEnv", "gymnasium AsyncVectorEnv", "TorchRL ParallelEnv",
     "envkit ParallelEnv, compile_policy"),
    ("2 collectors × 16 CartPole, policy in the workers", "collect", "2 workers x 16 CartPole-v1, policy in the workers",
     "bare loops", "MultiSyncDataCollector", "", "TorchRL's MultiSyncCollector", "the same, compile_policy"),
    ("8 CartPoles, asynchronous, in processes", "async_pool", "8 CartPoles, min_get=8, multiprocessing",
     "", "envkit", "", "TorchRL, dense", ""),
    ("Brax inverted_pendulum × 64, step by step", "brax_step", "inverted_pendulum spring x 64 on cpu, torch policy",
     "bare jit + dlpack loop", "envkit stepwise", "", "TorchRL, cache kept", ""),
    ("Brax inverted_pendulum × 4096, step by step", "brax_step", "inverted_pendulum spring x 4096 on cpu, torch policy",
     "bare jit + dlpack loop", "envkit stepwise", "", "", ""),
    ("Brax ant × 64, step by step", "brax_step", "ant spring x 64 on cpu, torch policy",
     "bare jit + dlpack loop", "envkit stepwise", "", "TorchRL, cache kept", ""),
    ("ant × 64 as one program, `compile_policy`", "brax_scan", "ant spring x 64 on cpu, a small network acts",
     "bare lax.scan", "envkit unroll, compile_policy", "", "", ""),
    ("inverted_pendulum × 4096 as one program", "brax_scan", "inverted_pendulum spring x 4096 on cpu, a small network acts",
     "bare lax.scan", "envkit unroll, compile_policy", "", "", ""),
    ("gymnax CartPole × 4096 as one program", "worlds", "gymnax CartPole x4096, random actions",
     "bare lax.scan", "envkit unroll", "", "", ""),
    ("gradient of 10 steps of ant × 64", "gradient", "gradient of 10 steps, ant spring x 64 on cpu",
     "fused JAX value_and_grad", "envkit stepwise", "", "TorchRL, cache kept", ""),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table of speeds."""

    label: str
    cells: tuple[Figure | None, ...]  # the simulator alone, envkit, gymnasium, TorchRL, compiled
    ours: Figure


def rows_of_table(figures: list[Figure]) -> list[Row]:
    """Choose the figures of the table of speeds: those of the last run of `make bench`, without a GPU, that measured every row.

    A cell is None where that run did not measure it.

    Raises:
        SystemExit: no run measured every row.
    """
    runs: dict[tuple[str, str], dict[tuple[str, str, str], Figure]] = {}
    for figure in figures:
        if figure.whole and figure.machine.endswith(" cores"):
            of_run = runs.setdefault((figure.whole, figure.machine), {})
            of_run[figure.bench, figure.title, figure.work] = figure
    for _, of_run in sorted(runs.items(), reverse=True):
        rows = []
        for label, bench, title, *works in _README_ROWS:
            cells = tuple(of_run.get((bench, title, work)) for work in works)
            if ours := cells[1]:
                rows.append(Row(label, cells, ours))
        if len(rows) == len(_README_ROWS):
            return rows
    raise SystemExit(
        "No recorded run measured every row of README's table: run make bench, or change _README_ROWS."
    )


def table(figures: list[Figure]) -> str:
    """Write the table of speeds, and below it the run that it shows."""
    rows = rows_of_table(figures)
    lines = [
        "| steps per second | bare simulator | envkit | envkit, `compile_policy` | gymnasium | TorchRL | target of envkit |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        bare, acting, *peers, compiled = map(_cell, row.cells)
        cells = [bare, acting, compiled, *peers, _aim(row.ours)]
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    ours = rows[0].ours
    cpu = f" ({ours.cpu})" if ours.cpu else ""
    lines += ["", f"Measured on {ours.whole[:10]} with {ours.machine}{cpu}."]
    return "\n".join([*lines, *_beside_busy(figures)])


def _beside_busy(figures: list[Figure]) -> list[str]:
    """Write, from the last line of `bench.busy`, what a pool reaches beside a busy process, and the load besides."""
    title = "ParallelEnv, CartPole x 32, beside 1 more busy processes"
    of_bench = [figure for figure in figures if figure.bench == "busy"]
    rule = [f for f in of_bench if (f.title, f.work) == (title, "the rule")]
    load = [f for f in of_bench if (f.title, f.work) == (f"before {title}", "load")]
    if not (rule and load):
        return []
    besides = f" under a load of {load[-1].value:.0f}," if load[-1].value >= 1 else ""
    return [
        "",
        f"Beside a busy process,{besides} CartPole × 32 in worker processes is {rule[-1].value:.1f} times as fast as with "
        f"torch's default threads ({rule[-1].machine}, {rule[-1].date}).",
    ]


def _aim(figure: Figure) -> str:
    """Write the least ratio that a work is to reach, and whether this run of it does."""
    one = next((one for one in judge([figure]) if not one.target.rows), None)
    return f"{_wanted(one.target)} {'met' if one.met else '**missed**'}" if one else ""


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    assert figure.speed is not None
    ours = figure.reference is None or figure.reference.startswith("envkit")
    shows_ratio = figure.work != figure.reference and not ours
    return speed(figure.speed) + (f" ({number(figure.value)})" if shows_ratio else "")


def with_table(readme: str, folder: Path = RESULTS) -> str:
    """Put the table of what was recorded between the markers of a page."""
    return _between(readme, BEGIN, table(list(recorded(folder))), END)


def with_tested(install: str, folder: Path = RESULTS) -> str:
    """Put the table of versions that the core suite ran with between the markers of docs/install.md."""
    return _between(install, BEGIN_TESTED, versions_table(folder), END_TESTED)


def _between(text: str, begin: str, body: str, end: str) -> str:
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not (first and last):
        raise SystemExit(
            f"A page lacks the markers {begin} and {end}: add them where the table goes."
        )
    return f"{before}{begin}\n{body}\n{end}{after}"


def versions_table(folder: Path = RESULTS) -> str:
    """Write the table of versions: a column for the last line of each minor version of Python and way to choose libraries."""
    file = folder / "matrix.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    last: dict[tuple[tuple[int, ...], str], dict[str, Any]] = {}
    for line in lines:
        minor = tuple(int(part) for part in line["python"].split(".")[:2])
        last[minor, line["versions_are"]] = line
    counts = ("passed", "failed", "skipped")
    columns = [["versions", "Python", *_TESTED, *counts, "tested on"]]
    for _, line in sorted(last.items()):
        versions = [line["versions"].get(library, "").partition("+")[0] for library in _TESTED]
        kept = [str(line[count]) for count in counts]
        columns.append([line["versions_are"], line["python"], *versions, *kept, line["date"][:10]])
    first, *rows = zip(*columns, strict=True)
    return "\n".join(f"| {' | '.join(row)} |" for row in (first, ["---"] * len(first), *rows))


def tell(judged: list[Judged]) -> None:
    """Print each target with its ratio and spread, and mark what misses."""
    for one in judged:
        mark = "      " if one.met else "MISSED"
        print(f"{mark} {number(one.value):>7s} {_wanted(one.target):24s} {_spread(one.low, one.high):16s} "
              f"{one.title}: {one.target.work}{_against(one.target)} [{one.machine}]")  # fmt: skip
    for target in _unmeasured(judged):
        print(f"not measured     {_wanted(target):24s} {'':16s} {target.title}: {target.work}")


def written(folder: Path = RESULTS) -> dict[Path, str]:
    """Write each page that shows recorded lines, by its file."""
    pages = {PAGE: page(read(folder))}
    pages |= {shown: with_table(shown.read_text(), folder) for shown in (README, SUMMARY)}
    pages[INSTALL] = with_tested(INSTALL.read_text(), folder)
    return pages


def stale() -> list[str]:
    """List the pages that no longer show what was recorded last."""
    return [file.name for file, text in written().items() if file.read_text() != text]


def main() -> None:
    """Renew all that is made of recorded lines, and print how targets stand; with ``--check`` only say what is old."""
    if sys.argv[1:] == ["--check"]:
        if old := stale():
            raise SystemExit(f"{', '.join(old)}: run python -m bench.report, which writes them.")
        return
    from bench import figures

    figures_read = read()
    tell(judge(figures_read))
    for file, text in written().items():
        file.write_text(text)
    figures.draw(figures_read, rows_of_table(list(recorded())))


if __name__ == "__main__":
    main()
