"""Run the README's first example on a machine that has compiled nothing, and say where the time goes.

Run: ``python -m bench.cold``

Each statement of it is timed, and each program that JAX compiles for it. CPU seconds (of all threads of this
process, its workers left out) hold on a busy machine too.
"""

from __future__ import annotations

import ast
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
LEAST_S = 0.1  # what took less is not printed


def main() -> None:
    """Print a line for each statement and, below it, for each kind of work on a program."""
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found, "the README has no example"
    source, spent = found[1], Counter()
    scope: dict[str, Any] = {"__name__": "example"}
    began = time.perf_counter()
    for statement in ast.parse(source).body:
        wall, cpu = time.perf_counter(), time.process_time()
        exec(compile(ast.Module([statement], []), "README.md", "exec"), scope)
        text = (ast.get_source_segment(source, statement) or "").partition("\n")[0]
        show(text[:76], time.perf_counter() - wall, time.process_time() - cpu)
        for (program, work), seconds in spent.items():
            show(f"    {work} {program}", seconds)
        spent.clear()
        if "brax" in text and not spent:
            listen(spent)
    show("all of it", time.perf_counter() - began, time.process_time())
    scope["gym"].close()


def show(what: str, wall_s: float, cpu_s: float | None = None) -> None:
    """Print a line of the table."""
    if wall_s >= LEAST_S:
        print(f"{what:80}{wall_s:7.1f} s" + ("" if cpu_s is None else f"{cpu_s:7.1f} s CPU"))


def listen(spent: Counter[tuple[str, str]]) -> None:
    """Add up what JAX says of the time it takes, by program and kind of work."""
    import jax

    def heard(event: str, duration_s: float, **about: object) -> None:
        if event.startswith("/jax/core/compile/"):
            work = event.rsplit("/", 1)[1].removesuffix("_duration")
            spent[str(about.get("fun_name", "?")), work] += duration_s

    jax.monitoring.register_event_duration_secs_listener(heard)


if __name__ == "__main__":
    main()
