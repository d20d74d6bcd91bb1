"""What goes out for a sequence's next token, and whether its output ends with it."""

from __future__ import annotations

from collections.abc import Sequence as Row

from shared.base.request import FinishReason, Output, Token, finish_reason
from shared.engine.schedule.plan import SampledToken
from shared.engine.schedule.sequence import Sequence


def next_output(sequence: Sequence, choice: int, token: SampledToken, max_model_len: int) -> Output:
    """What is to be emitted for this next token of the sequence."""
    request, index = sequence.request, sequence.num_output_tokens
    reason = finish_reason(request.sampling, token.token_id, index)
    if reason is None and sequence.num_tokens + 1 >= max_model_len:
        reason = FinishReason.LENGTH
    is_first = index == request.num_emitted
    num_cached_tokens = min(sequence.num_cached_tokens, request.num_prompt_tokens) if is_first else 0
    emitted = Token(index, token.token_id, token.logprob, token.top_logprobs)
    return Output(request.request_id, choice, (emitted,), reason, num_cached_tokens)


def ends_with(sequence: Sequence, tokens: Row[SampledToken], max_model_len: int) -> bool:
    """Whether none of the sequence's outputs goes on after these tokens, one for each."""
    outputs = (next_output(sequence, choice, token, max_model_len) for choice, token in enumerate(tokens))
    return all(output.finish_reason or output.choice in sequence.stopped_choices for output in outputs)
