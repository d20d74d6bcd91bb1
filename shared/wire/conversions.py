"""Between the values of `shared/base/request.py` and the messages of `proto/sequence.proto`; nothing else knows both."""

from __future__ import annotations

from shared.base.errors import InvalidRequest
from shared.base.request import FinishReason, Output, Request, SamplingParams, Token
from shared.rpc import control_pb2, sequence_pb2

_TO_REASON = {
    None: sequence_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: sequence_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sequence_pb2.FINISH_REASON_LENGTH,
}
_FROM_REASON = {wire: reason for reason, wire in _TO_REASON.items()}


def sampling_to_wire(s: SamplingParams) -> sequence_pb2.SamplingParams:
    return sequence_pb2.SamplingParams(
        max_tokens=s.max_tokens,
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        seed=s.seed,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        stop_token_ids=s.stop_token_ids,
        min_tokens=s.min_tokens,
        num_logprobs=s.num_logprobs,
        logit_bias=dict(s.logit_bias),
        n=s.n,
    )


def sampling_from_wire(m: sequence_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=m.max_tokens,
        temperature=m.temperature,
        top_k=m.top_k,
        top_p=m.top_p,
        min_p=m.min_p,
        seed=m.seed,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        repetition_penalty=m.repetition_penalty,
        stop_token_ids=tuple(m.stop_token_ids),
        min_tokens=m.min_tokens,
        num_logprobs=m.num_logprobs if m.HasField("num_logprobs") else None,
        logit_bias=dict(m.logit_bias),
        n=m.n,
    )


def request_to_wire(r: Request) -> sequence_pb2.Sequence:
    return sequence_pb2.Sequence(
        request_id=r.request_id,
        token_ids=r.token_ids,
        num_prompt_tokens=r.num_prompt_tokens,
        sampling=sampling_to_wire(r.sampling),
        cache_salt=r.cache_salt,
    )


def request_from_wire(m: sequence_pb2.Sequence) -> Request:
    if not m.request_id:
        raise InvalidRequest("request_id is empty", param="request_id")
    return Request(m.request_id, list(m.token_ids), m.num_prompt_tokens, sampling_from_wire(m.sampling), m.cache_salt)


def token_to_wire(t: Token) -> sequence_pb2.Token:
    return sequence_pb2.Token(
        index=t.index,
        token_id=t.token_id,
        logprob=t.logprob,
        top_logprobs=[sequence_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in t.top_logprobs],
    )


def token_from_wire(m: sequence_pb2.Token) -> Token:
    return Token(
        m.index,
        m.token_id,
        m.logprob if m.HasField("logprob") else None,
        tuple((top.token_id, top.logprob) for top in m.top_logprobs),
    )


def output_to_wire(o: Output) -> control_pb2.Tokens:
    return control_pb2.Tokens(
        choice=o.choice,
        tokens=[token_to_wire(t) for t in o.tokens],
        finish_reason=_TO_REASON[o.finish_reason],
        num_cached_tokens=o.num_cached_tokens,
    )


def output_from_wire(request_id: str, m: control_pb2.Tokens) -> Output:
    return Output(
        request_id, m.choice, tuple(token_from_wire(t) for t in m.tokens), _FROM_REASON[m.finish_reason], m.num_cached_tokens
    )
