"""A model for scheduler tests: its KV cache is real, block by block, and its tokens depend on nothing but the tokens before.

The KV of a token is a hash of the whole prefix that ends with it. So every slot has exactly one right value, and a step that
reads a block which was never written, was overwritten or belongs to another prefix is caught at once. The next token is a function
of that hash and of the choice, so that an output does not depend on how the scheduler came to it.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

from shared.engine.plan import Plan, SampledToken
from shared.engine.sequence import Sequence
from shared.request import FinishReason, Request, finish_reason

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

    def execute(self, plan: Plan, on_layer: object = None) -> list[list[SampledToken]]:
        """Copies, then writes of all, then reads of all: a step in the order least kind to a scheduler that mixes blocks up."""
        sources = {source for source, _ in plan.copies}
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets), "two copies to one block"
        assert not sources & set(targets), "the target of a copy is the source of another"
        for source, target in plan.copies:
            for offset in range(self._block_size):
                self._kv.pop((target, offset), None)
                if (source, offset) in self._kv:
                    self._kv[target, offset] = self._kv[source, offset]
        for item in plan.scheduled:
            self.write(item.sequence, item.start, item.start + item.num_tokens)
        samples = []
        for item in plan.scheduled:
            self.verify(item.sequence, item.start + item.num_tokens)
            samples.append(self._sample(item.sequence, item.num_samples))
        return samples

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        values = prefix_values(sequence.token_ids[:end])
        for position in range(start, end):
            self._kv[self._slot(sequence, position)] = values[position]

    def verify(self, sequence: Sequence, end: int) -> None:
        """The blocks of the sequence hold the KV of exactly its first `end` tokens."""
        for position, value in enumerate(prefix_values(sequence.token_ids[:end])):
            found = self._kv.get(self._slot(sequence, position))
            assert found == value, f"{sequence.id} choice {sequence.choice}: wrong KV at {position} of {end}"

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self._block_size], position % self._block_size

    def _sample(self, sequence: Sequence, num_samples: int) -> list[SampledToken]:
        if num_samples == 0:
            return []
        if sequence.is_forking:
            return first_tokens(sequence.token_ids, num_samples)
        return [next_token(prefix_values(sequence.token_ids)[-1], sequence.choice)]
