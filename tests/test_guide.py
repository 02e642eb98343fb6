"""The pages about writing environments run as printed, and print what they show.

The python blocks of one chapter share their names and run in order. A text block shows what the python
block before it prints.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from envkit import EnvBase

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [
    DOCS / name for name in ("custom_envs.md", "env_features.md", "jax_envs.md", "sharp_bits.md")
]
CHAPTERS = {
    (page.stem, text.partition("\n")[0]): text
    for page in PAGES
    for text in page.read_text().split("\n## ")[1:]
    if "```" in text
}
COMPILED = {"jax_envs", "sharp_bits"}
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param(
            chapter, id=" ".join(chapter), marks=pytest.mark.slow if chapter[0] in COMPILED else ()
        )
        for chapter in CHAPTERS
    ],
)
def test_a_chapter_runs_as_printed(chapter, capsys):
    torch.manual_seed(1)  # the guide shows what random actions led to
    names = {"__name__": "__main__"}  # so that functions travel to workers by value
    shown, printed = [], ""

    for kind, code in BLOCK.findall(CHAPTERS[chapter]):
        if kind == "text":
            shown.append((code, printed))
        else:
            exec(compile(code, "printed", "exec"), names)
            printed = capsys.readouterr().out

    for value in names.values():
        if isinstance(value, EnvBase):
            value.close(raise_if_closed=False)
    assert [text for text, _ in shown] == [printed for _, printed in shown]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_output_is_shown(page):
    blocks = BLOCK.findall(page.read_text())

    kinds = [kind for kind, _ in blocks]
    assert "python" in kinds
    for index, (kind, code) in enumerate(blocks):
        if kind == "python" and "print(" in code:
            assert kinds[index + 1] == "text"
