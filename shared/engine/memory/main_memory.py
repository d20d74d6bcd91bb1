"""How much memory this process may still take: of the machine, and of the container (cgroup) that it runs in."""

from __future__ import annotations

import os
import re
from pathlib import Path


def available_memory_bytes(root: Path = Path("/")) -> int:
    """The least of what the kernel calls available and of what each memory limit above this process leaves. `root` is where
    /proc and /sys are."""
    return min([_machine_bytes(root), *_container_bytes(root)])


def _machine_bytes(root: Path) -> int:
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if found:
            return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_bytes(root: Path) -> list[int]:
    """Of version 2 (one tree) and version 1 (a tree per resource). Inside a container its own group is the root of what it sees."""
    cgroups = root / "proc/self/cgroup"
    if not cgroups.is_file():
        return []
    rooms = []
    for line in cgroups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = folder / path.lstrip("/")
        for level in (group, *group.parents):
            if (level / limit).is_file() and (level / usage).is_file():
                rooms += _room_bytes(level / limit, level / usage, level / "memory.stat")
            if level == folder:
                break
    return rooms


def _room_bytes(limit: Path, usage: Path, stat: Path) -> list[int]:
    text = limit.read_text().strip()
    if text == "max":
        return []
    # Files that were read count as used memory, but give way.
    file_pages = re.search(r"^(?:file|cache) (\d+)$", stat.read_text(), re.MULTILINE) if stat.is_file() else None
    reclaimable = int(file_pages[1]) if file_pages else 0
    return [max(0, int(text) - int(usage.read_text()) + reclaimable)]
