"""The site: every public name has a page, quoted errors exist, figures are those that were recorded, and it builds."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import envkit
from bench import report
from envkit_bridges.catalogue.ids import own_worlds

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def names_on(page: Path) -> list[str]:
    """List the names that a page of the reference has pages made of."""
    listed = re.findall(r":toctree: generated\n\n((?:   \w+\n)+)", page.read_text())
    return [name for block in listed for name in block.split()]


def test_every_public_name_is_in_the_reference_once():
    listed = [name for page in (DOCS / "reference").glob("*.md") for name in names_on(page)]

    assert sorted(listed) == sorted(envkit._HOME_OF)


def test_every_page_is_in_the_contents():
    blocks = [
        block
        for page in DOCS.glob("*.md")
        for block in re.findall(r"^```\{toctree\}(.*?)^```", page.read_text(), re.M | re.S)
    ]
    listed = [word for block in blocks for word in block.split()]

    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert not pages - set(listed), (
        "name them in a toctree of docs/index.md or of the page they belong to"
    )
    assert not [name for name in pages if listed.count(name) > 1]


def test_pages_for_developers_are_not_searched():
    below = re.search(r"```\{toctree\}(.*?)```", (DOCS / "contributing.md").read_text(), re.S)
    assert below

    pages = [DOCS / f"{name}.md" for name in below[1].split() if not name.startswith(":")]

    assert pages
    assert not [page for page in pages if not page.read_text().startswith("---\nnosearch: true")]


def test_every_library_is_in_the_overview_with_its_kind():
    page = (DOCS / "worlds.md").read_text()

    shown = re.findall(r"^\| `(\w+)` \| \[.+\| (\w+) \|$", page, re.M)

    assert sorted(shown) == sorted((name, world.kind) for name, world in own_worlds().items())


def test_decisions_are_numbered_in_the_order_of_their_dates():
    titles = re.findall(r"^## (.*)$", (DOCS / "decisions.md").read_text(), re.M)
    numbered = [re.fullmatch(r"(\d+)\. .+ \((\d{4}-\d\d-\d\d)\)", title) for title in titles]

    old = [match for match in numbered if match]
    new = titles[len(old) :]
    assert [int(match[1]) for match in old] == list(range(1, len(old) + 1)), (
        "only new entries have no number"
    )
    assert [match[2] for match in old] == sorted(match[2] for match in old)
    assert all(re.search(r"\d{4}-\d\d-\d\d", title) for title in new)


def messages() -> list[str]:
    """List all texts of the source, with a mark where an f-string puts something in."""
    texts_found = []
    for package in ("envkit", "bridges/envkit_bridges"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts = [part.value if isinstance(part, ast.Constant) else "\0" for part in parts]
                if any(isinstance(text, str) and text != "\0" for text in texts):
                    texts_found.append("".join(map(str, texts)))
    return texts_found


def test_quoted_messages_are_raised_somewhere():
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    texts = messages()

    unknown = []
    for message in quoted:
        pattern = re.compile(
            ".*\0.*".join(re.escape(part.strip()) for part in message.split("..."))
        )
        if not any(pattern.search(text) for text in texts):
            unknown.append(message)

    assert len(quoted) == page.count("\n### ") >= 20
    assert not unknown


def test_the_benchmarks_are_those_that_were_recorded_last():
    assert not report.stale(), "python -m bench.report"


def test_a_page_that_shows_older_lines_is_named(monkeypatch):
    monkeypatch.setattr(report, "table", lambda figures: "other lines")
    monkeypatch.setattr(sys, "argv", ["report", "--check"])

    with pytest.raises(
        SystemExit, match=r"README\.md, benchmarks\.md: run python -m bench\.report"
    ):
        report.main()


def test_a_figure_of_a_short_run_does_not_hide_what_it_left_out(tmp_path):
    line = '{{"title": "work, {steps} steps a round", "date": "2026-01-0{day}", "accelerator": null, "cores": 2, "reference": "bare", "works": [{works}]}}\n'
    work = (
        '{{"work": "{0}", "steps_per_s": {1}, "ratio": {2}, "ratio_low": 0.1, "ratio_high": 2.0}}'
    )
    long = ", ".join(
        work.format(*row) for row in (("bare", 10, 1.0), ("ours", 8, 0.8), ("peer", 1, 0.1))
    )
    short = ", ".join(work.format(*row) for row in (("bare", 12, 1.0), ("ours", 11, 0.9)))
    (tmp_path / "gym_pool.jsonl").write_text(
        line.format(steps=100, day=1, works=long) + line.format(steps=20, day=2, works=short)
    )

    found = {figure.work: (figure.value, figure.date) for figure in report.read(tmp_path)}

    assert found == {
        "bare": (1.0, "2026-01-02"),
        "ours": (0.9, "2026-01-02"),
        "peer": (0.1, "2026-01-01"),
    }


def measured(whole: str, **ratios: float) -> list[report.Figure]:
    """Give the figures of a comparison that one run of `make bench` recorded: works with their ratios."""
    return [
        report.Figure(
            "gym_pool",
            "CartPole-v1 x 32",
            "2 cores",
            whole,
            work,
            1e6 * ratio,
            ratio,
            0.1,
            2.0,
            "bare",
            whole,
            "some CPU",
        )
        for work, ratio in ratios.items()
    ]


def test_the_table_of_speeds_shows_the_last_run_that_measured_every_row(monkeypatch):
    rows = [
        ("first", "gym_pool", "CartPole-v1 x 32", "bare", "ours", "", "peer", "compiled"),
        ("second", "gym_pool", "CartPole-v1 x 32", "bare", "others", "", "", ""),
    ]
    monkeypatch.setattr(report, "_README_ROWS", rows)
    whole = measured("2026-01-01T10", bare=1.0, ours=2.0, others=3.0, compiled=4.0)
    newer = measured("2026-01-02T10", bare=4.0, ours=5.0, peer=6.0)
    alone = measured("", bare=4.0, ours=5.0, others=6.0)

    assert report.table(whole + newer + alone).splitlines()[2:] == [
        "| first | 1.0 M | 2.0 M (2.00) | 4.0 M (4.00) |  |  |  |",
        "| second | 1.0 M | 3.0 M (3.00) |  |  |  |  |",
        "",
        "Measured on 2026-01-01 with 2 cores (some CPU).",
    ]
    with pytest.raises(SystemExit, match="run make bench"):
        report.table(newer + alone)


def test_below_the_table_is_what_a_pool_reaches_beside_a_busy_process(tmp_path, monkeypatch):
    row = ("label", "gym_pool", "CartPole-v1 x 32", "bare", "ours", "", "", "")
    monkeypatch.setattr(report, "_README_ROWS", (row,))
    title = '"title": "{0}ParallelEnv, CartPole x 32, beside 1 more busy processes"'
    line = f'{{{{{title}, "date": "2026-01-03", "cores": 2, {{1}}}}}}\n'
    works = '"works": [{"work": "the rule", "steps_per_s": 9, "ratio": 7.04}]'
    recorded = line.format("", works) + line.format("before ", '"load": 21.7')
    (tmp_path / "busy.jsonl").write_text(recorded)

    table = report.table(measured("2026-01-01", ours=1.0) + report.read(tmp_path))

    assert table.endswith(
        "Beside a busy process, under a load of 22, CartPole × 32 in worker processes is 7.0 times as fast as with "
        "torch's default threads (2 cores, 2026-01-03)."
    )


def test_a_row_of_the_readme_says_that_its_run_missed_the_target(monkeypatch):
    row = ("label", "gym_pool", "CartPole-v1 x 32", "bare", "envkit ParallelEnv", "", "", "")
    monkeypatch.setattr(report, "_README_ROWS", (row,))

    assert "| ≥ 0.8 **missed** |" in report.table(
        measured("2026-01-01", **{"envkit ParallelEnv": 0.79})
    )
    assert "| ≥ 0.8 met |" in report.table(measured("2026-01-01", **{"envkit ParallelEnv": 0.81}))


def test_lines_that_compare_nothing_give_their_numbers(tmp_path):
    (tmp_path / "new.jsonl").write_text(
        '{"title": "start", "date": "2026-01-01", "accelerator": "H100", "rounds": 5, "first_s": 2.5, "all": [1], "ok": true}\n'
        '{"title": "calls", "date": "2026-01-01", "cores": 2, "rows": [{"env": "GymEnv", "calls": 38}], "us": {"ours": 4}}\n'
        '{"seed": 3}\n'
    )

    found = [(one.machine, one.title, one.work, one.value) for one in report.read(tmp_path)]

    assert found == [
        ("H100", "start", "first_s", 2.5),
        ("2 cores", "calls", "GymEnv: calls", 38),
        ("2 cores", "calls", "us: ours", 4),
    ]


def test_a_target_that_is_missed_is_said_to_be():
    figures = [
        report.Figure(
            "gym_pool",
            "CartPole-v1 x 32",
            machine,
            "",
            "envkit ParallelEnv",
            1e5,
            ratio,
            0.5,
            1.0,
            "bare",
        )
        for machine, ratio in (("2 cores", 0.79), ("64 cores", 0.81))
    ]

    assert [one.met for one in report.judge(figures)] == [False, True]


def pages_of(site: Path, name: str) -> str:
    """Read the page of a public name."""
    return (site / "reference" / "generated" / f"{name}.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "builder",
    # "dummy" reads all pages and follows all references; most time goes to the pages' navigation
    ["dummy", pytest.param("html", marks=pytest.mark.sweep)],
)
def test_the_site_builds_without_a_warning(builder, tmp_path):
    command = [sys.executable, "-m", "sphinx", "-b", builder, "-q", "-W", "--keep-going", "docs"]

    done = subprocess.run(
        [*command, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=880,
    )

    assert done.returncode == 0, done.stderr
    if builder == "dummy":
        return
    pages = {page.stem for page in (tmp_path / "reference" / "generated").glob("*.html")}
    assert {f"envkit.{name}" for name in envkit._HOME_OF} <= pages
    assert (tmp_path / "tutorials" / "01_first_rollouts.html").exists()
    page = pages_of(tmp_path, "envkit.EnvBase")
    assert (
        "docs.pytorch.org/tensordict/stable/reference/generated/tensordict.TensorDictBase" in page
    )
    page = pages_of(tmp_path, "envkit.StepCounter")
    assert "Where truncation is written: one flag beside each" in page
    hook = "step_leaves"
    assert f"envkit.FusableTransform.{hook}" in pages_of(tmp_path, "envkit.FusableTransform")
    assert f"envkit.StepCounter.{hook}" not in pages_of(tmp_path, "envkit.StepCounter")
    # numbers, units and ratios of tables stay on one line
    assert re.search(r"\d\u00a0k\u00a0\(\d", (tmp_path / "index.html").read_text())
    found = (tmp_path / "searchindex.js").read_text()
    assert "Step or reset a part" in found
    assert "A fork server of our own" not in found  # a title of docs/decisions.md
