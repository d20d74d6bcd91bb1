"""Which tokens the next step computes. Pure: state in, plan out; no clock, no thread, no torch. The engine's lock protects it.

    add ─────> WAITING ──admit──> RUNNING ──finish──> FINISHED
                  ^──preempt────────┘ ^ └─(hold)─> HELD ──release──> FINISHED
    reserve ─> ASKING ──grant──> RESERVED ──commit──> COMMITTED ──seat──> RUNNING          abort: from anywhere to FINISHED

There is no prefill step and no decode step. A step has one budget of tokens; `schedule` spends it in this order:

1. one token for every running sequence that lacks only one ("decodes"): a stream never waits for another one's prompt. If blocks
   run out, the newest sequence gives up its own and goes back in line; its tokens are recomputed later, not emitted again;
2. chunks for running sequences that lack more, oldest first;
3. newcomers.

Seats and blocks go by arrival, whatever way a sequence came: new, preempted, continued, or handed over by a prefill worker. There
are `max_num_seqs` seats; a running sequence has one, and takes part in every step. A handed-over sequence takes its blocks before
its seat, and its first token is passed on with the seat: what waits for a seat waits before its first token. The rules, where
"first in line" is the oldest waiting sequence:

- Blocks. The first in line is not overtaken by another waiting one. A reservation may be granted before it only while it lacks
  nothing but a seat, and leaves it its blocks. It takes no blocks itself before an older reservation that asks for some.
- Seats. The first in line keeps those it needs from younger committed sequences, even while it lacks blocks or budget. An older
  committed sequence keeps them from it.
- If this leaves nothing that runs, the newest committed sequence gives up its blocks and goes back in line.

Why there is always progress, and nothing starves: consider the oldest of all sequences that are not held or reserved. One sequence
of the greatest length fits the pool (checked at construction), and only the newest is preempted. So if it runs, it keeps its blocks
and advances in every step until it ends. If it is committed, the next free seats are its own. If it waits or asks, no other
sequence is given the blocks that come back, or the seats; those that have seats advance, the oldest of them in every step, and
end. Blocks that are held or reserved come back when their transfer ends or its deadline passes, which is their owner's duty.
Arrival numbers only grow, so each sequence becomes the oldest.

Between `schedule` and `update` every other method may be called. Meanwhile `schedule_ahead` may plan one step more
(`shared/engine/schedule/lookahead.py`). Blocks of a plan in flight are freed by the `update` of the last plan that has them, not
before: a step that was launched ahead for a sequence that has ended still writes to them.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterator

from shared.base.block_hash import hash_seed
from shared.base.errors import CorruptTransfer, StaleTransfer
from shared.base.request import Output, Request
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.limits import Limits
from shared.engine.schedule.lines import Lines, order
from shared.engine.schedule.lookahead import plan_ahead
from shared.engine.schedule.outputs import ends_with, next_output
from shared.engine.schedule.plan import Event, Plan, Progress, SampledToken, ScheduledSequence
from shared.engine.schedule.sequence import Sequence, Status

MAX_SPARE_BLOCKS = 64  # enough that growth rarely preempts, little enough not to matter in a real pool


class Scheduler:
    """Raises ConfigError if the limits do not fit each other or the pool. `digest` is the worker's, the root of block hashes."""

    def __init__(
        self, blocks: BlockManager, *, digest: str, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self._limits = Limits(max_num_seqs, max_num_batched_tokens, max_model_len)
        self._limits.check_pool(blocks.num_usable_blocks * blocks.block_size)
        self.blocks = blocks
        self._digest = digest
        self._lines = Lines()
        self._in_flight: deque[Plan] = deque()  # at most two, the second one made ahead
        self.num_preemptions = 0  # since the start

    # --- arrivals and departures

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence in line. Raises InvalidRequest, naming the parameter, if it can never be served here."""
        self._accept(sequence)

    def reserve(self, request: Request) -> Sequence:
        """Puts a request in line for blocks for all of its tokens, which a prefill worker will fill; `grant` gives them.

        The first `num_computed_tokens` of a granted sequence are already in the prefix cache, possibly every full block: nothing
        of them is recomputed. Raises InvalidRequest as `add` does.
        """
        sequence = Sequence(request, status=Status.ASKING)
        self._accept(sequence)
        return sequence

    def grant(self) -> list[Sequence]:
        """Gives those that ask for blocks as many as there are, in order. To be called after everything that frees blocks or
        shortens a line. Returns those that have become RESERVED."""
        granted: list[Sequence] = []
        while self._lines.asking and self._grant(first := self._lines.asking[0]):
            granted.append(first)
        return granted

    def commit(self, request_id: str, tokens: abc.Sequence[SampledToken], num_cached_tokens: int) -> list[Output]:
        """The reservation's blocks are complete; `tokens` holds the next token of each of its n outputs, which may end with it.
        `num_cached_tokens` of the prompt were cached where it was computed. Returns the outputs of all sequences that this gives a
        seat, or that need none because they have ended.

        Raises StaleTransfer if nothing is reserved under this id, CorruptTransfer if the number of tokens is not n.
        """
        sequence = self._lines.find(request_id, Status.RESERVED)
        if sequence is None:
            raise StaleTransfer(f"nothing is reserved for request {request_id}")
        if len(tokens) != sequence.request.sampling.n:
            raise CorruptTransfer(f"commit has {len(tokens)} first tokens for {sequence.request.sampling.n} outputs")
        self.blocks.mark_computed(sequence, sequence.num_tokens)
        sequence.num_cached_tokens = num_cached_tokens
        self._lines.commit(sequence, tokens)
        return self._seat(sequence) if ends_with(sequence, tokens, self._limits.max_model_len) else self._seat_committed()

    def release(self, request_id: str) -> None:
        """A held request's blocks have arrived elsewhere. They stay cached here. Nothing happens if it is not held (any more)."""
        sequence = self._lines.find(request_id, Status.HELD)
        if sequence is not None:
            self._retire(sequence)

    def abort(self, request_id: str) -> bool:
        """Ends a request and all its outputs, whatever its state; False if it is not live. Whoever sends or receives its blocks
        must have stopped before."""
        sequences = self._lines.of(request_id)
        for sequence in sequences:
            self._retire(sequence)
        return bool(sequences)

    def stop_choice(self, request_id: str, choice: int) -> bool:
        """Ends one of a request's outputs, because nobody will read more of it; the others go on. False if it is not live."""
        sequences = self._lines.of(request_id)
        unborn = next((s for s in sequences if s.is_forking or s.status in (Status.ASKING, Status.RESERVED)), None)
        if unborn is not None:
            is_new = choice < unborn.request.sampling.n and choice not in unborn.stopped_choices
            if is_new:
                unborn.stopped_choices.add(choice)
            return is_new
        sequence = next((s for s in sequences if s.choice == choice), None)
        if sequence is not None:
            self._retire(sequence)
        return sequence is not None

    # --- one step: schedule, then (elsewhere) copies, forward pass and sampling, then update; between them, the step after it

    def schedule(self) -> Plan:
        """The next step. Without sequences, it needs no update: a preemption made room, and nothing else could be done."""
        assert not self._in_flight, "the last plan has not been updated"
        outputs = self._seat_committed()
        decodes = self._make_room_for_decodes()
        copies = [copy for sequence in decodes for copy in self._grow(sequence)]
        scheduled = [ScheduledSequence.next_of(sequence, 1) for sequence in decodes]
        budget = self._limits.max_num_batched_tokens - len(scheduled)
        for sequence in self._lines.running:
            if budget and sequence.num_uncomputed_tokens > 1:
                scheduled.append(ScheduledSequence.next_of(sequence, min(budget, sequence.num_uncomputed_tokens)))
                budget -= scheduled[-1].num_tokens
        scheduled.extend(self._admit(budget))
        if not self._lines.running and self._lines.committed:
            self._preempt(max(self._lines.committed, key=order))
        scheduled.sort(key=lambda item: item.num_tokens > 1)  # stable: single tokens first
        plan = Plan(tuple(scheduled), tuple(copies), outputs=tuple(outputs))
        if scheduled:
            self._in_flight.append(plan)
        return plan

    def schedule_ahead(self) -> Plan | None:
        """The step after the one in flight, if it can be planned and `schedule` would have nothing better to do than to go on."""
        (plan,) = self._in_flight
        ahead = plan_ahead(plan, self._limits.max_model_len)
        if ahead is None or self._others_are_due(plan, ahead):
            return None
        full = [s.sequence for s in ahead.scheduled if s.start == len(s.sequence.block_table) * self.blocks.block_size]
        if not self.blocks.append_blocks(full):
            return None
        self._in_flight.append(ahead)
        return ahead

    def update(self, plan: Plan, samples: abc.Sequence[abc.Sequence[SampledToken]]) -> list[Event]:
        """Takes over what a step gave. samples[i] holds `plan.scheduled[i].num_samples` tokens; those of a sequence aborted since
        `schedule` are not looked at."""
        oldest = self._in_flight.popleft()
        assert plan is oldest, "another plan has been in flight for longer"
        events: list[Event] = []
        for item, tokens in zip(plan.scheduled, samples, strict=True):
            sequence = item.sequence
            if sequence.status is Status.FINISHED:  # aborted during the step, or ended by the one before
                self._free_if_idle(sequence)
                continue
            self.blocks.mark_computed(sequence, item.end)
            if sequence.hold:
                events.append(Progress(sequence.id, sequence.num_computed_tokens))
            if item.num_samples:
                events.extend(self._hold(sequence, tokens) if sequence.hold else self._append_all(sequence, tokens))
        return events

    def discard(self, plan: Plan) -> None:
        """The step failed and counts for nothing, nor does one made ahead of its end: those in it that have been aborted give their
        blocks back, the others are due again. One of these whose block was to be copied starts over, because it is not known
        whether the copy was made."""
        assert plan is self._in_flight[0], "another plan has been in flight for longer"
        self._in_flight.clear()
        targets = {target for _, target in plan.copies}
        for item in plan.scheduled:
            sequence = item.sequence
            if sequence.status is Status.FINISHED:
                self.blocks.free(sequence)
            elif not targets.isdisjoint(sequence.block_table):
                self._preempt(sequence)

    # --- what there is

    @property
    def has_work(self) -> bool:
        """Whether `schedule` has something to do. False also while the line waits for blocks that only a release, commit or abort
        can free."""
        return bool(self._lines.running or self._lines.committed) or (
            bool(self._lines.waiting) and self._can_admit(self._lines.waiting[0])
        )

    @property
    def num_running(self) -> int:
        return len(self._lines.running)

    @property
    def num_waiting(self) -> int:
        """In line for blocks or a seat, those asked for by prefill workers included."""
        return self._lines.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to be computed before every running and waiting sequence is a decode: the backlog of prompts and recomputation."""
        return sum(max(0, s.num_uncomputed_tokens - 1) for s in (*self._lines.waiting, *self._lines.running))

    @property
    def num_reserved(self) -> int:
        return self._lines.count(Status.RESERVED)

    @property
    def num_held(self) -> int:
        return self._lines.count(Status.HELD)

    def sequences(self) -> list[Sequence]:
        """All that have not finished."""
        return self._lines.all()

    def check(self) -> None:
        """Recounts blocks and states. Raises AssertionError on the first discrepancy."""
        live = self.sequences()
        in_flight = dict.fromkeys(item.sequence for plan in self._in_flight for item in plan.scheduled)
        assert all(sequence.block_table for sequence in in_flight), "blocks that a step writes to have been freed"
        self.blocks.check([*live, *(sequence for sequence in in_flight if sequence.status is Status.FINISHED)])
        self._lines.check()
        assert self._num_free_seats >= 0, "more sequences run than there are seats"
        for sequence in live:
            has_blocks = sequence.status not in (Status.WAITING, Status.ASKING)
            assert bool(sequence.block_table) == has_blocks, f"{sequence.id}: blocks in wrong state"
            if sequence.status is Status.RUNNING:
                assert sequence.num_uncomputed_tokens, f"{sequence.id} has nothing to compute"
            assert sequence.num_tokens < self._limits.max_model_len, f"{sequence.id} is too long"

    # --- who is next

    @property
    def _num_free_seats(self) -> int:
        return self._limits.max_num_seqs - self._lines.num_seats_taken

    def _grant(self, sequence: Sequence) -> bool:
        """Gives one that asks its blocks, unless that takes from the first in line what it needs."""
        num_spare = self._num_spare_blocks()
        if self._lines.waiting and self._lines.waiting[0].order < sequence.order:
            num_spare += self.blocks.num_blocks_for(self._lines.waiting[0].num_tokens)
        if not self._allocate(sequence, sequence.num_tokens, num_spare):
            return False
        self._lines.move(sequence, Status.RESERVED)
        return True

    def _next_committed(self) -> Sequence | None:
        """The oldest committed sequence, if there are seats for it."""
        oldest = self._lines.oldest_committed()
        if oldest is None:
            return None
        num_seats = oldest.num_seats
        if self._lines.waiting and self._lines.waiting[0].order < oldest.order:
            num_seats += self._lines.waiting[0].num_seats
        return oldest if num_seats <= self._num_free_seats else None

    def _can_admit(self, first: Sequence) -> bool:
        """Whether the first in line finds seats and blocks."""
        return self._has_turn(first) and self.blocks.can_allocate(*self._newcomer(first))

    def _has_turn(self, first: Sequence) -> bool:
        """Whether there are seats for the first in line, and none older waits for them or for blocks."""
        others = (*self._lines.asking[:1], self._lines.oldest_committed())
        is_oldest = all(other is None or first.order < other.order for other in others)
        return is_oldest and first.num_seats <= self._num_free_seats

    def _newcomer(self, sequence: Sequence) -> tuple[Sequence, int, int]:
        """The terms of admission, as arguments of `allocate`: at least the last token is recomputed, because the next one is
        sampled from its logits."""
        return sequence, sequence.num_tokens - 1, self._num_spare_blocks()

    def _num_spare_blocks(self) -> int:
        """Left free by newcomers, so that running sequences can grow a while before they preempt."""
        num_growing = sum(1 for sequence in self._lines.running if not sequence.hold)
        return min(num_growing, MAX_SPARE_BLOCKS)

    def _allocate(self, sequence: Sequence, max_cached_tokens: int, num_spare_blocks: int) -> bool:
        if not self.blocks.allocate(sequence, max_cached_tokens, num_spare_blocks):
            return False
        if sequence.num_preemptions == 0:  # what a preempted sequence finds again is mostly its own
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    # --- the steps of schedule

    def _seat_committed(self) -> list[Output]:
        outputs: list[Output] = []
        while (sequence := self._next_committed()) is not None:
            outputs += self._seat(sequence)
        return outputs

    def _seat(self, sequence: Sequence) -> list[Output]:
        tokens = self._lines.committed[sequence]
        self._lines.move(sequence, Status.RUNNING)
        return self._append_all(sequence, tokens)

    def _make_room_for_decodes(self) -> list[Sequence]:
        """The decodes of this step, after preempting as many of the newest sequences as it takes for the blocks to suffice.

        All preemption comes before any `grow`, so that no block is freed after it became the source of a copy. It ends because only
        sequences that may be preempted need blocks: a held prompt got all of its own at admission.
        """
        while True:
            decodes = [sequence for sequence in self._lines.running if sequence.num_uncomputed_tokens == 1]
            if self.blocks.num_blocks_to_grow(decodes) <= self.blocks.num_free_blocks:
                return decodes
            self._preempt(max((s for s in (*self._lines.running, *self._lines.committed) if not s.hold), key=order))

    def _preempt(self, sequence: Sequence) -> None:
        """The first tokens of a committed sequence are forgotten: they will be sampled again, and come out the same."""
        self.blocks.free(sequence)
        self._lines.move(sequence, Status.WAITING)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _grow(self, sequence: Sequence) -> list[tuple[int, int]]:
        copies = self.blocks.grow(sequence)
        assert copies is not None, "room was made"
        return copies

    def _admit(self, budget: int) -> Iterator[ScheduledSequence]:
        while budget and self._lines.waiting:
            sequence = self._lines.waiting[0]
            if not self._has_turn(sequence) or not self._allocate(*self._newcomer(sequence)):
                return
            self._lines.move(sequence, Status.RUNNING)
            num_tokens = min(budget, sequence.num_uncomputed_tokens)
            budget -= num_tokens
            yield ScheduledSequence.next_of(sequence, num_tokens)

    def _others_are_due(self, plan: Plan, ahead: Plan) -> bool:
        """Whether the step after `plan` may have sequences that `ahead`, its continuation, does not have."""
        planned = {item.sequence for item in plan.scheduled}
        if not planned.issuperset(self._lines.running):
            return True
        if len(ahead.scheduled) < len(plan.scheduled):  # a sequence leaves
            return bool(self._lines.waiting or self._lines.committed)
        return self._next_committed() is not None or (bool(self._lines.waiting) and self._can_admit(self._lines.waiting[0]))

    # --- the steps of update

    def _append_all(self, sequence: Sequence, tokens: abc.Sequence[SampledToken]) -> list[Output]:
        """Extends the sequence by one token, or makes n sequences of it and extends each by its own."""
        choices = self._fork(sequence) if sequence.is_forking else (sequence,)
        outputs = []
        for choice, token in zip(choices, tokens, strict=True):
            if choice.choice in sequence.stopped_choices:
                self._retire(choice)
            else:
                outputs.append(self._append(choice, token))
        return outputs

    def _append(self, sequence: Sequence, token: SampledToken) -> Output:
        output = next_output(sequence, sequence.choice, token, self._limits.max_model_len)
        sequence.token_ids.append(token.token_id)
        if output.finish_reason is not None:
            sequence.finish_reason = output.finish_reason
            self._retire(sequence)
        return output

    def _fork(self, parent: Sequence) -> abc.Sequence[Sequence]:
        """The parent and its n - 1 siblings, which share its blocks and stand next to it in line."""
        siblings = []
        for choice in range(1, parent.request.sampling.n):
            sibling = Sequence(parent.request, choice, status=Status.RUNNING, arrival=parent.arrival)
            sibling.hash_seed, sibling.num_cached_tokens = parent.hash_seed, parent.num_cached_tokens
            self.blocks.fork(parent, sibling)
            siblings.append(sibling)
        self._lines.fork(parent, siblings)
        return [parent, *siblings]

    def _hold(self, sequence: Sequence, tokens: abc.Sequence[SampledToken]) -> list[Output]:
        """Reports the first token of each output; where they are decoded they are appended, not here."""
        self._lines.move(sequence, Status.HELD)
        return [next_output(sequence, choice, token, self._limits.max_model_len) for choice, token in enumerate(tokens)]

    # --- who comes and goes

    def _accept(self, sequence: Sequence) -> None:
        """Puts an arrival in line. Raises InvalidRequest if the sequence can never be served."""
        self._limits.check_sequence(sequence)
        self._lines.join(sequence)
        sequence.hash_seed = hash_seed(self._digest, sequence.request.cache_salt)

    def _retire(self, sequence: Sequence) -> None:
        """Takes a sequence out of everything. Its blocks are freed, at once or, if a step is writing to them, by `update`."""
        self._lines.finish(sequence)
        self._free_if_idle(sequence)

    def _free_if_idle(self, sequence: Sequence) -> None:
        """Frees the blocks of a finished sequence, unless a step in flight writes to them."""
        if not any(item.sequence is sequence for plan in self._in_flight for item in plan.scheduled):
            self.blocks.free(sequence)
