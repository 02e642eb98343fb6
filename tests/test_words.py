"""User pages are in plain English: short sentences, and the field's words.

Code, tables of figures and pages for developers are left out. A word of the list may stand where `ALLOWED` gives a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOR_DEVELOPERS = {"architecture", "benchmark_log", "decisions", "performance"}
GROWN = {
    "changelog",
    "deviations",
}  # the first is a stub, the second is one line for each difference
PAGES = [
    ROOT / "README.md",
    *(
        page
        for page in sorted((ROOT / "docs").glob("*.md"))
        if page.stem not in FOR_DEVELOPERS | GROWN
    ),
]
LONGEST = 35  # words
WORDS = {  # what not to write: what to write
    r"cards?": "GPU",
    r"cures?": "fix",
    r"anew": "again",
    r"nobody": "a sentence that says what happens",
    r"nothing": "a sentence that says what happens",
    r"whoever": "the person or program that does it",
    r"worlds?": "library",
    r"without a word|in silence": "silently",
    r"hangs on": "depends on",
    r"stands? (?:on|in|under|below|beside)": "is listed, is stored",
    r"(?:is|are) told": "is reported, is raised",
    r", say\b": "e.g.",
    r"of its own": "its own",
    r"reference API": "TorchRL",
    r"(?:the )?same bits|bit for bit": "identical",
    r"go(?:es)? on": "continues",
}
ALLOWED = {  # page and word: why
    ("craftax", "worlds"): "games of that kind are called open worlds",
    ("pgx", "card"): "a pack of cards",
    ("pgx", "cards"): "a pack of cards",
    ("xminigrid", "worlds"): "grid worlds are called so",
}


def prose(page: Path) -> Iterator[str]:
    """Give the sentences of a page, and the cells of its tables, without code and links."""
    text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"```.*?```|<!-- (\w+).*?<!-- end.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for line in text.splitlines():
        for cell in line.strip("|").split("|") if line.startswith("|") else [line]:
            yield from re.split(r"(?<=[.!?:])\s+", cell.strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_sentences_of_a_page_are_short(page):
    long = [one for one in prose(page) if len(re.findall(r"[\w'/-]+", one)) > LONGEST]

    assert not long


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_sentence_begins_with_a_clause_as_its_subject(page):
    found = [one for one in prose(page) if re.match(r"\W*(?:What|Whoever)\b", one)]

    assert not [one for one in found if not one.endswith("?") and not one.startswith(("#", "-"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_uses_the_words_of_the_field(page):
    found = {
        (match[0], advice): sentence
        for sentence in prose(page)
        for word, advice in WORDS.items()
        for match in re.finditer(rf"(?<!\w)(?:{word})\b", sentence, re.IGNORECASE)
        if (page.stem, match[0].lower()) not in ALLOWED
    }

    assert not found


def test_no_exception_is_left_over():
    used = {
        (page.stem, match[0].lower())
        for page in PAGES
        for sentence in prose(page)
        for word in WORDS
        for match in re.finditer(rf"(?<!\w)(?:{word})\b", sentence, re.IGNORECASE)
    }

    assert not ALLOWED.keys() - used
