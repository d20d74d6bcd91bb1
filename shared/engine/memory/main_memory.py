"""How much memory this process may still take: of the machine, and of the container (cgroup) that it runs in."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shared.process.cgroup import group_folders

_FILES = {  # by version of cgroups: what holds the limit and the usage
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}


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
    rooms = []
    for version, group in group_folders("memory", root):
        limit, usage = _FILES[version]
        if (group / limit).is_file() and (group / usage).is_file():
            rooms += _room_bytes(group / limit, group / usage, group / "memory.stat")
    return rooms


def _room_bytes(limit: Path, usage: Path, stat: Path) -> list[int]:
    text = limit.read_text().strip()
    if text == "max":
        return []
    # Files that were read count as used memory, but give way.
    file_pages = re.search(r"^(?:file|cache) (\d+)$", stat.read_text(), re.MULTILINE) if stat.is_file() else None
    reclaimable = int(file_pages[1]) if file_pages else 0
    return [max(0, int(text) - int(usage.read_text()) + reclaimable)]
