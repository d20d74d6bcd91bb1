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

from bisect import insort
from collections import abc, deque
from collections.abc import Iterator

from shared.base.block_hash import hash_seed
from shared.base.errors import CorruptTransfer, InvalidRequest, StaleTransfer
from shared.base.request import FinishReason, Output, Request, Token, finish_reason
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.limits import Limits
from shared.engine.schedule.lookahead import plan_ahead
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
        self._live: dict[str, list[Sequence]] = {}  # every unfinished sequence, by request
        self._num_arrivals = 0
        # In order of arrival:
        self._waiting: list[Sequence] = []
        self._asking: list[Sequence] = []
        self._running: list[Sequence] = []
        self._committed: dict[Sequence, abc.Sequence[SampledToken]] = {}  # with the first token of each output; in no order
        self._in_flight: deque[Plan] = deque()  # at most two, the second one made ahead
        self.num_preemptions = 0  # since the start

    # --- arrivals and departures

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence in line. Raises InvalidRequest, naming the parameter, if it can never be served here."""
        self._accept(sequence)
        self._waiting.append(sequence)

    def reserve(self, request: Request) -> Sequence:
        """Puts a request in line for blocks for all of its tokens, which a prefill worker will fill; `grant` gives them.

        The first `num_computed_tokens` of a granted sequence are already in the prefix cache, possibly every full block: nothing
        of them is recomputed. Raises InvalidRequest as `add` does.
        """
        sequence = Sequence(request, status=Status.ASKING)
        self._accept(sequence)
        self._asking.append(sequence)
        return sequence

    def grant(self) -> list[Sequence]:
        """Gives those that ask for blocks as many as there are, in order. To be called after everything that frees blocks or
        shortens a line. Returns those that have become RESERVED."""
        granted: list[Sequence] = []
        while self._asking and self._grant(self._asking[0]):
            granted.append(self._asking.pop(0))
        return granted

    def commit(self, request_id: str, tokens: abc.Sequence[SampledToken], num_cached_tokens: int) -> list[Output]:
        """The reservation's blocks are complete; `tokens` holds the next token of each of its n outputs, which may end with it.
        `num_cached_tokens` of the prompt were cached where it was computed. Returns the outputs of all sequences that this gives a
        seat, or that need none because they have ended.

        Raises StaleTransfer if nothing is reserved under this id, CorruptTransfer if the number of tokens is not n.
        """
        sequence = self._find(request_id, Status.RESERVED)
        if sequence is None:
            raise StaleTransfer(f"nothing is reserved for request {request_id}")
        if len(tokens) != sequence.request.sampling.n:
            raise CorruptTransfer(f"commit has {len(tokens)} first tokens for {sequence.request.sampling.n} outputs")
        self.blocks.mark_computed(sequence, sequence.num_tokens)
        sequence.num_cached_tokens = num_cached_tokens
        sequence.status = Status.COMMITTED
        self._committed[sequence] = tokens
        return self._seat(sequence) if self._ends_with(sequence, tokens) else self._seat_committed()

    def release(self, request_id: str) -> None:
        """A held request's blocks have arrived elsewhere. They stay cached here. Nothing happens if it is not held (any more)."""
        sequence = self._find(request_id, Status.HELD)
        if sequence is not None:
            self._retire(sequence)

    def abort(self, request_id: str) -> bool:
        """Ends a request and all its outputs, whatever its state; False if it is not live. Whoever sends or receives its blocks
        must have stopped before."""
        sequences = list(self._live.get(request_id, ()))
        for sequence in sequences:
            self._retire(sequence)
        return bool(sequences)

    def stop_choice(self, request_id: str, choice: int) -> bool:
        """Ends one of a request's outputs, because nobody will read more of it; the others go on. False if it is not live."""
        sequences = self._live.get(request_id, [])
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
        scheduled = [_scheduled(sequence, 1) for sequence in decodes]
        budget = self._limits.max_num_batched_tokens - len(scheduled)
        for sequence in self._running:
            if budget and sequence.num_uncomputed_tokens > 1:
                scheduled.append(_scheduled(sequence, min(budget, sequence.num_uncomputed_tokens)))
                budget -= scheduled[-1].num_tokens
        scheduled.extend(self._admit(budget))
        if not self._running and self._committed:
            self._preempt(max(self._committed, key=_order))
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
        return bool(self._running or self._committed) or (bool(self._waiting) and self._can_admit(self._waiting[0]))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """In line for blocks or a seat, those asked for by prefill workers included."""
        return len(self._waiting) + len(self._asking) + len(self._committed)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to be computed before every running and waiting sequence is a decode: the backlog of prompts and recomputation."""
        return sum(max(0, s.num_uncomputed_tokens - 1) for s in (*self._waiting, *self._running))

    @property
    def num_reserved(self) -> int:
        return self._count(Status.RESERVED)

    @property
    def num_held(self) -> int:
        return self._count(Status.HELD)

    def sequences(self) -> list[Sequence]:
        """All that have not finished."""
        return [sequence for choices in self._live.values() for sequence in choices]

    def check(self) -> None:
        """Recounts blocks and states. Raises AssertionError on the first discrepancy."""
        live = self.sequences()
        in_flight = dict.fromkeys(item.sequence for plan in self._in_flight for item in plan.scheduled)
        assert all(sequence.block_table for sequence in in_flight), "blocks that a step writes to have been freed"
        self.blocks.check([*live, *(sequence for sequence in in_flight if sequence.status is Status.FINISHED)])
        lines = {
            Status.WAITING: self._waiting,
            Status.ASKING: self._asking,
            Status.COMMITTED: sorted(self._committed, key=_order),
            Status.RUNNING: self._running,
        }
        for status, members in lines.items():
            assert members == sorted(members, key=_order), f"{status.name} is not in order of arrival"
            assert len(members) == self._count(status), f"{len(members)} sequences in line, {self._count(status)} are {status.name}"
            assert all(sequence.status is status for sequence in members), f"a sequence in line is not {status.name}"
        assert self._num_free_seats >= 0, "more sequences run than there are seats"
        for sequence in live:
            assert sequence.status is not Status.FINISHED, f"{sequence.id} has finished but is live"
            has_blocks = sequence.status not in (Status.WAITING, Status.ASKING)
            assert bool(sequence.block_table) == has_blocks, f"{sequence.id}: blocks in wrong state"
            if sequence.status is Status.RUNNING:
                assert sequence.num_uncomputed_tokens, f"{sequence.id} has nothing to compute"
            assert sequence.num_tokens < self._limits.max_model_len, f"{sequence.id} is too long"

    # --- who is next

    @property
    def _num_free_seats(self) -> int:
        return self._limits.max_num_seqs - sum(sequence.num_seats for sequence in self._running)

    def _grant(self, sequence: Sequence) -> bool:
        """Gives one that asks its blocks, unless that takes from the first in line what it needs."""
        num_spare = self._num_spare_blocks()
        if self._waiting and self._waiting[0].order < sequence.order:
            num_spare += self.blocks.num_blocks_for(self._waiting[0].num_tokens)
        if not self._allocate(sequence, sequence.num_tokens, num_spare):
            return False
        sequence.status = Status.RESERVED
        return True

    def _next_committed(self) -> Sequence | None:
        """The oldest committed sequence, if there are seats for it."""
        oldest = min(self._committed, key=_order, default=None)
        if oldest is None:
            return None
        num_seats = oldest.num_seats
        if self._waiting and self._waiting[0].order < oldest.order:
            num_seats += self._waiting[0].num_seats
        return oldest if num_seats <= self._num_free_seats else None

    def _can_admit(self, first: Sequence) -> bool:
        """Whether the first in line finds seats and blocks."""
        return self._has_turn(first) and self.blocks.can_allocate(*self._newcomer(first))

    def _has_turn(self, first: Sequence) -> bool:
        """Whether there are seats for the first in line, and none older waits for them or for blocks."""
        others = (self._asking[:1], [min(self._committed, key=_order)] if self._committed else [])
        is_oldest = all(first.order < other.order for line in others for other in line)
        return is_oldest and first.num_seats <= self._num_free_seats

    def _newcomer(self, sequence: Sequence) -> tuple[Sequence, int, int]:
        """The terms of admission, as arguments of `allocate`: at least the last token is recomputed, because the next one is
        sampled from its logits."""
        return sequence, sequence.num_tokens - 1, self._num_spare_blocks()

    def _num_spare_blocks(self) -> int:
        """Left free by newcomers, so that running sequences can grow a while before they preempt."""
        num_growing = sum(1 for sequence in self._running if not sequence.hold)
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
        tokens = self._committed.pop(sequence)
        sequence.status = Status.RUNNING
        insort(self._running, sequence, key=_order)
        return self._append_all(sequence, tokens)

    def _make_room_for_decodes(self) -> list[Sequence]:
        """The decodes of this step, after preempting as many of the newest sequences as it takes for the blocks to suffice.

        All preemption comes before any `grow`, so that no block is freed after it became the source of a copy. It ends because only
        sequences that may be preempted need blocks: a held prompt got all of its own at admission.
        """
        while True:
            decodes = [sequence for sequence in self._running if sequence.num_uncomputed_tokens == 1]
            if self.blocks.num_blocks_to_grow(decodes) <= self.blocks.num_free_blocks:
                return decodes
            self._preempt(max((s for s in (*self._running, *self._committed) if not s.hold), key=_order))

    def _preempt(self, sequence: Sequence) -> None:
        """The first tokens of a committed sequence are forgotten: they will be sampled again, and come out the same."""
        self._leave_line(sequence)
        self.blocks.free(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, sequence, key=_order)

    def _grow(self, sequence: Sequence) -> list[tuple[int, int]]:
        copies = self.blocks.grow(sequence)
        assert copies is not None, "room was made"
        return copies

    def _admit(self, budget: int) -> Iterator[ScheduledSequence]:
        while budget and self._waiting:
            sequence = self._waiting[0]
            if not self._has_turn(sequence) or not self._allocate(*self._newcomer(sequence)):
                return
            del self._waiting[0]
            insort(self._running, sequence, key=_order)
            sequence.status = Status.RUNNING
            num_tokens = min(budget, sequence.num_uncomputed_tokens)
            budget -= num_tokens
            yield _scheduled(sequence, num_tokens)

    def _others_are_due(self, plan: Plan, ahead: Plan) -> bool:
        """Whether the step after `plan` may have sequences that `ahead`, its continuation, does not have."""
        planned = {item.sequence for item in plan.scheduled}
        if not planned.issuperset(self._running):
            return True
        if len(ahead.scheduled) < len(plan.scheduled):  # a sequence leaves
            return bool(self._waiting or self._committed)
        return self._next_committed() is not None or (bool(self._waiting) and self._can_admit(self._waiting[0]))

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
        output = self._output(sequence, sequence.choice, token)
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
        behind_parent = self._running.index(parent) + 1
        self._running[behind_parent:behind_parent] = siblings
        self._live[parent.id] += siblings
        return [parent, *siblings]

    def _hold(self, sequence: Sequence, tokens: abc.Sequence[SampledToken]) -> list[Output]:
        """Reports the first token of each output; where they are decoded they are appended, not here."""
        self._running.remove(sequence)
        sequence.status = Status.HELD
        return [self._output(sequence, choice, token) for choice, token in enumerate(tokens)]

    def _ends_with(self, sequence: Sequence, tokens: abc.Sequence[SampledToken]) -> bool:
        """Whether none of the sequence's outputs goes on after these tokens."""
        outputs = (self._output(sequence, choice, token) for choice, token in enumerate(tokens))
        return all(output.finish_reason or output.choice in sequence.stopped_choices for output in outputs)

    def _output(self, sequence: Sequence, choice: int, token: SampledToken) -> Output:
        """What is to be emitted for this next token of the sequence."""
        request, index = sequence.request, sequence.num_output_tokens
        reason = finish_reason(request.sampling, token.token_id, index)
        if reason is None and sequence.num_tokens + 1 >= self._limits.max_model_len:
            reason = FinishReason.LENGTH
        is_first = index == request.num_emitted
        num_cached_tokens = min(sequence.num_cached_tokens, request.num_prompt_tokens) if is_first else 0
        emitted = Token(index, token.token_id, token.logprob, token.top_logprobs)
        return Output(request.request_id, choice, (emitted,), reason, num_cached_tokens)

    # --- the book of live sequences

    def _accept(self, sequence: Sequence) -> None:
        """Notes an arrival. Raises InvalidRequest if the sequence can never be served."""
        self._limits.check_sequence(sequence)
        if sequence.id in self._live:
            raise InvalidRequest(f"request_id {sequence.id!r} is in use; it must be new", param="request_id")
        sequence.hash_seed = hash_seed(self._digest, sequence.request.cache_salt)
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._live[sequence.id] = [sequence]

    def _find(self, request_id: str, status: Status) -> Sequence | None:
        return next((sequence for sequence in self._live.get(request_id, ()) if sequence.status is status), None)

    def _retire(self, sequence: Sequence) -> None:
        """Takes a sequence out of everything. Its blocks are freed, at once or, if a step is writing to them, by `update`."""
        self._leave_line(sequence)
        sequence.status = Status.FINISHED
        choices = self._live[sequence.id]
        choices.remove(sequence)
        if not choices:
            del self._live[sequence.id]
        self._free_if_idle(sequence)

    def _leave_line(self, sequence: Sequence) -> None:
        if sequence.status is Status.COMMITTED:
            del self._committed[sequence]
        for status, line in (
            (Status.WAITING, self._waiting),
            (Status.ASKING, self._asking),
            (Status.RUNNING, self._running),
        ):
            if sequence.status is status:
                line.remove(sequence)

    def _free_if_idle(self, sequence: Sequence) -> None:
        """Frees the blocks of a finished sequence, unless a step in flight writes to them."""
        if not any(item.sequence is sequence for plan in self._in_flight for item in plan.scheduled):
            self.blocks.free(sequence)

    def _count(self, status: Status) -> int:
        return sum(1 for choices in self._live.values() for sequence in choices if sequence.status is status)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _scheduled(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    num_samples = 0
    if num_tokens == sequence.num_uncomputed_tokens:
        num_samples = sequence.request.sampling.n if sequence.is_forking else 1
    return ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens, num_samples)
