"""Run the core suite with the versions of Python and the libraries that are installed, and record how many tests pass.

``--debian trixie`` first makes a root folder with the Python of that release of Debian, installs the newest
libraries that our extras allow, and runs the suite there, in a copy of the working tree. Debian brings one Python a
release: bookworm 3.11, trixie 3.13. For any other, run this module in an environment of that Python.

``--venv FOLDER`` installs the lowest versions into a new environment there, and runs the suite in it.

Conventions
    root     a folder with a system of its own, which ``chroot`` enters. Mounts below it last as long as a command.
    pinned   versions of constraints.txt.
    lowest   the lowest versions that pyproject.toml allows.
    newest   those that pip chooses from pyproject.toml alone.

Run: ``make matrix``, ``make floors``, or ``python -m bench.matrix pinned|lowest|newest`` where ``pip install -e '.[test]'`` was run
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from bench.harness import RESULTS, record
from envkit.installing import cache_folder, install_command

CORE = (
    "tests/arrays",
    "tests/specs",
    "tests/data",
    "tests/env",
    "tests/functional",
    "tests/test_rules.py",
    "tests/batched/test_exchange.py",
    "tests/batched/test_serial_parallel.py",
    "tests/bridges/gym",
    "tests/bridges/policy/test_numpy_library.py",
    "tests/bridges/jax/policy/test_ops.py",
    "tests/bridges/jax/test_gradients.py",
    "tests/bridges/jax/test_jax_env.py",
    "tests/bridges/jax/test_jax_resume.py",
    "tests/transforms/test_compose.py",
    "tests/transforms/test_episodes.py",
    "tests/transforms/test_programs.py",
    "tests/transforms/test_contract.py",
    "tests/transforms/test_transformed_env.py",
    "tests/transforms/test_values.py",
    "--ignore=tests/env/test_meta_device.py",  # needs dm_control
)
"""The core suite: tests, without the slow ones, that any supported versions pass with the extra ``test``."""

_REPOSITORY = Path(__file__).parents[1]
_COPY, _VENV = "/opt/envkit", "/opt/venv"  # in a root
_FILE = f"bench/results/{Path(__file__).stem}.jsonl"
_TOOLS = {"debootstrap": "debootstrap", "unshare": "util-linux", "chroot": "coreutils"}
_FREE_BYTES = 8 << 30  # torch for CUDA is the larger half
_DEBIAN = ("--variant=minbase", "--include=python3,python3-venv,ca-certificates")
_FROM_HERE = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")


class Tally:
    """A pytest plugin that counts outcomes and keeps the ids of tests that failed or could not be imported."""

    def __init__(self) -> None:
        self.passed, self.skipped, self.failures = 0, 0, set[str]()

    def pytest_runtest_logreport(self, report) -> None:
        self.passed += report.passed and report.when == "call"
        self.skipped += report.skipped
        if report.failed:
            self.failures.add(report.nodeid)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failures.add(report.nodeid)


def run(versions: str, tests: Sequence[str]) -> int:
    """Run tests in this environment and append a line to the results; return how many tests failed.

    Raises:
        SystemExit: pytest or one of its plugins is missing, or pytest did not run to its end.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as make test
    missing = [name for name in ("pytest", "pytest_timeout", "xdist") if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"{', '.join(missing)}: not installed, and the core suite needs the extra test. Run: {install_command('test')}"
        )
    import pytest

    tally = Tally()
    options = ["-m", "not slow and not gpu", "-n", "2", "--dist", "loadfile", "--timeout", "300"]
    options.append("--hypothesis-profile=ci")  # versions are judged, not the draw or a busy machine
    code = pytest.main([*options, *(tests or CORE)], plugins=[tally])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {code!r}, so no line is recorded: see above.")
    failures = sorted(tally.failures)
    counts = {"passed": tally.passed, "failed": len(failures), "skipped": tally.skipped}
    record("core suite", {"versions_are": versions, **counts, "failures": failures})
    return len(failures)


def floors() -> list[str]:
    """Give the lowest version that pyproject.toml allows of each library, as lines of a constraints file of pip."""
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]
    lowest: dict[str, Version] = {}
    for text in chain(project["dependencies"], *project["optional-dependencies"].values()):
        asked = Requirement(text)
        for bound in asked.specifier:
            if bound.operator in (">=", "=="):
                lowest[asked.name] = max(
                    Version(bound.version), lowest.get(asked.name, Version("0"))
                )
    return [f"{name}=={version}" for name, version in sorted(lowest.items())]


def run_lowest(folder: Path, tests: Sequence[str]) -> int:
    """Run tests in an environment with the lowest versions, which is made in a folder; return pytest's failures.

    Raises:
        SystemExit: the folder exists, pip cannot install these versions together, or the suite did not run to its end.
    """
    if folder.exists():
        raise SystemExit(
            f"{folder} exists, and --venv makes a new environment: pass another folder."
        )
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    allowed, python = folder / "floors.txt", str(folder / "bin" / "python")
    allowed.write_text("\n".join(floors()) + "\n")
    _say(f"installing the versions of {allowed}; where torch comes with CUDA, it is 3 GB")
    install = ["-m", "pip", "install", "-q", "-c", str(allowed), "-e", f"{_REPOSITORY}[test]"]
    if subprocess.run([python, *install], check=False).returncode:
        raise SystemExit(
            f"pip could not install the versions of {allowed}, see above. Raise the bound in pyproject.toml that it "
            "names, to a version that this Python has."
        )
    command = [python, "-m", "bench.matrix", "lowest", *tests]
    return subprocess.run(command, cwd=_REPOSITORY, check=False).returncode


