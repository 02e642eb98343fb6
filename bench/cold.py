"""First calls where nothing is compiled, and where all of it lies on disk, and where the time goes.

Run: ``python -m bench.cold [--first]``

Without ``--first``, each statement of the README's mixed batch is timed, and each program that JAX compiles
for it. With it, a rollout and a first step of Brax's envs in new processes, without and with `envkit.cache_dir`.
CPU seconds (of all threads of this process, its workers left out) hold on a busy machine too.

Conventions
    traced    seconds in which Python is turned into a program, which no cache saves.
    compiled  seconds in which XLA compiles, or reads from the disk.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.harness import record

README = Path(__file__).parents[1] / "README.md"
LEAST_S = 0.1  # what took less is not printed


def main() -> None:
    """Time the README's example, or first rollouts and steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", action="store_true", help="first rollouts and steps")
    if parser.parse_args().first:
        measure_first_calls()
    else:
        run_readme()


_FIRST = """
    import json, sys, time
    times = {}
    def done(name, began):
        times[name] = round(time.perf_counter() - began, 2)
    began = time.perf_counter()
    import envkit, jax
    from envkit import BraxEnv
    done("imports_s", began)
    name, call, *folder = sys.argv[1:]
    if folder:
        envkit.cache_dir(folder[0])
    spent = {"jaxpr_trace": 0.0, "jaxpr_to_mlir_module": 0.0, "backend_compile": 0.0}
    programs = []
    def heard(event, seconds, **about):
        kind = event.rsplit("/", 1)[1].removesuffix("_duration")
        if kind in spent:
            spent[kind] += seconds
            if kind == "backend_compile" and seconds > 0.1:
                programs.append(str(about.get("fun_name", "?")))
    jax.monitoring.register_event_duration_secs_listener(heard)
    began = time.perf_counter()
    env = BraxEnv(name, backend="spring", batch_size=[64], device="cpu")
    done("construction_s", began)
    spent.update(dict.fromkeys(spent, 0.0))
    began, worked = time.perf_counter(), time.process_time()
    env.rollout(10, break_when_any_done=False) if call == "rollout" else env.rand_step(env.reset())
    done("call_s", began)
    times["call_cpu_s"] = round(time.process_time() - worked, 2)
    times["traced_s"] = round(spent["jaxpr_trace"] + spent["jaxpr_to_mlir_module"], 2)
    times["compiled_s"] = round(spent["backend_compile"], 2)
    print(json.dumps({**times, "programs": programs}))
"""
# Env, call, and whether programs lie on disk.
_CALLS = (
    ("inverted_pendulum", "rollout", False),
    ("inverted_pendulum", "rollout", True),
    ("ant", "rollout", False),
    ("ant", "rollout", True),
    ("ant", "step", True),
)


def measure_first_calls() -> None:
    """Time first rollouts and steps, each in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}

    def first(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-c", textwrap.dedent(_FIRST), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return json.loads(done.stdout.splitlines()[-1])

    with tempfile.TemporaryDirectory() as folder:
        for name, call, is_kept in _CALLS:
            if is_kept:
                first(name, call, folder)
            result = first(name, call, *([folder] if is_kept else []))
            how = "with" if is_kept else "without"
            title = f"first {call} of {name} spring x 64 in a new process, {how} the cache"
            print(f"{title}: {result}", flush=True)
            record(title, result)


def run_readme() -> None:
    """Print a line for each statement and, below it, for each kind of work on a program."""
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (source,) = (block for block in blocks if "MixedEnv" in block)
    spent: defaultdict[tuple[str, str], float] = defaultdict(float)
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


def listen(spent: dict[tuple[str, str], float]) -> None:
    """Add up what JAX says of the time it takes, by program and kind of work."""
    import jax

    def heard(event: str, duration_secs: float, **about: object) -> None:
        if event.startswith("/jax/core/compile/"):
            work = event.rsplit("/", 1)[1].removesuffix("_duration")
            spent[str(about.get("fun_name", "?")), work] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(heard)


if __name__ == "__main__":
    main()
