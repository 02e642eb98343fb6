"""The rules of plain English that a program can check, for all text that people read.

``python -m tests.words`` prints what breaks a rule. It reads README, the pages for users, the notebooks, and the
docstrings, comments and texts of the code. Names are read in all code, tests and benchmarks included.

Conventions
    piece    text that is one paragraph, list item, table cell or message; code in it counts as one word.
    finding  path, line (of a notebook: cell) and a sentence that says which rule is broken.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
LONGEST_SENTENCE = 35
WIDEST_CODE = 88
FOR_DEVELOPERS = {"architecture", "benchmark_log", "decisions", "performance", "changelog"}


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def _patterns(table: dict[str, str], whole: str) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(whole.format(key), re.IGNORECASE), value) for key, value in table.items()]


INSTEAD = _patterns(WORDS["instead"], r"(?<![\w./-])(?:{})(?![\w-])")
IN_PAGES = INSTEAD + _patterns(WORDS["in_pages"], r"(?<![\w./-])(?:{})(?![\w-])")
ALLOWED = _patterns(WORDS["allowed"], r"(?<!\w)(?:{})(?!\w)")
OPENING = [(re.compile(rf"(?:{key})\b"), value) for key, value in WORDS["opening"].items()]
CODE_SPAN = re.compile(r"(`+)(?:.|\n)*?\1")
IS_CODE = re.compile(r"^\s*(?:import|from) \w+", re.MULTILINE)
ENTRY = re.compile(
    r"^\s*(?:\*{0,2}[\w.\[\](), `*/\"']{1,60}:(?:\s|$)|[-*] |\d+\. |\w[^.]{0,30}\S {2,}\S|$)"
)


def plain(text: str) -> str:
    """Return ``text`` with each span of code, link and role as one word."""
    text = re.sub(r":\w+:(?=`)", "", text)
    text = CODE_SPAN.sub("x", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()


def sentences(text: str) -> list[str]:
    return [
        part
        for part in re.split(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]?[A-Zx\d]|[\"'][a-z]|envkit)", text)
        if part
    ]


def broken(text: str, words: list[tuple[re.Pattern[str], str]] = INSTEAD) -> Iterator[str]:
    """Yield which rules a piece breaks, in words."""
    read = plain(text)
    for pattern, _ in ALLOWED:
        read = pattern.sub("x", read)
    for pattern, better in words:
        for found in pattern.finditer(read):
            around = read[max(0, found.start() - 40) : found.end() + 30]
            yield f"{found.group().strip(', ')!r} in {around!r}: write {better}"
    for sentence in sentences(read):
        for pattern, better in OPENING:
            if pattern.match(sentence):
                yield f"a sentence begins {sentence[:50]!r}: {better}"
        if (count := len(re.findall(r"[A-Za-z\d][^\s]*", sentence))) > LONGEST_SENTENCE:
            yield f"a sentence has {count} words, at most {LONGEST_SENTENCE}: {sentence[:60]!r}"


def _wide(code: str, line: int) -> Iterator[tuple[int, str]]:
    for offset, text in enumerate(code.splitlines()):
        if len(text) > WIDEST_CODE:
            yield (
                line + offset,
                f"code has {len(text)} columns, at most {WIDEST_CODE}: {text[:50]!r}",
            )


def in_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of all that breaks a rule in a page."""
    for fence in re.finditer(
        r"^( *)(```+)(\{?[\w-]*\}?)[^\n]*\n(.*?)^\1\2", source, re.DOTALL | re.MULTILINE
    ):
        first = source.count("\n", 0, fence.start(4)) + 1
        if fence[3] in ("python", "bash", "toml", "{code-cell}"):
            yield from _wide(fence[4], first)
        if fence[3] == "python":
            yield from ((first + line - 1, one) for line, one in _in_comments(fence[4]))
    prose = re.sub(
        r"\A---\n.*?\n---\n|^( *)(```+).*?^\1\2|<!-- (\w+).*?<!-- end.*?-->|<!--.*?-->|^\+\+\+.*?$",
        lambda match: "\n" * match.group().count("\n"),
        source,
        flags=re.DOTALL | re.MULTILINE,
    )
    for line, piece in _pieces(prose, 1, re.compile(r"^\s*(?:[-*] |\d+\. |#+ |\||>|$)")):
        is_table = piece.lstrip().startswith("|")
        for cell in re.split(r"(?<!\\)\|", CODE_SPAN.sub("`x`", piece)) if is_table else [piece]:
            read = re.sub(r"^\s*([-*]|>) ", "", cell)
            heading = read.startswith("#")  # which may begin with a question word
            found = broken(read.lstrip("# "), IN_PAGES)
            yield from ((line, one) for one in found if not (heading and "begins" in one))