def run_in_debian(suite: str, root: Path, tests: Sequence[str]) -> int:
    """Run tests in a root with the Python of a release of Debian and newest libraries; return pytest's failures.

    Args:
        suite: code name of the release.
        root: the folder of the root. It is made where there is none, else its libraries are upgraded.
        tests: files or folders of tests; none for the core suite.

    Raises:
        SystemExit: a tool, the right to change root, disk space, Debian's mirror or the package index is missing.
    """
    _check_machine(root)
    if not root.exists():
        _make_root(suite, root)
    for file in _FROM_HERE:  # a name server and certificates may be this network's own
        if Path(file).exists():
            shutil.copyfile(file, str(root) + file)
    _copy_working_tree(Path(str(root) + _COPY))
    _say(f"installing the newest libraries into {root}; the first time, torch with CUDA is 3 GB")
    install = f"{_VENV}/bin/python -m pip install -q --upgrade --upgrade-strategy eager"
    installed = _inside(root, f"python3 -m venv {_VENV} && {install} -e '{_COPY}[test]'")
    if installed:
        raise SystemExit(
            f"pip ended with {installed} in {root}, see above. Check that this machine reaches a package index, and "
            "that the extras of pyproject.toml have releases for this Python."
        )
    results = Path(f"{root}{_COPY}/{_FILE}")
    before = results.read_bytes() if results.exists() else b""
    command = f"cd {_COPY} && {_VENV}/bin/python -m bench.matrix newest"
    code = _inside(root, " ".join([command, *tests]))
    if not results.exists() or results.read_bytes() == before:
        raise SystemExit(f"The core suite did not run to its end in {root}, see above.")
    shutil.copyfile(results, RESULTS.parents[1] / _FILE)
    return code


def _check_machine(root: Path) -> None:
    otherwise = "Or run this module in an environment of that Python, see its docstring."
    if os.geteuid():
        raise SystemExit(
            f"User {os.geteuid()} cannot enter another root: run this with sudo. {otherwise}"
        )
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is missing. Run: apt-get install {package}. {otherwise}")
    root.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root.parent).free
    if not root.exists() and free < _FREE_BYTES:
        raise SystemExit(
            f"{root.parent} has {free >> 30} GiB free, and a root needs {_FREE_BYTES >> 30}: pass another --root."
        )


def _make_root(suite: str, root: Path) -> None:
    """Unpack a release of Debian beside its place and move it there once it is whole."""
    _say(f"making {root} from Debian's {suite}")
    part = root.with_name(f"{root.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was interrupted
    done = subprocess.run(
        ["unshare", "--mount", "debootstrap", *_DEBIAN, suite, str(part)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-5:])
        raise SystemExit(
            f"debootstrap could not make {suite!r}:\n{last}\nCheck the name of the release, and that this machine "
            f"reaches Debian's mirror."
        )
    part.rename(root)


def _copy_working_tree(folder: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=_REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    shutil.rmtree(folder, ignore_errors=True)
    for name in listed.stdout.splitlines():
        if (_REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(_REPOSITORY / name, folder / name)


def _inside(root: Path, command: str) -> int:
    """Run a command of the shell in a root and return its exit code."""
    mounts = 'mount --rbind /dev "$1/dev" && mount -t proc proc "$1/proc"'
    enter = 'exec chroot "$1" /bin/sh -c "$2"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{mounts} && {enter}", "sh", str(root), command],
        env={**os.environ, "HOME": "/root", "TMPDIR": "/tmp", "PATH": "/usr/bin:/bin:/usr/sbin"},
        check=False,
    ).returncode


def _say(text: str) -> None:
    print(f"bench.matrix: {text}", flush=True)


def main() -> None:
    """Run the core suite here or in a root, and exit with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "versions", choices=("pinned", "lowest", "newest"), help="how they were chosen"
    )
    parser.add_argument(
        "tests", nargs="*", help="files or folders, for a trial; default: the core suite"
    )
    parser.add_argument("--debian", metavar="RELEASE", help="in a root made of it: trixie")
    parser.add_argument("--venv", type=Path, help="a new folder for an environment of the lowest")
    parser.add_argument("--root", type=Path, help="its folder; default: in your cache folder")
    options = parser.parse_args()
    if options.venv is not None:
        if options.versions != "lowest" or options.debian:
            parser.error("--venv installs the lowest versions: leave --debian out and say lowest.")
        raise SystemExit(run_lowest(options.venv.absolute(), options.tests))
    if options.debian is None:
        raise SystemExit(int(run(options.versions, options.tests) > 0))
    if options.versions != "newest":
        parser.error(f"--debian installs the newest versions; you asked for {options.versions}.")
    root = options.root or cache_folder() / "matrix" / options.debian
    raise SystemExit(run_in_debian(options.debian, root.absolute(), options.tests))


if __name__ == "__main__":
    main()
