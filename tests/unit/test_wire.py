"""What goes over the wire comes out as it went in."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.base.errors import InvalidRequest
from shared.base.request import FinishReason, Output, Request, SamplingParams, Token
from shared.rpc import control_pb2, request_pb2
from shared.wire import conversions as wire

TOKEN_IDS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(-100.0, 100.0, width=32)  # float32 on the wire

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**20),
    temperature=st.floats(0.0, 100.0, width=32),
    top_k=st.integers(0, 2**20),
    top_p=st.floats(0.125, 1.0, width=32),
    min_p=st.floats(0.0, 1.0, width=32),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.floats(-2.0, 2.0, width=32),
    frequency_penalty=st.floats(-2.0, 2.0, width=32),
    repetition_penalty=st.floats(0.125, 10.0, width=32),
    stop_token_ids=st.lists(TOKEN_IDS, max_size=4).map(tuple),
    min_tokens=st.integers(0, 1),
    num_logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.dictionaries(TOKEN_IDS, FLOATS, max_size=4),
    n=st.integers(1, 128),
    ignored_eos_token_ids=st.lists(TOKEN_IDS, max_size=4).map(tuple),
)
TOKENS = st.builds(
    Token,
    index=st.integers(0, 2**20),
    token_id=TOKEN_IDS,
    logprob=st.none() | FLOATS,
    top_logprobs=st.lists(st.tuples(TOKEN_IDS, FLOATS), max_size=3).map(tuple),
)


# Fields whose message is another, or that only one of the two has
SAME_FIELDS = [
    (SamplingParams, request_pb2.SamplingParams, set()),
    (Request, request_pb2.Request, set()),
    (Token, request_pb2.Token, set()),
    (Output, control_pb2.Tokens, {"request_id"}),  # of the stream
]


@pytest.mark.parametrize(("kind", "message", "not_sent"), SAME_FIELDS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_dataclass_and_its_message_have_the_same_fields(kind, message, not_sent):
    assert {field.name for field in fields(kind)} - not_sent == set(message.DESCRIPTOR.fields_by_name)


@settings(max_examples=40)
@given(st.lists(TOKEN_IDS, min_size=1, max_size=20).map(tuple), st.data(), SAMPLING, st.text(max_size=8), st.text(max_size=8))
def test_a_request_comes_back(token_ids, data, sampling, salt, model):
    request = Request("r-1", token_ids, data.draw(st.integers(1, len(token_ids))), sampling, salt, model)
    message = request_pb2.Request.FromString(wire.request_to_wire(request).SerializeToString())
    assert wire.request_from_wire(message) == request


@settings(max_examples=40)
@given(st.lists(TOKENS, max_size=3).map(tuple), st.none() | st.sampled_from(FinishReason), st.integers(0, 127), st.integers(0, 999))
def test_an_output_comes_back(tokens, reason, choice, num_cached_tokens):
    output = Output("r-1", choice, tokens, reason, num_cached_tokens)
    message = control_pb2.Tokens.FromString(wire.output_to_wire(output).SerializeToString())
    assert wire.output_from_wire("r-1", message) == output


def test_no_logprobs_and_zero_logprobs_are_different_wishes():
    for num_logprobs in (None, 0):
        message = wire.request_to_wire(Request("r-1", (1,), 1, SamplingParams(num_logprobs=num_logprobs)))
        assert wire.request_from_wire(message).sampling.num_logprobs == num_logprobs


@pytest.mark.parametrize(
    "request_",
    [
        Request("r-1", (2**32,), 1, SamplingParams()),
        Request("r-1", (-1,), 1, SamplingParams()),
        Request("r-1", (1,), 1, SamplingParams(top_k=2**32)),
        Request("r-1", (1,), 1, SamplingParams(logit_bias={2**32: 1.0})),
        Request("r-1", (1,), 1, SamplingParams(stop_token_ids=(-1,))),
        Request("r-1", (1,), 1, SamplingParams(), cache_salt="\ud800"),
    ],
    ids=["token", "negative", "top_k", "logit_bias", "stop", "salt"],
)
def test_a_value_that_no_message_can_carry_is_the_clients_mistake(request_):
    with pytest.raises(InvalidRequest, match="does not fit its message"):
        wire.request_to_wire(request_)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"request_id": ""}, "request_id"),
        ({"num_prompt_tokens": 0}, "prompt"),
        ({"num_prompt_tokens": 4}, "prompt"),
        ({"sampling": request_pb2.SamplingParams()}, "max_tokens"),  # a peer that sent nothing
    ],
)
def test_a_malformed_message_is_the_senders_mistake_by_name(change, param):
    message = wire.request_to_wire(Request("r-1", [1, 2, 3], 3, SamplingParams()))
    fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    with pytest.raises(InvalidRequest) as caught:
        wire.request_from_wire(request_pb2.Request(**fields | change))
    assert caught.value.param == param
