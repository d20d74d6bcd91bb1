"""Finding stop strings in text that arrives in pieces, holding back no more than could still become one.

What is found does not depend on how the text was cut into pieces: the match that ends first wins, and of several that end together
the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopStrings:
    """What ends an output, and whether it is part of the text that is shown."""

    strings: Sequence[str]
    is_shown: bool = False

    def __post_init__(self) -> None:
        if not all(self.strings):
            raise ValueError("an empty stop string would match everywhere")


class StopMatcher:
    """Reads the text of one output. Each output needs its own."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string ended it; after that the matcher is spent.

        `may_stop` False: stop strings that end in this text are not looked for, but one may begin in it."""
        buffer = self._held + text
        match = self._first_match(buffer, len(self._held)) if may_stop and text else None
        if match is not None:
            start, end = match
            return buffer[: end if self._stops.is_shown else start], True
        num_shown = self._first_beginning(buffer)
        self._held = buffer[num_shown:]
        return buffer[:num_shown], False

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, num_old: int) -> tuple[int, int] | None:
        """(start, end) of the match that ends first, behind the `num_old` characters that were looked at before."""
        matches = []
        for stop in self._stops.strings:
            start = buffer.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start))
        if not matches:
            return None
        end, start = min(matches)
        return start, end

    def _first_beginning(self, buffer: str) -> int:
        """Where the earliest stop string begins that the buffer may end inside of; its length if there is none."""
        return min((_beginning_of(stop, buffer) for stop in self._stops.strings), default=len(buffer))


def _beginning_of(stop: str, buffer: str) -> int:
    start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(buffer[start:]):
            return start
        start = buffer.find(stop[0], start + 1)
    return len(buffer)
