"""Check the installation and report problems with their fixes.

Everything that could crash is tried in its own process: a library built for another processor ends that
process, not the doctor. Works with nothing installed but envkit's core.

Conventions
    finding  "ok", "note" (works, but for something that is not there) or "broken".
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.markup import escape

from envkit.installing import DISTRIBUTION, LIBRARIES, install_hint
from envkit.transport.cores import count_cores

_ALWAYS_SHOWN = ("torch", "tensordict", "numpy", "jaxlib", "mujoco", "mujoco-mjx")
"""Distributions whose versions are shown beside those of the optional libraries."""

_SECONDS = 120
_LEAST_SHARED_MIB = 128


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    state: Literal["ok", "note", "broken"]
    report: str
    fix: str = ""


def examine() -> int:
    """Print all findings, and return the exit status: 1 if something is broken."""
    console = Console(soft_wrap=True)
    marks = {"ok": "[green]ok    [/]", "note": "[yellow]note  [/]", "broken": "[red]broken[/]"}
    is_broken = False
    for check in _CHECKS:
        for finding in check():
            is_broken |= finding.state == "broken"
            fix = f"\n         fix: {finding.fix}" if finding.fix else ""
            report = escape(f"{finding.what}: {finding.report}{fix}")  # extras are in brackets
            console.print(f"{marks[finding.state]} {report}", highlight=False)
    return int(is_broken)


def _distributions() -> list[str]:
    return [*_ALWAYS_SHOWN, *(library.distribution for library in LIBRARIES.values())]


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.platform()}")
    versions = {"envkit": _version_of(DISTRIBUTION)}
    versions |= {name: version for name in _distributions() if (version := _version_of(name))}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Finding("versions", "ok", listed)
    if stranger := _version_of("envkit"):
        report = f"the distribution 'envkit' {stranger} is installed beside {DISTRIBUTION}: both bring a package envkit"
        fix = "pip uninstall envkit, then in the folder of your clone: pip install -e ."
        yield Finding("versions", "broken", report, fix)


def _two_pygames() -> Iterator[Finding]:
    """Report pygame and pygame-ce side by side: they bring the same folder, and whichever goes takes files of both."""
    if all(map(_version_of, ("pygame", "pygame-ce"))):
        report = "pygame and pygame-ce are both installed, in one folder; uninstalling one of them breaks the other"
        cure = "pip uninstall pygame, then pip install --force-reinstall --no-deps pygame-ce"
        yield Finding("pygame", "note", report, cure)


def _requirements_of(distribution: str) -> list[Requirement]:
    try:
        return [Requirement(text) for text in metadata.requires(distribution) or ()]
    except metadata.PackageNotFoundError:
        return []


def _in_use() -> Iterator[tuple[str, Requirement]]:
    """List the requirements of envkit, of its extras in use and of the libraries, each with the name of what has it.

    An extra is in use if all that it names itself is installed.
    """
    of_envkit: dict[str, list[Requirement]] = {}
    for one in _requirements_of(DISTRIBUTION):
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(one.marker))
        if one.name != DISTRIBUTION:  # which names another extra
            who = f"the extra {extra[1]!r}" if extra else "envkit"
            of_envkit.setdefault(who, []).append(one)
    for who, required in of_envkit.items():
        if all(_version_of(one.name) for one in required):
            yield from ((who, one) for one in required)
    for library in _distributions():
        if version := _version_of(library):
            for one in _requirements_of(library):
                if one.marker is None or one.marker.evaluate({"extra": ""}):
                    yield f"{library} {version}", one


def _bounds() -> Iterator[Finding]:
    """Compare the installed versions with the bounds of the packages that need them."""
    asked: dict[str, list[tuple[str, SpecifierSet]]] = {}
    for who, one in _in_use():
        if one.specifier and _version_of(one.name):
            asked.setdefault(canonicalize_name(one.name), []).append((who, one.specifier))
    for name, bounds in asked.items():
        version = str(_version_of(name))
        unmet = [
            f"{who} needs {bound}" for who, bound in bounds if not bound.contains(version, True)
        ]
        if unmet:
            all_bounds = SpecifierSet(",".join({str(bound): None for _, bound in bounds}))
            fix = f"pip install '{name}{all_bounds}'"
            yield Finding("versions", "broken", f"{name} {version}: {', '.join(unmet)}", fix)


def _tried(code: str) -> tuple[bool, str]:
    """Run code in its own process; gives whether it went well, and the last line that it wrote."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_SECONDS} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode < 0:
        return False, f"the process was ended by signal {-done.returncode}"
    return done.returncode == 0, lines[-1] if lines else ""


_TORCH = """
import torch
GPUs = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print("; ".join(GPUs) or "CPU")
"""
_JAX = """
import jax
GPUs = [device.device_kind for device in jax.devices() if device.platform != "cpu"]
print("; ".join(GPUs) or "CPU")
"""


