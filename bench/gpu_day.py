"""Run on a machine with a GPU what needs one, in parts, and write one report with the GPU's name.

The parts are the probe, parity with the CPU, the tests marked ``gpu``, and speeds. Each is a process of its own with a
limit, and the log has a line before and after it. So a call that was cut goes on where the log ends, on the same
machine or on a new one that was given the folder. A part that was cut twice is given up.

``--rehearse`` runs all of it on the CPU, on few rows, in an environment that has only the packages of the machine that
was lent to us and those that ``--wheels`` gathers. Every line that it writes is marked, and `bench.report` skips it.

Conventions
    call  a run of this module. It begins a part only if the part's limit fits into what is left of its 9 minutes.
    cut   what a part is that ran past its limit, or whose call ended before it.

Run: ``python -m bench.gpu_day [--into FOLDER] [--resume FOLDER] [--rehearse] [PART ...]``, see docs/gpu.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from bench.harness import INTO, REHEARSAL, accelerator, is_rehearsal, machine, python_path, record

ROOT = Path(__file__).parents[1]
LOG, OUTPUT, REPORT = "log.jsonl", "output.txt", "report.md"
CALL_S, START_S, DAY_S = 9 * 60, 60, 25 * 60  # a call, the start of a machine, all of it
CUTS = 2  # of a part, after which it is given up
CARRIED_BYTES = 64 << 20  # the working tree and the wheels
_SHOWN = 40  # last lines of a part that did not pass
_DONE = ("passed", "failed")


@dataclass(frozen=True)
class Part:
    """Arguments of Python, and the seconds after which they are cut."""

    arguments: tuple[str, ...]
    limit_s: float


def _part(limit_s: float, module: str, *arguments: str) -> Part:
    return Part(("-m", f"bench.{module}", *arguments), limit_s)


PARTS = {
    "probe": _part(120, "gpu_probe"),
    "parity": _part(240, "gpu_parity"),
    "speed-4096": _part(180, "gpu", "--rows", "4096"),
    "tests-of-envs": _part(300, "gpu_day", "--tests", "envs"),
    "tests-of-transforms": _part(240, "gpu_day", "--tests", "transforms"),
    "speed-16384": _part(240, "gpu", "--rows", "16384"),
}

CARRIED = (
    "array-api-compat", "brax", "farama-notifications", "glfw", "gymnasium", "gymnax", "importlib-metadata", "jaxopt", "mujoco",
    "mujoco-mjx", "orjson", "pyvers", "tensordict", "trimesh",
)  # fmt: skip
"""Packages that the machine lacks. They travel as wheels, in the versions of constraints.txt."""

ON_MACHINE = (
    "absl-py", "annotated-doc", "attrs", "chex", "cloudpickle", "contourpy", "cycler", "etils", "execnet", "filelock", "flax",
    "fonttools", "fsspec", "humanize", "hypothesis", "iniconfig", "jax", "jaxlib", "jaxtyping", "jinja2", "kiwisolver",
    "markdown-it-py", "markupsafe", "matplotlib", "mdurl", "ml-dtypes", "mpmath", "msgpack", "networkx", "numpy",
    "opt-einsum", "optax", "orbax-checkpoint", "packaging", "pandas", "pillow", "pluggy", "protobuf", "psutil",
    "pygments", "pyparsing", "pytest", "pytest-timeout", "pytest-xdist", "python-dateutil", "pyyaml", "rich", "scipy",
    "seaborn", "setuptools", "shellingham", "six", "sortedcontainers", "sympy", "tensorstore", "toolz", "torch",
    "tqdm", "treescope", "triton", "typer", "typing-extensions", "wadler-lindig", "zipp",
    "cuda-bindings", "cuda-pathfinder", "nvidia-cublas",  # a folder that holds all of NVIDIA's
)  # fmt: skip
"""Packages of that machine which envkit, its tests or its libraries ask for; all others are missing in a rehearsal."""

_LINUX = ("2_28_x86_64", "2_27_x86_64", "2_17_x86_64", "2014_x86_64", "1_x86_64")
_PLATFORMS = [f"manylinux{'_' if '_' in one[:3] else ''}{one}" for one in _LINUX]


# ------------------------------------------------------------------------------------------ a day


@dataclass(frozen=True)
class Day:
    """A folder with the log, the output and the lines of parts, and how parts are run.

    Args:
        folder: where everything is written; what an earlier call left there counts.
        python: runs the parts.
        variables: environment variables of the parts, beside those of this process.
        rehearsal: whether every line is marked.
        parts: by name, in order.
    """

    folder: Path
    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)
    rehearsal: bool = False
    parts: Mapping[str, Part] = field(default_factory=lambda: PARTS)

    def take(self, earlier: Path) -> None:
        """Copy what an earlier call left, unless this folder has a log of its own.

        Raises:
            SystemExit: there is no log, or it is one of a rehearsal and this is none, or the other way round.
        """
        if not (earlier / LOG).exists():
            raise SystemExit(f"{earlier} has no {LOG}: pass the folder that an earlier call wrote.")
        if any(line.get("rehearsal", False) != self.rehearsal for line in _lines(earlier / LOG)):
            raise SystemExit(
                f"{earlier} is of a {'GPU' if self.rehearsal else 'rehearsal'}, and is not continued as the other."
            )
        if not (self.folder / LOG).exists():
            for file in earlier.iterdir():
                shutil.copyfile(file, self.folder / file.name)

    def outcome(self, name: str) -> str:
        """Tell how a part went: "passed", "failed", "cut", "given up", or "" where it was not begun."""
        lines = [line for line in _lines(self.folder / LOG) if line["part"] == name]
        ended = [line["outcome"] for line in lines if line["event"] == "end"]
        if ended and ended[-1] in _DONE and lines[-1]["event"] == "end":
            return ended[-1]
        cuts = sum(line["event"] == "begin" for line in lines) - sum(one in _DONE for one in ended)
        return "given up" if cuts >= CUTS else "cut" if cuts else ""

    def run(self, names: Sequence[str] = ()) -> bool:
        """Run the named parts, or else those not done, as many as fit into a call; return whether all have passed."""
        until = time.monotonic() + CALL_S
        for name in names or self.parts:
            if not names and self.outcome(name) in (*_DONE, "given up"):
                continue
            if time.monotonic() + self.parts[name].limit_s > until:
                break
            self._run_part(name)
            self.write_report()
        self.write_report()
        left = [name for name in self.parts if self.outcome(name) in ("", "cut")]
        self.say(f"call again for {', '.join(left)}" if left else "nothing is left")
        return all(self.outcome(name) == "passed" for name in names or self.parts)

    def say(self, text: str) -> None:
        """Print a line, marked in a rehearsal."""
        print(self._mark(text), flush=True)

    def _mark(self, text: str) -> str:
        return f"rehearsal | {text}" if self.rehearsal else text

    def _run_part(self, name: str) -> None:
        part, began = self.parts[name], time.monotonic()
        self._log(name, "begin", **machine())
        self.say(f"{name}: at most {part.limit_s:.0f} s")
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", **self.variables}
        variables[INTO] = str(self.folder.absolute())
        process = subprocess.Popen(
            [self.python, *part.arguments],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        copier = threading.Thread(target=self._copy, args=(name, process.stdout), daemon=True)
        copier.start()
        try:
            code = process.wait(part.limit_s)
            outcome = "failed" if code else "passed"
        except subprocess.TimeoutExpired:
            outcome = "cut"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that it left, too
            process.wait()
            copier.join(10)  # those in a session of their own end when they see that
        seconds = round(time.monotonic() - began, 1)
        self._log(name, "end", outcome=outcome, seconds=seconds)
        self.say(f"{name}: {outcome} in {seconds} s")

    def _copy(self, name: str, output: TextIO) -> None:
        with output, (self.folder / OUTPUT).open("a", buffering=1) as file:
            for line in output:
                file.write(self._mark(f"[{name}] {line.rstrip()}") + "\n")
                self.say(f"[{name}] {line.rstrip()}")

    def _log(self, name: str, event: str, **about: Any) -> None:
        line = {"part": name, "event": event, "date": datetime.now(UTC).isoformat("T", "seconds")}
        mark = {"rehearsal": True} if self.rehearsal else {}
        with (self.folder / LOG).open("a") as file:
            file.write(json.dumps({**line, **mark, **about}) + "\n")

    # ------------------------------------------------------------------------------ the report

    def write_report(self) -> None:
        """Write the report of all that the folder has."""
        lines = "\n".join(self._report()).split("\n")
        (self.folder / REPORT).write_text("".join(self._mark(line) + "\n" for line in lines))

    def _report(self) -> Iterator[str]:
        begun = [line for line in _lines(self.folder / LOG) if line["event"] == "begin"]
        names = dict.fromkeys(line["accelerator"] or "no GPU" for line in begun)
        yield f"# A GPU day: {', '.join(names) or 'not begun'}"
        yield ""
        yield "| part | outcome | seconds | GPU | begun |"
        yield "| --- | --- | --- | --- | --- |"
        for name in self.parts:
            yield self._row(name)
        for versions in dict.fromkeys(_versions(line) for line in begun):
            yield f"\nVersions: {versions}"
        yield from self._results()
        for name in self.parts:
            if self.outcome(name) not in ("passed", ""):
                yield f"\n## Last lines of {name}\n\n```text"
                yield from self._tail(name)
                yield "```"

    def _row(self, name: str) -> str:
        lines = [line for line in _lines(self.folder / LOG) if line["part"] == name]
        begun = [line for line in lines if line["event"] == "begin"]
        ended = [line for line in lines if line["event"] == "end"]
        where = [begun[-1]["accelerator"] or "no GPU", begun[-1]["date"]] if begun else ["", ""]
        seconds = ", ".join(str(line["seconds"]) for line in ended)
        return f"| {name} | {self.outcome(name) or 'not run'} | {seconds} | {' | '.join(where)} |"

    def _results(self) -> Iterator[str]:
        tests = self._last("gpu_day")
        if tests:
            yield "\n## Tests"
        for title, line in tests.items():
            counts = ", ".join(f"{line[key]} {key}" for key in ("passed", "failed", "skipped"))
            yield f"\n{title}: {counts}"
            yield from (f"- {failure}" for failure in line["failures"])
        parity = self._last("gpu_parity")
        if parity:
            yield "\n## Parity with the CPU\n"
            yield "| rollout | difference | tolerance | parted rows | agrees |\n| --- | --- | --- | --- | --- |"
        for title, line in parity.items():
            shown = f"{line['difference']:.2g} | {line['tolerance']:g} | {line['parted']}"
            yield f"| {title} | {shown} | {'yes' if line['agrees'] else '**no**'} |"
        speeds = self._last("gpu")
        if speeds:
            yield "\n## Speeds\n"
            yield "| comparison | work | steps/s | ratio | spread |\n| --- | --- | --- | --- | --- |"
        for title, line in speeds.items():
            for work in line.get("works", ()):
                spread = f"{work['ratio_low']:.2f} to {work['ratio_high']:.2f}"
                speed = f"{work['steps_per_s']:,.0f} | {work['ratio']:.2f} | {spread}"
                yield f"| {title} | {work['work']} | {speed} |"
            if "total_us" in line:
                yield f"| {title} | {line['total_us']} us | | | |"
        for title, line in self._last("gpu_probe").items():
            yield f"\n## Probe: {title}\n"
            yield from (f"- {name}: {found}" for name, found in line.items() if _is_fact(found))

    def _last(self, bench: str) -> dict[str, dict[str, Any]]:
        """Give the last line of each title that a bench recorded."""
        return {line["title"]: line for line in _lines(self.folder / f"{bench}.jsonl")}

    def _tail(self, name: str) -> list[str]:
        output = self.folder / OUTPUT
        lines = output.read_text().splitlines() if output.exists() else []
        begin = self._mark(f"[{name}] ")
        return [line.removeprefix(begin) for line in lines if line.startswith(begin)][-_SHOWN:]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _versions(line: dict[str, Any]) -> str:
    found = {"python": line["python"], **line["versions"]}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _is_fact(line: object) -> bool:
    return isinstance(line, dict) and "torch" not in line  # the versions are told before


# --------------------------------------------------------------------------------------- the tests


def marked_files(of: str) -> list[str]:
    """List the files that have tests marked ``gpu``: those of "transforms", or all other ones ("envs")."""
    files = [file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py")]
    return sorted(
        str(file)
        for file in files
        if ("transforms" if "transforms" in file.parts else "envs") == of
        and re.search(r"\bmark\.gpu\b", (ROOT / file).read_text())
    )


def run_tests(of: str) -> int:
    """Run the tests marked ``gpu`` of some files and record the outcome; return how many failed.

    Raises:
        SystemExit: pytest did not run to its end, or none of the tests found a GPU.
    """
    import pytest

    from bench.matrix import Tally

    tally = Tally()
    options = ["-m", "gpu", "-vv", "--durations", "10", "-p", "no:cacheprovider"]
    options += ["--continue-on-collection-errors"]
    code = pytest.main([*options, *marked_files(of)], plugins=[tally])
    failures = sorted(tally.failures)
    counts = {"passed": tally.passed, "failed": len(failures), "skipped": tally.skipped}
    record(f"tests of {of}", {**counts, "failures": failures})
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {code!r}, see above.")
    if not tally.passed and not is_rehearsal():
        raise SystemExit("No test passed: they are skipped where torch or JAX sees no GPU.")
    return len(failures)


# -------------------------------------------------------------------------------------- packages


def gather(folder: Path) -> None:
    """Download the wheels that the machine lacks, for Python 3.12 on Linux, and check what travels.

    Raises:
        SystemExit: the folder has wheels already, one cannot be had, or they are too large.
    """
    if any(folder.glob("*.whl")):
        raise SystemExit(
            f"{folder} has wheels, and two versions of a package stop the install: pass an empty folder."
        )
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp"]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    command += ["-c", str(ROOT / "constraints.txt"), "-d", str(folder), *CARRIED]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("pip could not download them, see above.")
    check_size(folder, _working_tree())


def check_size(folder: Path, tree: Sequence[Path], limit_bytes: int = CARRIED_BYTES) -> None:
    """Print the size of the wheels and of the files that travel with them.

    Raises:
        SystemExit: together they are larger than the limit.
    """
    wheels = {file.name: file.stat().st_size for file in folder.glob("*.whl")}
    others = sum(file.stat().st_size for file in tree)
    total = sum(wheels.values()) + others
    print(f"{len(wheels)} wheels and the working tree: {total / 2**20:.1f} MiB", flush=True)
    if total > limit_bytes:
        largest = sorted(wheels, key=lambda name: -wheels[name])[:3]
        raise SystemExit(
            f"The wheels have {sum(wheels.values()) / 2**20:.1f} MiB and the working tree {others / 2**20:.1f} MiB; "
            f"expected at most {limit_bytes / 2**20:g} MiB together. The largest wheels: {', '.join(largest)}. "
            "Leave one out of CARRIED, or ignore files of the tree."
        )


def _working_tree() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


@contextmanager
def environment_like_the_machine() -> Iterator[str]:
    """Make an environment that links the packages of the machine and those carried; give its Python.

    Raises:
        SystemExit: a package that travels is not installed here.
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        python = str(Path(folder) / "bin" / "python")
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        told = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
        for name in (*ON_MACHINE, *CARRIED):
            _link(name, Path(told.stdout.strip()), is_needed=name in CARRIED)
        yield python


