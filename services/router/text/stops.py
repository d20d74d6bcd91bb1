"""Finding stop strings in text that arrives in pieces, holding back no more than could still become one.

Each stop string is followed by its own Knuth-Morris-Pratt automaton (Knuth, Morris, Pratt 1977), whose state is how much of the
string the text read so far ends with. The largest state is therefore exactly the text to hold back, and each character is read
once. What is found does not depend on how the text was cut into pieces: the match that ends first wins, and of several that end
together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Reads the text of one output. Give each output its own, or `fork` one that is fresh."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: the stop string is part of the text that is released."""
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = stops
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._include_stop = include_stop
        self._states = [0] * len(stops)
        self._held = ""

    def fork(self) -> StopMatcher:
        """A matcher for another output: shares the tables, starts afresh."""
        other = object.__new__(StopMatcher)
        other._stops, other._fallbacks, other._include_stop = self._stops, self._fallbacks, self._include_stop
        other._states, other._held = [0] * len(self._stops), ""
        return other

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string ended it. After that the matcher is spent."""
        buffer = self._held + text
        match = self._scan(text)
        if match is not None:
            end, length = match
            stop_end = len(self._held) + end
            return buffer[: stop_end if self._include_stop else stop_end - length], True
        num_shown = len(buffer) - max(self._states)
        self._held = buffer[num_shown:]
        return buffer[:num_shown], False

    def flush(self) -> str:
        """The text held back, when no more will come."""
        return self._held

    def _scan(self, text: str) -> tuple[int, int] | None:
        """(end within text, length) of the first match, or None."""
        first: tuple[int, int] | None = None
        for i, (stop, fallbacks) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            end = self._scan_one(i, stop, fallbacks, text if first is None else text[: first[0]])
            if end is not None and (first is None or end < first[0] or len(stop) > first[1]):
                first = (end, len(stop))
        return first

    def _scan_one(self, i: int, stop: str, fallbacks: list[int], text: str) -> int | None:
        state = self._states[i]
        for position, char in enumerate(text):
            while state and stop[state] != char:
                state = fallbacks[state]
            if stop[state] == char:
                state += 1
                if state == len(stop):
                    return position + 1
        self._states[i] = state
        return None


def _fallbacks(pattern: str) -> list[int]:
    """table[k]: length of the longest proper prefix of pattern that pattern[:k] also ends with."""
    table = [0] * len(pattern)
    length = 0
    for k in range(1, len(pattern) - 1):
        while length and pattern[k] != pattern[length]:
            length = table[length]
        if pattern[k] == pattern[length]:
            length += 1
        table[k + 1] = length
    return table
