"""How many processors a process may use: those it may run on, and what its container's quota is worth."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from shared.process import cpus
from shared.process.cpus import num_usable_cpus


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "usable_cpus", lambda: tuple(range(8)))


def root_with(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def v2(quotas: Mapping[str, str]) -> dict[str, str]:
    return {"proc/self/cgroup": "0::/pod/worker\n"} | {f"sys/fs/cgroup/{at}cpu.max": f"{text}\n" for at, text in quotas.items()}


def v1(quota: str, at: str = "pod/") -> dict[str, str]:
    folder = f"sys/fs/cgroup/cpu/{at}"
    memberships = "5:memory:/other\n4:cpuacct,cpu:/pod\n0::/\n"
    return {"proc/self/cgroup": memberships, f"{folder}cpu.cfs_quota_us": quota, f"{folder}cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "num_cpus"),
    [
        ({}, 8),
        (v2({"pod/worker/": "max 100000"}), 8),
        (v2({"pod/worker/": "400000 100000"}), 4),
        (v2({"pod/worker/": "250000 100000"}), 2),  # rounded down
        (v2({"pod/worker/": "50000 100000"}), 1),  # and never to none
        (v2({"pod/worker/": "150000 50000"}), 3),
        (v2({"pod/worker/": "max 100000", "pod/": "300000 100000"}), 3),  # of the group above
        (v2({"pod/worker/": "600000 100000", "pod/": "500000 100000"}), 5),  # the least of them
        (v2({"": "200000 100000"}), 2),  # as seen inside a container
        (v2({"pod/worker/": "1600000 100000"}), 8),  # a quota above the cores adds none
        (v1("-1\n"), 8),
        (v1("300000\n"), 3),
        (v1("300000\n", at=""), 3),
        ({"proc/self/cgroup": "5:cpuset:/pod\n", "sys/fs/cgroup/cpuset/pod/cpu.cfs_quota_us": "100000"}, 8),
    ],
)
def test_a_quota_bounds_the_processors(tmp_path: Path, files: Mapping[str, str], num_cpus: int) -> None:
    assert num_usable_cpus(root_with(tmp_path, files)) == num_cpus


def test_of_this_machine_it_is_no_more_than_the_processors_it_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1 <= num_usable_cpus() <= len(os.sched_getaffinity(0))
