"""Every unfinished sequence, and the line that it stands in. A sequence's status says which; those that are reserved or held stand
in none. Who may leave a line, and when, is the scheduler's decision.
"""

from __future__ import annotations

from bisect import insort
from collections import abc

from shared.base.errors import InvalidRequest
from shared.engine.schedule.plan import SampledToken
from shared.engine.schedule.sequence import Sequence, Status


class Lines:
    """The lists are in order of arrival. Others read them, and change them by the methods only."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.asking: list[Sequence] = []
        self.running: list[Sequence] = []
        self.committed: dict[Sequence, abc.Sequence[SampledToken]] = {}  # with the first token of each output; in no order
        self._live: dict[str, list[Sequence]] = {}  # every unfinished sequence, by request
        self._num_arrivals = 0

    # --- who comes, moves and goes

    def join(self, sequence: Sequence) -> None:
        """Puts a new sequence, WAITING or ASKING, at the end of its line. Raises InvalidRequest if its id is in use."""
        if sequence.id in self._live:
            raise InvalidRequest(f"request_id {sequence.id!r} is in use; it must be new", param="request_id")
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._live[sequence.id] = [sequence]
        self._enter(sequence)

    def fork(self, parent: Sequence, siblings: abc.Sequence[Sequence]) -> None:
        """A running sequence's siblings, running as well, come to stand behind it."""
        behind_parent = self.running.index(parent) + 1
        self.running[behind_parent:behind_parent] = siblings
        self._live[parent.id] += siblings

    def commit(self, sequence: Sequence, tokens: abc.Sequence[SampledToken]) -> None:
        sequence.status = Status.COMMITTED
        self.committed[sequence] = tokens

    def move(self, sequence: Sequence, status: Status) -> None:
        """Out of its line, and into that of its new status if there is one."""
        self._leave(sequence)
        sequence.status = status
        self._enter(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.move(sequence, Status.FINISHED)
        choices = self._live[sequence.id]
        choices.remove(sequence)
        if not choices:
            del self._live[sequence.id]

    # --- who is there

    @property
    def num_seats_taken(self) -> int:
        return sum(sequence.num_seats for sequence in self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.asking) + len(self.committed)

    def of(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request."""
        return list(self._live.get(request_id, ()))

    def find(self, request_id: str, status: Status) -> Sequence | None:
        return next((sequence for sequence in self._live.get(request_id, ()) if sequence.status is status), None)

    def all(self) -> list[Sequence]:
        return [sequence for choices in self._live.values() for sequence in choices]

    def count(self, status: Status) -> int:
        return sum(1 for choices in self._live.values() for sequence in choices if sequence.status is status)

    def oldest_committed(self) -> Sequence | None:
        return min(self.committed, key=order, default=None)

    def check(self) -> None:
        """Raises AssertionError if a line and the states of its members differ."""
        lines = {
            Status.WAITING: self.waiting,
            Status.ASKING: self.asking,
            Status.COMMITTED: sorted(self.committed, key=order),
            Status.RUNNING: self.running,
        }
        for status, members in lines.items():
            assert members == sorted(members, key=order), f"{status.name} is not in order of arrival"
            assert len(members) == self.count(status), f"{len(members)} sequences in line, {self.count(status)} are {status.name}"
            assert all(sequence.status is status for sequence in members), f"a sequence in line is not {status.name}"
        for sequence in self.all():
            assert sequence.status is not Status.FINISHED, f"{sequence.id} has finished but is live"

    def _enter(self, sequence: Sequence) -> None:
        line = self._line(sequence.status)
        if line is not None:
            insort(line, sequence, key=order)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.status is Status.COMMITTED:
            del self.committed[sequence]
        line = self._line(sequence.status)
        if line is not None:
            line.remove(sequence)

    def _line(self, status: Status) -> list[Sequence] | None:
        if status is Status.WAITING:
            return self.waiting
        if status is Status.ASKING:
            return self.asking
        return self.running if status is Status.RUNNING else None


def order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
