"""The guide to custom envs runs as printed, and prints what it shows.

The python blocks of one chapter share their names and run in order. A text block shows what the python
block before it prints.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from envkit import EnvBase

GUIDE = (Path(__file__).parent.parent / "docs" / "custom_envs.md").read_text()
CHAPTERS = {text.partition("\n")[0]: text for text in GUIDE.split("\n## ")[1:]}
COMPILED = ("A stateless env, in JAX",)
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=pytest.mark.slow if title in COMPILED else ())
        for title, text in CHAPTERS.items()
        if "```" in text
    ],
)
def test_a_chapter_runs_as_printed(title, capsys):
    torch.manual_seed(1)  # the guide shows what random actions led to
    names = {"__name__": "__main__"}  # so that functions travel to workers by value
    shown, printed = [], ""

    for kind, code in BLOCK.findall(CHAPTERS[title]):
        if kind == "text":
            shown.append((code, printed))
        else:
            exec(compile(code, "printed", "exec"), names)
            printed = capsys.readouterr().out

    for value in names.values():
        if isinstance(value, EnvBase):
            value.close(raise_if_closed=False)
    assert [text for text, _ in shown] == [printed for _, printed in shown]


def test_every_output_is_shown():
    blocks = BLOCK.findall(GUIDE)

    kinds = [kind for kind, _ in blocks]
    for index, (kind, code) in enumerate(blocks):
        if kind == "python" and "print(" in code:
            assert kinds[index + 1] == "text"
