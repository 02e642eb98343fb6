"""What the README prints runs as printed.

Every python block stands alone, but for those marked as going on from the first example.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from envkit import EnvBase

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()
CONTINUES = "<!-- after the first example -->\n"


def blocks() -> dict[str, str]:
    """Python blocks by the heading they stand under."""
    found: dict[str, str] = {}
    for match in re.finditer(rf"({re.escape(CONTINUES)})?```python\n(.*?)```", TEXT, re.DOTALL):
        heading = re.findall(r"^#+ (.*)$", TEXT[: match.start()], re.MULTILINE)[-1]
        continues, code = match.groups()
        if continues:
            found["envkit"] += code
        else:
            assert heading not in found, f"two blocks under {heading!r}"
            found[heading] = code
    return found


BLOCKS = blocks()


def execute(code: str) -> dict:
    """Run code as a script would be run, and close what it left open."""
    names = {"__name__": "__main__"}  # so that functions travel to workers by value
    try:
        exec(compile(code, str(README), "exec"), names)
    finally:
        for env in [value for value in names.values() if isinstance(value, EnvBase)]:
            env.close(raise_if_closed=False)
    return names


@pytest.mark.parametrize("heading", [name for name in BLOCKS if name != "envkit"])
def test_a_block_of_the_readme_runs_as_printed(heading):
    execute(BLOCKS[heading])


@pytest.mark.timeout(300)  # compiles inverted_pendulum unless the compile cache has it
@pytest.mark.filterwarnings("ignore:Brax System:UserWarning")
def test_the_first_example_gives_one_layout_for_both_worlds():
    first = BLOCKS["envkit"].replace("td   = gym", "jax_td, td = td, gym", 1)

    names = execute(first.replace("both = MixedEnv", "gym_td = td\nboth = MixedEnv", 1))

    brax, gym, both = (
        {key: (leaf.dtype, leaf.shape[2:]) for key, leaf in names[name].items(True, True)}
        for name in ("jax_td", "gym_td", "td")
    )
    shapes = [tuple(names[name].shape) for name in ("jax_td", "gym_td", "td")]
    assert shapes == [(2048, 32), (8, 32), (2056, 32)]
    assert gym == both == {key: leaf for key, leaf in brax.items() if "state" not in key}
    assert names["both"].members[0].state.shape == (2048,)


def test_the_first_screen_is_the_two_commands_and_ten_lines():
    before, example, _ = re.split(r"```python\n|```\n(?=\n`make demo` needs)", TEXT, maxsplit=2)
    imports = [line for line in example.splitlines() if line.startswith(("import", "from"))]

    assert "make demo" in before
    assert "make test" in before
    assert len(example.splitlines()) - len(imports) - 1 <= 10  # -1: the blank line


def test_writing_a_stateless_env_takes_at_most_15_lines():
    code = BLOCKS["Write your own stateless env"]
    (env,) = [node for node in ast.parse(code).body if isinstance(node, ast.ClassDef)]

    lines = [line for line in ast.get_source_segment(code, env).splitlines() if line.strip()]

    assert len(lines) <= 15


def test_the_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)

    missing = [link for link in links if not (README.parent / link).exists()]

    assert not missing
