"""A small file system of its own, that can be filled to the last byte. Needs root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SIZE_BYTES = 16 * 1024**2


def why_impossible() -> str | None:
    return None if os.geteuid() == 0 else "mounting a file system needs root"


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def mount(self) -> None:
        self.folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(self.folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True, stdout=subprocess.DEVNULL)

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(64 * 1024))
            except OSError:  # full
                return

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)
