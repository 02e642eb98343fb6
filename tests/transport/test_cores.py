"""Cores that this process may keep busy: by its affinity, and by the quotas of its control groups."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from envkit.transport.cores import count_cores, usable_cores

V1, V2 = "5:memory:/a\n1:name=systemd:/a\n3:cpu,cpuacct:/pod/a\n0::/\n", "0::/pod/a\n"


def quota_files(version: str, folder: str, quota: str) -> dict[str, str]:
    mount = Path("sys/fs/cgroup") / folder
    if version == V2:
        return {str(mount / "cpu.max"): f"{quota} 100000\n"}
    return {
        str(mount / "cpu.cfs_quota_us"): f"{quota}\n",
        str(mount / "cpu.cfs_period_us"): "100000\n",
    }


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """Count the cores of a machine of 64, which has some files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)

    def count(groups: str, *quotas: dict[str, str]) -> int:
        files = {"proc/self/cgroup": groups}
        for more in quotas:
            files |= more
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return count_cores(tmp_path)

    return count


@pytest.mark.parametrize(
    ("version", "folder"),
    [
        (V2, "pod/a"),
        (V2, "pod"),  # a parent
        (V2, ""),  # a container that sees its own group at the mount
        (V1, "cpu,cpuacct/pod/a"),
        (V1, "cpu,cpuacct/pod"),
        (V1, "cpu"),
    ],
)
@pytest.mark.parametrize(
    ("quota", "expected"), [("200000", 2), ("150000", 2), ("50000", 1), ("6500000", 64)]
)
def test_the_quota_of_a_group_and_its_parents_is_rounded_up(
    version, folder, quota, expected, counted
):
    assert counted(version, quota_files(version, folder, quota)) == expected


def test_the_lowest_quota_counts(counted):
    own, parent = (
        quota_files(V2, at, quota) for at, quota in (("pod/a", "400000"), ("pod", "300000"))
    )

    assert counted(V2, own, parent) == 3


@pytest.mark.parametrize(("version", "none"), [(V2, "max"), (V1, "-1")])
def test_without_a_quota_affinity_counts(version, none, counted):
    folder = "pod/a" if version == V2 else "cpu/pod/a"

    assert counted(version, quota_files(version, folder, none)) == 64


@pytest.mark.parametrize("text", ["", "max", "100000", "100000 0", "some 100000"])
def test_a_quota_that_cannot_be_read_is_none(text, counted):
    assert counted(V2, {"sys/fs/cgroup/pod/a/cpu.max": text}) == 64


def test_groups_of_other_controllers_do_not_count(counted):
    assert counted(V1, quota_files(V1, "memory/a", "100000")) == 64


def test_a_system_without_control_groups_has_the_cores_of_its_affinity(tmp_path):
    assert count_cores(tmp_path) == len(usable_cores())


# ------------------------------------------------------------------------- a real group, and loky

BOTH = f"""
import sys
sys.path[:0] = {sys.path!r}
from envkit.transport.cores import count_cores
import loky
print(count_cores(), loky.cpu_count())
"""


def counts(*before: str) -> list[int]:
    """Return what envkit and loky count in a process of its own, started by a shell after other commands."""
    command = f'{" && ".join([*before, "exec"])} "$0" -c "$1"'
    environ = {name: value for name, value in os.environ.items() if name != "LOKY_MAX_CPU_COUNT"}
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, BOTH],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env=environ,
    )
    return [int(count) for count in done.stdout.split()]


@pytest.fixture
def group() -> Iterator[tuple[Path, Path]]:
    """Make a control group with a quota of half a core; gives the mount and the group."""
    version_2 = Path("/sys/fs/cgroup")
    mount = version_2 if (version_2 / "cgroup.controllers").exists() else version_2 / "cpu"
    own = mount / f"envkit_test_{os.getpid()}"
    try:
        own.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if mount == version_2:
            (own / "cpu.max").write_text("50000 100000")
        else:
            (own / "cpu.cfs_quota_us").write_text("50000")
        yield mount, own
    except OSError as error:
        pytest.skip(f"the control group takes no quota: {error}")
    finally:
        with suppress(OSError):
            own.rmdir()


def test_loky_counts_the_same():
    ours, theirs = counts()

    assert ours == theirs


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system places no processes")
@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_loky_counts_the_same_on_one_core():
    assert counts(f"taskset -p -c {usable_cores()[0]} $$ > /dev/null") == [1, 1]


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_the_quota_of_a_real_group_counts(group):
    _, own = group

    assert counts(f"echo $$ > {own}/cgroup.procs")[0] == 1


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_loky_counts_the_same_where_the_group_is_seen_at_the_mount_as_in_a_container(group):
    mount, own = group
    seen = f"mount --bind {own} {mount}"
    if subprocess.run(
        ["unshare", "-m", "sh", "-c", seen], capture_output=True, check=False
    ).returncode:
        pytest.skip("nothing can be mounted here")

    inside = f"echo $$ > {own}/cgroup.procs && exec unshare -m sh -c '{seen}"
    ours, theirs = counts(inside + """ && exec "$0" -c "$1"' "$0" "$1" && true""")

    assert (ours, theirs) == (1, 1)