def _devices() -> Iterator[Finding]:
    works, of_torch = _tried(_TORCH)
    if not works:
        fix = "install torch for this machine, see pytorch.org"
        yield Finding("torch", "broken", of_torch, fix)
    else:
        yield Finding("torch", "ok", f"computes on {of_torch}")
    if _version_of("jax") is None:
        yield Finding("JAX", "note", "not installed: no stateless envs", install_hint("jax"))
        return
    works, of_jax = _tried(_JAX)
    if not works:
        fix = "pip install -U jax jaxlib, of one version"
        yield Finding("JAX", "broken", of_jax, fix)
        return
    if of_torch != "CPU" and of_jax == "CPU":
        fix = "pip install 'jax[cuda12]' (or cuda13, as the driver has it)"
        yield Finding("JAX", "broken", "sees no GPU, but torch does", fix)
        return
    yield Finding("JAX", "ok", f"computes on {of_jax}")
    if of_jax != "CPU" and not os.environ.get("XLA_CLIENT_MEM_FRACTION"):
        report = "JAX takes three quarters of a GPU when it opens it, and torch has the rest"
        fix = "call envkit.configure_gpu(fraction=0.5) before the first env is made"
        yield Finding("memory of the GPU", "note", report, fix)


def _threads() -> Iterator[Finding]:
    """Hold the threads that torch begins with against the cores that this process may keep busy."""
    works, threads = _tried("import torch; print(torch.get_num_threads())")
    if not works:
        return
    cores = count_cores()
    report = f"{threads}, and {cores} cores to run on"
    if int(threads) > cores:
        fix = f"export OMP_NUM_THREADS={cores} before the program starts"
        yield Finding("torch threads", "note", report, fix)
    else:
        yield Finding("torch threads", "ok", report)


def _memory() -> Iterator[Finding]:
    if hasattr(os, "memfd_create"):
        yield Finding("shared memory", "ok", "rows of pools lie in anonymous memory")
        return
    if not os.path.isdir("/dev/shm"):
        yield Finding("shared memory", "note", "no /dev/shm: rows lie in files of the temp folder")
        return
    free = shutil.disk_usage("/dev/shm").free // 2**20
    if free < _LEAST_SHARED_MIB:
        fix = "give the container more: docker run --shm-size=2g"
        yield Finding("shared memory", "broken", f"{free} MiB free in /dev/shm", fix)
    else:
        yield Finding("shared memory", "ok", f"{free} MiB free in /dev/shm")


def _processes() -> Iterator[Finding]:
    methods = multiprocessing.get_all_start_methods()
    method = "forkserver" if "forkserver" in methods else "spawn"
    yield Finding("worker processes", "ok", f"start by {method}, {count_cores()} cores")
    works, report = _tried(_POOL)
    if not works:
        fix = "step in this process: SerialEnv in place of ParallelEnv"
        yield Finding("worker processes", "broken", report, fix)


_POOL = """
import torch
from envkit import Composite, EnvBase, ParallelEnv, Unbounded

class Nothing(EnvBase):
    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(x=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
    def _reset(self, td):
        return self.observation_spec.zero()
    def _step(self, td):
        return self.observation_spec.zero().update(self.full_reward_spec.zero()).update(self.full_done_spec.zero())
    def _set_seed(self, seed):
        pass

env = ParallelEnv(2, Nothing)
env.rollout(2)
env.close()
"""


def _rendering() -> Iterator[Finding]:
    if _version_of("mujoco") is None:
        return
    works, report = _tried(_PICTURE)
    chosen = os.environ.get("MUJOCO_GL")
    if works:
        yield Finding("rendering", "ok", f"MuJoCo draws by {report}")
    elif chosen:
        fix = "unset MUJOCO_GL, and what works here is found"
        yield Finding("rendering", "broken", f"MUJOCO_GL={chosen}, but {report}", fix)
    else:
        fix = "apt-get install libosmesa6 (Debian, Ubuntu), or a driver with EGL"
        yield Finding("rendering", "note", report, fix)


_PICTURE = """
import sys
from envkit_bridges import offscreen
from envkit.errors import EnvkitError

try:
    backend = offscreen.prepare()
except EnvkitError as error:
    sys.exit(str(error).removesuffix(f" {offscreen.CURE}."))
failure = offscreen.failure_of(backend)
sys.exit(failure) if failure else print(backend)
"""


def _worlds() -> Iterator[Finding]:
    import envkit

    for world in envkit.worlds():
        if world.version is None:
            report = "not installed"
            yield Finding(f"library {world.name}", "note", report, install_hint(str(world.extra)))
        elif world.problem:
            yield Finding(f"library {world.name}", "broken", world.problem)
        else:
            report = f"{world.num_envs} envs of {world.library} {world.version}"
            yield Finding(f"library {world.name}", "ok", report)


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _bounds,
    _two_pygames,
    _devices,
    _threads,
    _memory,
    _processes,
    _rendering,
    _worlds,
)
