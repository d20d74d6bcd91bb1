"""What the user sees while a benchmark runs: a bar on a terminal, elsewhere a line per run. It writes to stderr, which leaves
stdout to the report."""

from __future__ import annotations

import time
from typing import TextIO

from bench.load.client import Completion, Observer

_BAR_WIDTH = 24
_REDRAW_S = 0.1  # not at each chunk: drawing would take more of the server's cores than reading
_CLEAR_LINE = "\r\x1b[K"


class Progress(Observer):
    def __init__(self, stream: TextIO, prefix: str = "") -> None:
        """`prefix` goes ahead of every line, such as the engine's name."""
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._prefix = prefix
        self._title = ""
        self._num_requests = self._num_done = self._num_chunks = 0
        self._began_at = self._drawn_at = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        self._stream.write(f"{_CLEAR_LINE if self._is_terminal else ''}{self._prefix}{text}\n")
        self._stream.flush()

    def begin(self, title: str, num_requests: int) -> None:
        self._title, self._num_requests = title, num_requests
        self._num_done = self._num_chunks = 0
        self._began_at = time.perf_counter()
        if self._is_terminal:
            self._draw(self._began_at)
        else:
            self.say(title)

    def chunk(self, completion: Completion) -> None:
        self._num_chunks += 1
        if self._is_terminal and (now := time.perf_counter()) - self._drawn_at >= _REDRAW_S:
            self._draw(now)

    def ended(self, completion: Completion) -> None:
        self._num_done += 1

    def end(self) -> None:
        if self._is_terminal:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()

    def _draw(self, now: float) -> None:
        self._drawn_at = now
        num_filled = min(_BAR_WIDTH, _BAR_WIDTH * self._num_done // max(1, self._num_requests))
        bar = "#" * num_filled + "-" * (_BAR_WIDTH - num_filled)
        counts = f"{self._num_done}/{self._num_requests} requests, {self._num_chunks:,} chunks"
        self._stream.write(f"{_CLEAR_LINE}{self._prefix}{self._title:<14} [{bar}] {counts}, {now - self._began_at:.0f} s")
        self._stream.flush()
