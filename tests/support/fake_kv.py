"""A model for scheduler tests: its KV cache is real, block by block, and its tokens depend on nothing but the tokens before.

The KV of a token is a hash of the whole prefix that ends with it. So every slot has exactly one right value, and a step that
reads a block which was never written, was overwritten or belongs to another prefix is caught at once. The next token is a function
of that hash and of the choice, so that an output does not depend on how the scheduler came to it.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

from shared.base.request import FinishReason, Request, finish_reason
from shared.engine.schedule.plan import Plan, SampledToken
from shared.engine.schedule.sequence import Sequence
from tests.support.launched import Launched, Work

VOCABULARY = 12
_Result = tuple[list[int], FinishReason]


def prefix_values(token_ids: Row[int]) -> list[int]:
    values, value = [], 0
    for token_id in token_ids:
        value = hash((value, token_id))
        values.append(value)
    return values


def next_token(value: int, choice: int) -> SampledToken:
    return SampledToken(hash((value, choice)) % VOCABULARY)


def first_tokens(token_ids: Row[int], n: int) -> list[SampledToken]:
    value = prefix_values(token_ids)[-1]
    return [next_token(value, choice) for choice in range(n)]


def solo_outputs(request: Request, max_model_len: int) -> list[_Result]:
    """What each of the request's n outputs must be, from first principles: no scheduler, no blocks."""
    return [_solo_output(request, choice, max_model_len) for choice in range(request.sampling.n)]


def _solo_output(request: Request, choice: int, max_model_len: int) -> _Result:
    token_ids = list(request.token_ids)
    value = prefix_values(token_ids)[-1]
    while True:
        token_id = next_token(value, choice).token_id
        token_ids.append(token_id)
        value = hash((value, token_id))
        index = len(token_ids) - request.num_prompt_tokens - 1
        reason = finish_reason(request.sampling, token_id, index)
        if reason is None and len(token_ids) == max_model_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            return token_ids[len(request.token_ids) :], reason


class FakeModel:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._kv: dict[tuple[int, int], int] = {}  # (block, offset) -> value
        self._sampled: list[list[SampledToken]] = []  # by the step computed last

    def execute(self, plan: Plan) -> list[list[SampledToken]]:
        return self.compute(self.launch(plan))

    def launch(self, plan: Plan) -> Launched:
        """To be computed later, in the order of launches."""
        return Launched.of(plan)

    def compute(self, launched: Launched) -> list[list[SampledToken]]:
        """Copies, then writes of all, then reads of all: a step in the order least kind to a scheduler that mixes blocks up."""
        self._copy(launched.plan.copies)
        launched.take(self._sampled)
        for work in launched.works:
            self._write(work.block_table, work.token_ids, work.item.start)
        for work in launched.works:
            self._verify(work.block_table, work.token_ids, work.item.sequence.id)
        self._sampled = [_sample(work) for work in launched.works]
        return self._sampled

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        self._write(sequence.block_table, sequence.token_ids[:end], start)

    def verify(self, sequence: Sequence, end: int) -> None:
        """The blocks of the sequence hold the KV of exactly its first `end` tokens."""
        self._verify(sequence.block_table, sequence.token_ids[:end], sequence.id)

    def _copy(self, copies: Row[tuple[int, int]]) -> None:
        sources = {source for source, _ in copies}
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets), "two copies to one block"
        assert not sources & set(targets), "the target of a copy is the source of another"
        for source, target in copies:
            for offset in range(self._block_size):
                self._kv.pop((target, offset), None)
                if (source, offset) in self._kv:
                    self._kv[target, offset] = self._kv[source, offset]

    def _write(self, block_table: Row[int], token_ids: Row[int], start: int) -> None:
        for position, value in enumerate(prefix_values(token_ids)[start:], start):
            self._kv[self._slot(block_table, position)] = value

    def _verify(self, block_table: Row[int], token_ids: Row[int], name: str) -> None:
        for position, value in enumerate(prefix_values(token_ids)):
            found = self._kv.get(self._slot(block_table, position))
            assert found == value, f"{name}: wrong KV at {position} of {len(token_ids)}"

    def _slot(self, block_table: Row[int], position: int) -> tuple[int, int]:
        return block_table[position // self._block_size], position % self._block_size


def _sample(work: Work) -> list[SampledToken]:
    if work.item.num_samples == 0:
        return []
    if work.is_forking:
        return first_tokens(work.token_ids, work.item.num_samples)
    return [next_token(prefix_values(work.token_ids)[-1], work.item.sequence.choice)]