def _link(name: str, site: Path, *, is_needed: bool) -> None:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        if is_needed:
            raise SystemExit(
                f"{name} is not installed here, and a rehearsal needs it: make test installs it."
            ) from None
        return
    for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        link = site / part
        if not link.exists() and not part.endswith(".pth"):
            link.symlink_to(Path(str(distribution.locate_file(part))).resolve())


def main() -> None:
    """Run parts, or rehearse them, or gather wheels; the exit code is 1 where a part has not passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"default: those not done of {', '.join(PARTS)}")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="default: .cache/gpu_day")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on from an earlier call")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, into a new folder")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="gather wheels there, only")
    parser.add_argument("--tests", choices=("envs", "transforms"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(unknown)}: choose from {', '.join(PARTS)}.")
    if options.tests:
        raise SystemExit(int(run_tests(options.tests) > 0))
    if options.wheels:
        gather(options.wheels)
    elif options.rehearse:
        into = options.into or Path(tempfile.mkdtemp(prefix="gpu_day_"))
        with environment_like_the_machine() as python:
            on_cpu = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", REHEARSAL: "1"}
            variables = {"PYTHONPATH": python_path(ROOT), **on_cpu}
            _run(Day(into, python, variables, rehearsal=True), options)
    elif accelerator() is None:
        raise SystemExit("torch sees no GPU here: pass --rehearse to see that the parts run.")
    else:
        paths = [python_path(ROOT), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        into = options.into or ROOT / ".cache" / "gpu_day"
        _run(Day(into, variables=variables), options)


def _run(day: Day, options: argparse.Namespace) -> None:
    day.folder.mkdir(parents=True, exist_ok=True)
    if options.resume:
        day.take(options.resume)
    has_passed = day.run(options.parts)
    day.say(f"report: {day.folder / REPORT}")
    raise SystemExit(int(not has_passed))


if __name__ == "__main__":
    main()
