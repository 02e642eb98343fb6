"""Count what a warm step, or a run, calls: Python functions of envkit's own, and how often control changes module.

It also counts how much code there is: modules, and lines that are neither docstring nor comment nor blank.

Counts do not depend on how busy a machine is, so they may be compared across commits. What a worker
process does for a step is not counted. How often a parent looks for its workers' answers depends on when
they come: the least of some steps counts.

Conventions
    calls      calls of Python functions defined in ``envkit`` or ``envkit_bridges``, per step, or per run of `unroll`, however long.
    functions  different ones among them.
    modules    files that they live in: what a reader who follows the step has open.
    changes    calls whose function lives in another module than its nearest caller of envkit's own.
    module changes
               how often a reader who follows the step turns to another module: into the first one, and
               for each of ``changes`` there and back.
    code lines lines of the two packages that hold a token of a statement other than a bare string.

Run: ``python -m bench.calls``
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import torch

from bench.harness import record
from envkit import (
    BraxEnv,
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    InitTracker,
    JaxPolicy,
    MixedEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    compile_policy,
)

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("envkit", "bridges/envkit_bridges")
_OWN = tuple(f"{_ROOT / package}/" for package in _PACKAGES)
_WARM_STEPS, _COUNTED_STEPS = 3, 20


@dataclass(frozen=True)
class Counted:
    """What one warm step, or run, of an env calls."""

    env: str
    calls: int
    functions: int
    modules: int
    changes: int

    @property
    def module_changes(self) -> int:
        """Module changes of one who reads along, see Conventions."""
        return 2 * self.changes + 1


@dataclass(frozen=True)
class Size:
    """How much code the packages hold."""

    modules: int
    code_lines: int


_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Count the lines of a source that are neither docstring nor comment nor blank.

    A docstring is any statement that is a bare string, so one below an attribute is one too.
    """
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    written: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            written.update(range(token.start[0], token.end[0] + 1))
    return len(written - documented)


def measure(*packages: str) -> Size:
    """Count the modules, package faces included, and the code lines of folders given from the root."""
    files = [file for package in packages for file in (_ROOT / package).rglob("*.py")]
    return Size(len(files), sum(code_lines(file.read_text()) for file in files))


def count(name: str, work: Callable[[], Any]) -> Counted:
    """Run ``work`` once and count the calls of envkit's own functions in it."""
    calls = 0
    changes = 0
    functions: set[CodeType] = set()
    running: list[str] = []  # modules of the own functions that are running, innermost last

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, changes
        file = frame.f_code.co_filename
        if not file.startswith(_OWN):
            return
        if event == "call":
            calls += 1
            functions.add(frame.f_code)
            changes += bool(running) and running[-1] != file
            running.append(file)
        elif event == "return":
            running.pop()

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    modules = {code.co_filename for code in functions}
    return Counted(name, calls, len(functions), len(modules), changes)


def count_step(name: str, env: EnvBase) -> list[Counted]:
    """Count one `step`, and one `step_and_maybe_reset`, of an env that has taken a few steps already."""
    counted: list[Counted] = []
    env.set_seed(0)
    td = env.reset()
    with env:
        for method in (env.step, env.step_and_maybe_reset):
            tried: list[Counted] = []
            for _ in range(_WARM_STEPS + _COUNTED_STEPS):
                td = env.rand_action(td)
                tried.append(count(f"{name}.{method.__name__}", partial(method, td)))
                td = env.maybe_reset(env.step_mdp(td))
            counted.append(min(tried[_WARM_STEPS:], key=lambda one: one.calls))
    return counted


def count_run(name: str, policy: Any) -> Counted:
    """Count one `unroll` of an env that has made some like it."""
    env = BraxEnv("fast", batch_size=[64], device="cpu")
    env.set_seed(0)
    root = env.reset()
    for _ in range(_WARM_STEPS):
        _, root = env.unroll(root, 3, policy)
    return count(name, lambda: env.unroll(root, 3, policy))


def act(params: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
    """Act by one layer, in JAX."""
    return observation @ params


def runs() -> dict[str, Any]:
    """Give what acts in a run, by name."""
    return {
        "unroll, random actions": None,
        "unroll, JaxPolicy": JaxPolicy(act, jnp.zeros((2, 1))),
        "unroll, compile_policy": compile_policy(
            torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        ),
    }


def make_cartpole() -> EnvBase:
    """One CartPole, as every pool here holds."""
    return GymEnv("CartPole-v1")


def mixed() -> EnvBase:
    """Two pools as one batch."""
    return MixedEnv([SerialEnv(2, make_cartpole), SerialEnv(2, make_cartpole)])


ENVS: dict[str, Callable[[], EnvBase]] = {
    "GymEnv": make_cartpole,
    "SerialEnv(2)": lambda: SerialEnv(2, make_cartpole),
    "ParallelEnv(2), parent": lambda: ParallelEnv(2, make_cartpole),
    "JaxEnv x64": lambda: BraxEnv("fast", batch_size=[64], device="cpu"),
    "TransformedEnv(GymEnv, StepCounter)": lambda: TransformedEnv(make_cartpole(), StepCounter()),
    "TransformedEnv(GymEnv, 3 transforms)": lambda: TransformedEnv(
        make_cartpole(), Compose(InitTracker(), StepCounter(), RewardSum())
    ),
    "TransformedEnv(GymEnv, DoubleToFloat)": lambda: TransformedEnv(
        make_cartpole(), DoubleToFloat(in_keys=["observation"])
    ),
    "MixedEnv(2 SerialEnv)": mixed,
}


def main() -> None:
    """Count every env and print and record the table."""
    gymnasium.logger.min_level = gymnasium.logger.ERROR
    torch.set_num_threads(1)
    rows = [row for name, make in ENVS.items() for row in count_step(name, make())]
    rows += [count_run(f"JaxEnv x64, {name}", policy) for name, policy in runs().items()]
    print(
        f"{'one warm step':60s} {'calls':>6s} {'functions':>10s} {'modules':>8s} {'module changes':>15s}"
    )
    for row in rows:
        print(
            f"{row.env:60s} {row.calls:6d} {row.functions:10d} {row.modules:8d} {row.module_changes:15d}"
        )
    size = measure(*_PACKAGES)
    print(f"{size.modules} modules, {size.code_lines} code lines")
    counted = [{**asdict(row), "module_changes": row.module_changes} for row in rows]
    record("calls of a warm step", {"rows": counted, "size": asdict(size)})


if __name__ == "__main__":
    main()
