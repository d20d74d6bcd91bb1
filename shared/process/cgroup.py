"""The control groups that this process is in, and so what its container may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """(cgroup version, folder) of each group that this process is in, innermost first: in version 2 there is one tree, in version 1
    one per controller. Inside a container its own group is the root of what it sees. `root` is where /proc and /sys are."""
    memberships = root / "proc/self/cgroup"
    if not memberships.is_file():
        return
    for line in memberships.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _upwards(2, root / "sys/fs/cgroup", path)
        elif controller in controllers.split(","):
            yield from _upwards(1, root / "sys/fs/cgroup" / controller, path)


def _upwards(version: int, top: Path, path: str) -> Iterator[tuple[int, Path]]:
    group = top / path.lstrip("/")
    for folder in (group, *group.parents):
        yield version, folder
        if folder == top:
            return
