"""Between the values of `shared/base/request.py` and the messages of `proto/request.proto`; nothing else knows both.

A request's fields are carried over by name: a new one is added to the dataclass and to the message, and to nothing here. Tokens are
converted by hand, because every token of every stream passes here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message

from shared.base.errors import InvalidRequest
from shared.base.request import FinishReason, Output, Request, SamplingParams, Token
from shared.rpc import control_pb2, request_pb2

_TO_REASON = {
    None: request_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: request_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: request_pb2.FINISH_REASON_LENGTH,
}
_FROM_REASON = {wire: reason for reason, wire in _TO_REASON.items()}


def request_to_wire(request: Request) -> request_pb2.Request:
    """Raises InvalidRequest for a value that no message can carry."""
    try:
        sampling = request_pb2.SamplingParams(**_values_of(request.sampling))
        return request_pb2.Request(**_values_of(request) | {"sampling": sampling})
    except ValueError as error:  # an integer that is too large for its field, or text that is not Unicode
        raise InvalidRequest(f"the request does not fit its message: {error}") from None


def request_from_wire(message: request_pb2.Request) -> Request:
    """Raises InvalidRequest for a value that is out of range."""
    if not message.request_id:
        raise InvalidRequest("request_id is empty", param="request_id")
    sampling = SamplingParams(**{name: read(message.sampling) for name, read in _SAMPLING_READERS})
    return Request(**{name: read(message) for name, read in _REQUEST_READERS} | {"sampling": sampling})


def _values_of(value: SamplingParams | Request) -> dict[str, Any]:
    """By field, as a message's constructor takes them: None stays absent."""
    values = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: dict(one) if isinstance(one, Mapping) else one for name, one in values.items()}


def _readers(kind: type[SamplingParams | Request], message: type[Message]) -> list[tuple[str, Callable[[Any], Any]]]:
    """What gives each field of the dataclass out of its message."""
    return [(field.name, _reader(message.DESCRIPTOR.fields_by_name[field.name])) for field in fields(kind)]


def _reader(field: Any) -> Callable[[Any], Any]:
    """`field` is a FieldDescriptor, of which protobuf has two types."""
    name = field.name
    if field.is_repeated:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        make = dict if is_map else tuple
        return lambda message: make(getattr(message, name))
    if field.has_presence and field.message_type is None:
        return lambda message: getattr(message, name) if message.HasField(name) else None
    return attrgetter(name)


_SAMPLING_READERS = _readers(SamplingParams, request_pb2.SamplingParams)
_REQUEST_READERS = _readers(Request, request_pb2.Request)


def token_to_wire(t: Token) -> request_pb2.Token:
    return request_pb2.Token(
        index=t.index,
        token_id=t.token_id,
        logprob=t.logprob,
        top_logprobs=[request_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in t.top_logprobs],
    )


def token_from_wire(m: request_pb2.Token) -> Token:
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
