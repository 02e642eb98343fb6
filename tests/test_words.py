"""Plain English: what `tests.words` must find it finds. `make check` runs it over all texts."""

from __future__ import annotations

import json

import pytest

from tests import words

LONG = "This sentence goes on " + "and on " * 20 + "to its end."


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("A tensor on the card.", "write GPU"),
        ("Rows of another world.", "write library"),
        ("Build it anew.", "'anew'"),
        ("The error is told at once.", "'told'"),
        ("Nobody waits for it.", "'Nobody'"),
        ("A limit, say 5 steps.", "'say'"),
        ("What it gives is kept.", "a sentence begins"),
        ("It ends. Nothing is lost.", "a sentence begins"),
        (LONG, "a sentence has 47 words"),
    ],
)
def test_a_rule_is_found_broken(text, rule):
    assert any(rule in one for one in words.broken(text))


@pytest.mark.parametrize(
    "text",
    [
        "What is a spec? It describes data.",
        "The name `anew` is code, and `brax/world` too.",
        "A learned world model.",
        "One sentence ends here. " * 20,
        "The row stands for one environment.",
    ],
)
def test_plain_text_passes(text):
    assert list(words.broken(text)) == []


@pytest.mark.parametrize("word", ["Give", "Say", "Tell", "Have"])
def test_the_first_word_of_a_docstring_names_what_a_function_does(word):
    module = f'def f():\n    """{word} the rows."""\n'

    assert [line for line, _ in words.in_python(module)] == [2]
    assert list(words.in_python(module.replace(word, "Return"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "def told(): ...",
        "async def _made(): ...",
        "def f(given): ...",
        "def f(*, known=1): ...",
        "f = lambda found: 1",
        "self._own = 1",
        "class A:\n    books: int",
        "class A:\n    made = 0",
    ],
)
def test_names_that_do_not_say_what_they_hold_are_found(line):
    assert len(list(words.in_names(line))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "def f(report): ...",
        "found = 1",
        "told_apart = lambda owner: 1",
        "f(given=self.made, known=1)",
    ],
)
def test_names_of_a_line_or_two_and_calls_of_others_are_not(line):
    assert list(words.in_names(line)) == []


def test_each_kind_of_text_in_a_module_is_read():
    module = '''
"""Docstring anew."""
# Comment anew.
def f(name):
    """Take it.

    Args:
        name: argument anew.

    Example:
        >>> f("{wide}")
    """
    raise ValueError(f"{{name}} must be given " "anew.")
'''.format(wide="x" * 90)

    found = sorted(line for line, _ in words.in_python(module))

    assert found == [2, 3, 8, 11, 13]


def test_prose_of_a_page_is_read_and_its_code_for_width_and_comments():
    page = f"""# Built anew

One line
is built anew.

| a | told | b |

```python
anew = 1
x = "{"y" * 90}"
# read anew
```

```text
{"z" * 120} anew
```
"""

    found = sorted(line for line, _ in words.in_markdown(page))

    assert found == [1, 3, 6, 10, 11]


def test_cells_of_a_notebook_are_read():
    cells = [
        {"cell_type": "markdown", "source": ["Built ", "anew."]},
        {"cell_type": "code", "source": ["%load_ext anew\n", "anew = 1  # read anew"]},
        {"cell_type": "code", "source": [f"x = '{'y' * 90}'"]},
    ]

    found = [cell for cell, _ in words.in_notebook(json.dumps({"cells": cells}))]

    assert found == [1, 2, 3]
