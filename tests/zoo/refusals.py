"""Tables of refusals: one row is a name, a call that must fail, the class of its error, and words of the message.

Every message also has to say how to fix the mistake, in words that a user knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from envkit.errors import EnvkitError

FIX = re.compile(
    r"(?:^|\n|[.:;,] (?:or |and )?|or )(?:Pass|Call|Use|Leave|Give|Name|Set|Put|Add|Choose|Build|Make|Reset|Return|Write|Say|Wrap"
    r"|Take|Keep|Assign|Append|Record|Copy|Exchange|Expand|Enumerate|Stack|Turn|Convert|Receive|Send|Start|Let|Correct"
    r"|Allocate|Delete|Bring|Declare|Step|Render|Sample|Index|Select|Reshape|Mark|Allow|Repeat|End|Edit|Unlock|Cast|Have|Hand|Draw"
    r"|Did you mean|pass|call|put|choose|leave|say|use|take|keep)\b"
    r"|must be (?:one of|'\w+' or|'\w+', )|There are: |spec\.project|shows what it takes|TransformedEnv\(env"
)
# Masks and hooks that a user writes have an underscore; all else with one, modules and files are our own.
PRIVATE = re.compile(
    r"(?<![\w.'\"])_(?!reset\b|step\b|set_seed\b|make_specs\b)[a-z]\w+|envkit_bridges|\.py\b|\.md\b"
    r"|\benvkit\.(batched|collectors|data|env|specs|transforms|transport|functional|arrays|evaluation|cli)\b"
)


def each_row(table: list[tuple[str, Callable[[], Any], Any, str]]) -> pytest.MarkDecorator:
    """Parametrise a test over a table; each row is a question of its own, so that all are quick."""
    cases = [pytest.param(*row, id=name, marks=pytest.mark.row) for name, *row in table]
    return pytest.mark.parametrize(("call", "error", "words"), cases)


def assert_refused(call: Callable[[], Any], error: Any, words: str) -> None:
    """Check the class and the words of a refusal, and that it says how to fix the mistake."""
    with pytest.raises(error, match=f"(?s){words}") as caught:
        call()

    assert isinstance(caught.value, EnvkitError)
    # A worker's traceback is for the author of the environment.
    message = str(caught.value).partition("\n  Traceback")[0]
    assert FIX.search(message), message
    assert not PRIVATE.search(message), message
