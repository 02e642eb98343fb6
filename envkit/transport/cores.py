"""How many cores this process may use: by its affinity, and by the quota of the containers that it is in.

A container with a quota of 2 CPUs on a node of 64 cores may run on each of them, for 2 seconds in a second.

Conventions
    quota  seconds of CPU time that a control group may use in a second; its parents may have less.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores() -> list[int]:
    """Return the numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def count_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may keep busy: the least of affinity and quotas, which are rounded up.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    return min([len(usable_cores()), *(math.ceil(quota) for quota in _quotas(root))])


def _quotas(root: Path) -> Iterator[float]:
    """Return the quotas of the groups that this process is in, of both versions of Linux's control groups."""
    mounts, groups = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (mounts / controllers, mounts / "cpu") if controllers else (mounts,):
            # a container may see its own group at the mount, and the path of the node
            own = mount / path.lstrip("/")
            for group in (own, *own.parents):
                if group.is_relative_to(mount):
                    yield from _quota(group)


def _quota(group: Path) -> Iterator[float]:
    """Return the quota of a group, if it has one that can be read."""
    whole, parts = group / "cpu.max", (group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
    if whole.exists():
        words = whole.read_text().split()
    elif all(part.exists() for part in parts):
        words = [part.read_text().strip() for part in parts]
    else:
        return
    # "max" and -1: no quota
    if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
        yield int(words[0]) / int(words[1])
