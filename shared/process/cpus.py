"""How many processors this process may use: of those it may run on, as many as the quota of its container is worth."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from shared.process.cgroup import group_folders


def usable_cpus() -> tuple[int, ...]:
    """Processors that this process may run on; empty where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if sys.platform == "linux" else ()


def num_usable_cpus(root: Path = Path("/")) -> int:
    """At least 1. A quota of 2.5 processors is worth 2: one thread more, and all of them wait for the end of each period. `root` is
    where /proc and /sys are."""
    num_allowed = len(usable_cpus()) or os.cpu_count() or 1
    return max(1, int(min([num_allowed, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """In processors, of each group that this process is in."""
    for version, group in group_folders("cpu", root):
        quota = _quota_v2(group) if version == 2 else _quota_v1(group)
        if quota is not None:
            yield quota


def _quota_v2(group: Path) -> float | None:
    """cpu.max has "QUOTA PERIOD", or "max PERIOD"."""
    file = group / "cpu.max"
    if not file.is_file():
        return None
    quota, period = file.read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(group: Path) -> float | None:
    """A quota of -1 is none."""
    quota, period = group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"
    if not (quota.is_file() and period.is_file()):
        return None
    quota_us = int(quota.read_text())
    return None if quota_us < 0 else quota_us / int(period.read_text())
