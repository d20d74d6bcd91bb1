"""Notices a peer that says nothing, although it says something at least every half second while it
is well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MAX_SILENCE_S = 2.0
_LATE_S = 0.25  # a timer that rings so late tells of this process, not of the peer


class SilenceWatch:
    """Calls `on_silence` once, when a wait for the peer's next message has lasted `max_silence_s`. All waits share one timer."""

    def __init__(self, on_silence: Callable[[], object], max_silence_s: float = MAX_SILENCE_S) -> None:
        self.has_rung = False
        self._on_silence = on_silence
        self._max_silence_s = max_silence_s
        self._loop = asyncio.get_running_loop()
        self._waits_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """From now on the peer is listened to."""
        self._waits_since = self._loop.time()
        if self._timer is None:
            self._ring_at(self._waits_since + self._max_silence_s)

    def end(self) -> None:
        """It has said something, or nobody listens now."""
        self._waits_since = None

    def close(self) -> None:
        self.end()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring_at(self, at: float) -> None:
        self._timer = self._loop.call_at(at, self._ring, at)

    def _ring(self, due_at: float) -> None:
        self._timer = None
        now = self._loop.time()
        if self._waits_since is None:
            return
        if now - due_at > _LATE_S:  # this loop was stuck itself: what the peer said meanwhile is still to be read
            self._waits_since = now
        silent_at = self._waits_since + self._max_silence_s
        if silent_at > now:
            self._ring_at(silent_at)
        else:
            self.has_rung = True
            self._on_silence()