def _pieces(text: str, line: int, starts: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph or entry; ``starts`` matches a line that begins one."""
    first, held = line, list[str]()
    for number, row in enumerate(text.split("\n"), line):
        if starts.match(row) and held:
            yield first, "\n".join(held)
            held = []
        if row.strip():
            first = number if not held else first
            held.append(row)
    if held:
        yield first, "\n".join(held)


def in_docstring(text: str, line: int) -> Iterator[tuple[int, str]]:
    rows, code = text.split("\n"), None
    for index, row in enumerate(rows):
        depth = len(row) - len(row.lstrip())
        if code is not None and row.strip() and depth <= code:
            code = None
        if row.lstrip().startswith(">>> "):
            code = depth - 1
        if code is not None:
            yield from _wide(row.strip(), line + index)
            rows[index] = ""
        elif row.rstrip().endswith("::"):
            code = depth
    for first, piece in _pieces("\n".join(rows), line, ENTRY):
        entry = re.sub(
            r"^\s*(?:\*{0,2}[\w.\[\](), `*/\"']{1,60}:\s|[-*] |\d+\. |\w[^.\n]{0,30}\S {2,})",
            "",
            piece,
        )
        for text in broken(entry):
            yield first, text


def _said(node: ast.expr) -> str | None:
    """Return the text of a string, with each value in it as one word; None for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(p.value if isinstance(p, ast.Constant) else "x" for p in parts)  # pyright: ignore
        case ast.BinOp(left=left, op=ast.Add(), right=right) if (a := _said(left)) and (
            b := _said(right)
        ):
            return a + b
    return None


def in_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of all that breaks a rule in a module's docstrings, texts and comments."""
    documents = set[int]()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "-").split()[0]
            if first in WORDS["functions"]:
                better = WORDS["functions"][first]
                yield node.body[0].lineno, f"a docstring begins {first!r}: write {better}"
        for child in (
            getattr(node, "body", None) or []
            if not isinstance(node, ast.Lambda | ast.IfExp)
            else []
        ):
            match child:
                case ast.Expr(value=ast.Constant(value=str(text)) as value):
                    documents.add(id(value))
                    yield from in_docstring(text, child.lineno)
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        text = _said(node) if isinstance(node, ast.expr) else None
        if text is None:
            waiting += ast.iter_child_nodes(node)
        elif id(node) not in documents and text.count(" ") >= 3 and not IS_CODE.search(text):
            yield from ((node.lineno, found) for found in broken(text))  # pyright: ignore
    yield from _in_comments(source)


def in_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each function, parameter and attribute whose name does not say what it holds."""
    for node in ast.walk(ast.parse(source)):
        for name in _names_in(node):
            if (better := WORDS["names"].get(name.strip("_"))) is not None:
                yield node.lineno, f"{name!r} in a name: write {better}"  # pyright: ignore


def _names_in(node: ast.AST) -> list[str]:
    """Return the name of a function, parameter or attribute, and those that a class assigns."""
    match node:
        case (
            ast.FunctionDef(name=name)
            | ast.AsyncFunctionDef(name=name)
            | ast.arg(arg=name)
            | ast.Attribute(attr=name, ctx=ast.Store())
            | ast.AnnAssign(target=ast.Name(id=name))
        ):
            return [name]
        case ast.ClassDef(body=body):
            return [
                target.id
                for statement in body
                if isinstance(statement, ast.Assign)
                for target in statement.targets
                if isinstance(target, ast.Name)
            ]
    return []


def _in_comments(source: str) -> Iterator[tuple[int, str]]:
    last, first, held = -1, 0, list[str]()
    for token in [
        t
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    ]:
        if held and (token.start[0] != last + 1 or token.line.strip() != token.string):
            yield from ((first, text) for text in broken(" ".join(held)))
            held = []
        if not held:
            first = token.start[0]
        last = token.start[0]
        held.append(token.string.lstrip("# "))
    if held:
        yield from ((first, text) for text in broken(" ".join(held)))


def in_notebook(source: str) -> Iterator[tuple[int, str]]:
    """Yield the number of the cell and the text of all that breaks a rule in a notebook."""
    for number, cell in enumerate(json.loads(source)["cells"], 1):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            found = in_markdown(text)
        else:
            found = (*_wide(text, 1), *in_python(re.sub(r"^%.*$", "", text, flags=re.MULTILINE)))
        yield from ((number, one) for _, one in found)


READERS = {".md": in_markdown, ".ipynb": in_notebook, ".py": in_python, ".pyi": in_python}


def _code(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py*") if path.suffix in (".py", ".pyi")]


def findings(root: Path = ROOT) -> list[Finding]:
    """Return all that breaks a rule in the repository at ``root``, in order of path and line."""
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *root.glob("notebooks/*.ipynb")]
    modules = [*_code(root / "envkit"), *_code(root / "bridges")]
    names = [*modules, *_code(root / "tests"), *_code(root / "bench")]
    problems = []
    reads = [(path, READERS[path.suffix]) for path in pages + modules]
    for path, read in [*reads, *((path, in_names) for path in names)]:
        if path.parent.name == "docs" and path.stem in FOR_DEVELOPERS:
            continue
        name = str(path.relative_to(root))
        exempt = [
            re.compile(f"'({word})' in ", re.I)
            for at, words in WORDS["exempt"].items()
            if name.startswith(at)
            for word in words
        ]
        problems += [
            Finding(name, *one)
            for one in read(path.read_text())
            if not any(e.match(one[1]) for e in exempt)
        ]
    return sorted(set(problems), key=lambda one: (one.path, one.line, one.text))


def main() -> int:
    """Print what breaks a rule; return 1 if there is any."""
    found = findings()
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
