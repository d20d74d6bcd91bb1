"""What `twostroke up` shows: on a terminal one line that is rewritten while children start, elsewhere plain lines."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from typing import TextIO

# A log record as `shared/process/telemetry.py` prints it: date, time, level, component, message.
_SEVERE = re.compile(r"\S+ \S+ (WARNING|ERROR|CRITICAL)\s+\S+ (.*)")
_CLEAR_LINE = "\r\x1b[K"
_NAME_WIDTH = 12


class Display:
    """An observer of children (`services/local/child.py`) that writes to `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._starting: dict[str, str] = {}  # child's name -> what it is doing

    def say(self, text: str) -> None:
        """A line that stays."""
        self._write((_CLEAR_LINE if self._is_terminal else "") + text + "\n" + self._status_line())

    def progress(self, name: str, text: str) -> None:
        self._starting[name] = text
        if self._is_terminal:
            self._write(self._status_line())
        else:
            self._say_of(name, text)

    def ready(self, name: str, elapsed_s: float) -> None:
        self._starting.pop(name, None)
        self._say_of(name, f"ready after {elapsed_s:.1f} s")

    def printed(self, name: str, line: str) -> None:
        if severe := _SEVERE.match(line):
            self._say_of(name, f"{severe[1].lower()}: {severe[2]}")

    def trouble(self, name: str, text: str) -> None:
        self._say_of(name, f"warning: {text}")

    def ended(self, name: str, reason: str, restart_in_s: float) -> None:
        self._starting.pop(name, None)
        self._say_of(name, f"ended ({reason}); starts again in {restart_in_s:.1f} s")

    def _say_of(self, name: str, text: str) -> None:
        self.say(f"  {name:<{_NAME_WIDTH}}{text}")

    def _status_line(self) -> str:
        if not (self._is_terminal and self._starting):
            return ""
        status = "  " + " | ".join(f"{name}: {text}" for name, text in self._starting.items())
        return _CLEAR_LINE + status[: shutil.get_terminal_size().columns - 1]

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a full disk, or a terminal that is gone: children matter more than what is shown of them
            self._stream.write(text)
            self._stream.flush()
