"""The pages on compiled policies and populations run as printed, and the first lists the operators there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from envkit_bridges.jax.policy.operators import TABLE

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "compiled_policies.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "printed"), [("compiled_policies", "aten.linalg_eig"), ("populations", "tensor([")]
)
def test_the_page_runs_as_printed(page, printed, capsys):
    names = {"__name__": "__main__"}

    text = (DOCS / f"{page}.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "printed", "exec"), names)

    assert printed in capsys.readouterr().out


def test_the_page_lists_all_operators():
    listed = PAGE.partition("<!-- operators -->")[2].partition("<!-- end -->")[0]

    assert re.findall(r"`(\w+)`", listed) == sorted({name.split(".")[0] for name in TABLE})
