"""The page on compiled policies runs as printed, and lists the operators there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from envkit_bridges.jax.policy.operators import TABLE

PAGE = (Path(__file__).parents[4] / "docs" / "compiled_policies.md").read_text()


@pytest.mark.slow
def test_the_page_runs_as_printed(capsys):
    names = {"__name__": "__main__"}

    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "printed", "exec"), names)

    assert "aten.linalg_eig" in capsys.readouterr().out


def test_the_page_lists_all_operators():
    listed = PAGE.partition("<!-- operators -->")[2].partition("<!-- end -->")[0]

    assert re.findall(r"`(\w+)`", listed) == sorted({name.split(".")[0] for name in TABLE})
