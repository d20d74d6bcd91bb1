"""A child's log file. Where it cannot be written, as on a full disk, lines are lost and that is said once; nothing else changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path


class LogFile:
    def __init__(self, path: Path | None, on_trouble: Callable[[str], None]) -> None:
        """Nothing is kept if `path` is None. `on_trouble` is told, once for each time that it begins, why lines are lost."""
        self._path = path
        self._on_trouble = on_trouble
        self._file: FileIO | None = None
        self._is_failing = False

    def write(self, line: str) -> None:
        if self._path is None:
            return
        data = line.encode(errors="replace") + b"\n"
        try:
            if self._file is None:
                self._file = FileIO(os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a")
            self._file.write(data)  # may write less than all of it: then the disk is full, and the next line says so
        except OSError as error:
            if not self._is_failing:
                self._on_trouble(f"cannot write {self._path}, so its output is lost: {error.strerror}")
            self._is_failing = True
        else:
            self._is_failing = False

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
