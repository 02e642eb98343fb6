"""What the README and the guides print runs as printed.

Every python block stands alone.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from envkit import EnvBase
from tests import conftest
from tests.zoo.ray_cluster import begin_ray

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
COMING_FROM = sorted(DOCS.glob("from_*.md"))  # their code and ours
ON_RAY = DOCS / "distributed.md"
ELSEWHERE = (  # other tests run these
    "compiled_policies.md",
    "custom_envs.md",
    "env_features.md",
    "gpu.md",
    "gradients.md",
    "jax_envs.md",
    "navix.md",
    "populations.md",
    "sharp_bits.md",
)
GUIDES = [
    page
    for page in sorted(DOCS.glob("*.md"))
    if page not in (*COMING_FROM, ON_RAY) and page.name not in ELSEWHERE
]
BY_HAND = {
    ("torch_simulators", "mjlab"),
    ("torch_simulators", "ManiSkill3"),
    ("torch_simulators", "Isaac Lab"),
}  # make torch-sims runs the first two
LONG = {  # load the library of other environments, compile, train
    *(
        "atari",
        "brax",
        "builtin",
        "craftax",
        "dm_control",
        "dqn_sac",
        "evaluate",
        "gymnax",
        "interop",
    ),
    *("jax_libraries", "jaxmarl", "jumanji", "models", "pettingzoo", "pgx", "playground", "record"),
    *("recurrent", "xminigrid"),
}
COMPILED = (
    "The whole rollout as one program",
    "Inside the program",
    "One that runs inside programs",
    "A loop of your own",
    "Learn from a dataset",
)
JAX_ENVS = DOCS / "jax_envs.md"
WIDEST = 88  # columns that the site shows without scrolling


def blocks(document: Path) -> dict[str, str]:
    """Python blocks by the heading they stand under."""
    by_heading: dict[str, str] = {}
    text = document.read_text()
    for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        heading = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)[-1]
        assert heading not in by_heading, f"two blocks under {heading!r}"
        by_heading[heading] = match[1]
    return by_heading


ROLLOUT, TRAINING, MIXED = blocks(README).values()


def execute(code: str) -> dict:
    """Run code as a script would be run, and close what it left open."""
    names = {"__name__": "__main__"}  # so that functions travel to workers by value
    try:
        exec(compile(code, "printed", "exec"), names)
    finally:
        for env in [value for value in names.values() if isinstance(value, EnvBase)]:
            env.close(raise_if_closed=False)
    return names


def drawn_layout() -> dict[tuple[str, ...], tuple[str, list[int]]]:
    """Read the tensors that the README draws as a tree: dtype and shape by key."""
    (tree,) = re.findall(r"```text\n(.*?)```", README.read_text(), re.DOTALL)
    drawn: dict[tuple[str, ...], tuple[str, list[int]]] = {}
    for line in tree.splitlines():
        found = re.match(r"( +)?(?:├|└)── (\w+) +(\w+) \[([\d, ]+)\]", line)
        if found:
            below, name, dtype, shape = found.groups()
            key = ("next", name) if below else (name,)
            drawn[key] = (dtype, [int(size) for size in shape.split(",")])
    return drawn


def layout_of(td) -> dict[tuple[str, ...], tuple[str, list[int]]]:
    """Give dtype and shape of the entries of a rollout that the README draws."""
    shown = {}
    for key in drawn_layout():
        leaf = td[key]
        shown[key] = (str(leaf.dtype).removeprefix("torch."), list(leaf.shape))
    return shown


def is_long(guide: Path, heading: str) -> bool:
    return guide.stem in LONG or heading in COMPILED


@pytest.mark.parametrize(
    ("guide", "heading"),
    [
        pytest.param(guide, heading, marks=pytest.mark.slow if is_long(guide, heading) else ())
        for guide in GUIDES
        for heading in blocks(guide)
        if (guide.stem, heading) not in BY_HAND
    ],
)
def test_a_block_of_a_guide_runs_as_printed(guide, heading):
    execute(blocks(guide)[heading])


@pytest.mark.slow  # loads the other libraries, compiles
@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")  # of EnvPool's bounds
@pytest.mark.filterwarnings("ignore:JAXopt is no longer:DeprecationWarning")  # which Brax imports
@pytest.mark.parametrize(
    ("page", "heading"),
    [
        pytest.param(
            page,
            heading,
            id=f"{page.stem}-{heading}",
            # A training of brax.training's own: the other libraries' programs take seconds.
            marks=pytest.mark.sweep
            if (page.stem, heading) == ("from_brax_training", "Before")
            else (),
        )
        for page in COMING_FROM
        for heading in blocks(page)
    ],
)
def test_a_program_of_another_library_and_ours_run_as_printed(page, heading):
    with patch.dict(os.environ):  # EnvPool, imported bare, would leave later tests without pictures
        execute(blocks(page)[heading])


def test_each_page_has_a_program_of_another_library_and_ours():
    assert all({"Before", "After"} <= blocks(page).keys() for page in COMING_FROM)


@pytest.mark.slow  # starts Ray
@pytest.mark.timeout(400)
@pytest.mark.parametrize("heading", blocks(ON_RAY))
def test_a_block_about_ray_runs_as_printed(heading):
    begin_ray()

    execute(blocks(ON_RAY)[heading])


@pytest.mark.slow  # opens JAX in a process of its own, as its first call wants
def test_what_is_written_for_a_card_runs_without_one():
    (code,) = blocks(ROOT / "docs" / "gpu.md").values()

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_the_first_block_of_the_readme_prints_what_it_shows_in_five_lines(capsys):
    execute(ROLLOUT)

    assert len(ROLLOUT.splitlines()) == 5
    assert capsys.readouterr().out.strip() == ROLLOUT.rpartition("# ")[2].strip()


@pytest.mark.slow  # trains for a minute
@pytest.mark.timeout(600)
def test_the_training_of_the_readme_balances_for_500_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    names = execute(TRAINING)

    names["ppo"].close()
    assert len(TRAINING.splitlines()) <= 15
    assert names["result"].mean >= 475  # solved, by Gymnasium's table
    assert (tmp_path / "learning_curve.png").stat().st_size


@pytest.mark.slow
@pytest.mark.timeout(300)  # compiles inverted_pendulum unless the compile cache has it
def test_the_mixed_batch_has_one_layout_for_both_worlds():
    each = "".join(
        f"{name}_td = {name}.rollout(32, policy, break_when_any_done=False)\n"
        for name in ("brax", "gym")
    )

    names = execute(MIXED.replace("# Both as one batch", f"{each}# Both as one batch", 1))

    assert len(drawn_layout()) == 8
    assert drawn_layout() == layout_of(names["td"])
    rollouts = [names[name] for name in ("brax_td", "gym_td", "td")]
    brax, gym, both = (
        {key: (leaf.dtype, leaf.shape[2:]) for key, leaf in td.items(True, True)} for td in rollouts
    )
    assert [tuple(td.shape) for td in rollouts] == [(2048, 32), (8, 32), (2056, 32)]
    assert gym == {key: leaf for key, leaf in brax.items() if "state" not in key}
    assert gym == {key: leaf for key, leaf in both.items() if "state" not in key}
    assert names["td"]["state", "member0", "state"].keys() == names["brax_td"]["state"].keys()


@pytest.mark.slow  # compiles inverted_pendulum unless the compile cache has it
@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")  # of the wrappers' bounds
def test_both_simulators_of_the_readme_take_as_many_actions_a_second():
    names = execute(MIXED.partition("gym = ParallelEnv")[0])

    assert names["make"]()._env.unwrapped.dt == pytest.approx(float(names["brax"].dt))


def test_the_code_of_the_readme_fits_the_width_of_the_site():
    lines = [line for code in blocks(README).values() for line in code.splitlines()]

    assert max(map(len, lines)) <= WIDEST


def test_both_commands_are_on_the_first_screen_of_the_readme():
    first = README.read_text().splitlines()[:16]

    assert [line for line in first if line.startswith("make ")] == [
        line for line in README.read_text().splitlines() if re.match("make (demo|test)\\b", line)
    ]
    assert len([line for line in first if line.startswith("make ")]) == 2


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_the_code_of_a_page_fits_the_width_of_the_site(page):
    code = re.findall(r"^ *```(?:python|bash)\n(.*?)^ *```", page.read_text(), re.M | re.S)

    assert not [line for block in code for line in block.splitlines() if len(line) > WIDEST]


def test_writing_a_stateless_env_takes_at_most_15_lines():
    code = re.findall(r"```python\n(.*?)```", JAX_ENVS.read_text(), re.DOTALL)[0]
    (env,) = [node for node in ast.parse(code).body if isinstance(node, ast.ClassDef)]
    source = ast.get_source_segment(code, env)

    lines = [line for line in source.splitlines() if line.strip()]

    assert len(lines) <= 15


@pytest.mark.parametrize("document", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=str)
def test_the_links_of_the_documents_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())

    missing = [link for link in links if not (document.parent / link).exists()]

    assert not missing


def test_make_finds_all_that_each_target_of_the_makefile_needs():
    targets = re.findall(r"^# make ([\w-]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test", "docs"} <= set(targets)
    for target in targets:
        planned = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True
        )
        assert planned.returncode == 0, planned.stderr


@pytest.mark.parametrize(
    "marks", [(), ("slow",), ("more",), ("slow", "more"), ("slow", "sweep"), ("more", "sweep")]
)
def test_ci_runs_each_test_once_but_for_sweeps(marks):
    """By the expressions of the targets, one of which runs a part of them again with other instruction sets."""
    commands = re.findall("^make (?:test|slow).*", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    is_marked = {name: name in marks for name in ("slow", "more", "sweep")}

    chosen = 0
    for command in commands:
        words = [*shlex.split(command), "--dry-run"]
        planned = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        (expression,) = re.findall("pytest -m '(.*?)'", planned.stdout)
        chosen += eval(expression, {}, is_marked)

    assert chosen == (not is_marked["sweep"])


def test_of_a_test_with_many_cases_two_are_quick_and_four_run_in_ci_the_same_each_time():
    class Case:
        def __init__(self, name):
            self.nodeid, self.marks = f"tests/test_a.py::test_{name}", []
            self.add_marker = self.marks.append

        def get_closest_marker(self, name):
            return "slow" if "slow" in self.nodeid else None

    def quick(names):
        cases = [Case(name) for name in names]
        conftest.mark_further_cases(cases)
        assert Counter(map(tuple, (case.marks for case in cases if case.marks))) == {
            ("more",): 4 - 2,
            ("more", "sweep"): 40 - 4,
        }
        return {case.nodeid.partition("::test_")[2] for case in cases if not case.marks}

    many, slow = [f"many[{n}]" for n in range(40)], [f"many[slow {n}]" for n in range(40)]
    kept = quick([*slow, *many, "one", "few[0]", "few[1]"])

    assert kept > {*slow, "one", "few[0]", "few[1]"} and len(kept) == len(slow) + 2 + 1 + 2
    assert quick(["one", *reversed(many)]) == kept - {*slow, "few[0]", "few[1]"}
