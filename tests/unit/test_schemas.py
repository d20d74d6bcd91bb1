"""Request bodies: what is taken, what is refused, and that every refusal names its field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from services.router.http import limits
from services.router.http.errors import ContextLengthExceeded
from services.router.http.messages import for_template
from services.router.http.schemas import ChatBody, CompletionBody, parse
from services.router.text.loading import ModelFacts
from services.router.text.sampling_defaults import SamplingDefaults
from services.router.text.tokenizer import ChatTokenizer
from shared.base.errors import InvalidRequest
from shared.base.request import SamplingParams
from tests.support.tiny_tokenizer import save_tiny_tokenizer, tiny_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"model": "m", "prompt": "p"} | fields).encode())


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"model": "m", "messages": HELLO} | fields).encode())


def sampling(**fields: Any) -> SamplingParams:
    return completion(**fields).sampling(16, None, tokenizer_of())


def tokenizer_of(defaults: SamplingDefaults | None = None) -> ChatTokenizer:
    facts = ModelFacts(vocab_size=100, eos_token_ids=frozenset({2, 0}), sampling_defaults=defaults or SamplingDefaults())
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer()), facts)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"stream": 1}, "stream"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"stream_options": {"include_usag": True}}, "stream_options.include_usag"),
        ({"model": 1}, "model"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": ["ok", ""]}, "stop[1]"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": "x" * 257}, "stop[0]"),
        ({"stop": ["x", 5]}, "stop[1]"),
        ({"stop": 5}, "stop"),
    ],
)
def test_a_refused_field_of_a_completion_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=param.partition("[")[0]) as refused:
        completion(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "tool_calls"),
        ({"messages": "hi"}, "messages"),
        ({"top_logprobs": 25}, "top_logprobs"),
        ({"echo": True}, "echo"),
    ],
)
def test_a_refused_field_of_a_chat_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff", b"null"])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="request body"):
        parse(CompletionBody, body)


def test_an_object_with_very_many_fields_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 64"):
        completion(**{f"field{i}": 1 for i in range(100)})


def test_fields_that_ask_for_nothing_are_taken() -> None:
    completion(user="u", metadata={"a": "b"}, best_of=1, suffix=None, whatever=None, logit_bias=None)
    chat(tools=None, tool_choice="none", response_format={"type": "text"}, store=True, parallel_tool_calls=True)
    chat(messages=[*HELLO, {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 2**32}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 129}, "n"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"seed": 2**64 - 1, "min_tokens": 17}, "min_tokens"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_a_sampling_value_out_of_range_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as refused:
        sampling(**fields)
    assert refused.value.param == param


def test_sampling_values_arrive() -> None:
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1}
    params = sampling(**values, repetition_penalty=1.5, seed=5, logit_bias={"3": -100}, n=2, min_tokens=1)
    assert {name: getattr(params, name) for name in values} == values
    assert (params.repetition_penalty, params.seed, params.logit_bias, params.n, params.min_tokens) == (1.5, 5, {3: -100}, 2, 1)


def test_eos_ends_an_output_unless_ignored() -> None:
    assert sampling(stop_token_ids=[9]).stop_token_ids == (0, 2, 9)
    assert sampling(stop_token_ids=[9], ignore_eos=True).stop_token_ids == (9,)
    assert sampling(ignore_eos=True, min_tokens=3).ignored_eos_token_ids == (0, 2)
    assert sampling(ignore_eos=True).ignored_eos_token_ids == sampling(min_tokens=3).ignored_eos_token_ids == ()


def test_a_request_without_seed_or_with_seed_minus_one_gets_a_random_one() -> None:
    for fields in ({}, {"seed": None}, {"seed": -1}):
        assert len({sampling(**fields).seed for _ in range(3)}) == 3


def test_any_other_seed_of_64_bits_is_taken() -> None:
    assert [sampling(seed=seed).seed for seed in (0, 2**64 - 1, -2, -(2**63))] == [0, 2**64 - 1, 2**64 - 2, 2**63]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.18e-38}, {"temperature": 9.9e-6}, {"top_p": 0}])
def test_a_temperature_too_small_to_divide_by_and_top_p_zero_are_greedy(fields: dict[str, Any]) -> None:
    assert sampling(**fields).is_greedy


def test_a_small_temperature_is_kept() -> None:
    assert not sampling(temperature=1e-5).is_greedy


def test_top_k_is_off_at_minus_one_and_at_most_what_the_wire_holds() -> None:
    assert [sampling(top_k=top_k).top_k for top_k in (-1, 0, 7, 2**32 - 1)] == [0, 0, 7, 2**32 - 1]


def test_the_models_defaults_hold_where_a_request_does_not_say() -> None:
    tokenizer = tokenizer_of(SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1))
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    silent = completion(top_p=None).sampling(16, None, tokenizer)
    assert [getattr(silent, name) for name in names] == [0.6, 0.95, 20, 0.05, 1.1]
    said = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    params = completion(**said).sampling(16, None, tokenizer)
    assert [getattr(params, name) for name in names] == [0.0, 1.0, 0, 0.0, 1.0]


def test_a_stop_string_that_is_a_special_token_is_a_stop_token_too() -> None:
    assert sampling(stop=["<|im_start|>", "x"], ignore_eos=True).stop_token_ids == (1,)
    assert sampling(stop="<tool>", ignore_eos=True).stop_token_ids == ()  # an ordinary token: its text is never hidden


def test_one_stop_string_is_a_list_of_one_and_there_may_be_many() -> None:
    assert completion(stop="a").stop == ["a"]
    assert len(completion(stop=["x" * 256] * 64).stop) == 64


def test_a_request_may_leave_out_the_model() -> None:
    assert completion(model=None).model == ""


def test_usage_is_asked_for_in_streams() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert not completion(stream=True).include_usage


def test_max_tokens_of_a_chat_has_two_names_that_must_agree() -> None:
    assert chat(max_tokens=3).max_output_tokens == chat(max_completion_tokens=3).max_output_tokens == 3
    assert chat().max_output_tokens is None
    with pytest.raises(InvalidRequest, match="mean the same"):
        _ = chat(max_tokens=3, max_completion_tokens=4).max_output_tokens


def test_messages_become_roles_and_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": parts}])
    assert for_template(body.messages) == [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    named = chat(messages=[{"role": "user", "content": "x", "name": "Ada"}, {"role": "assistant"}])
    assert for_template(named.messages) == [
        {"role": "user", "content": "x", "name": "Ada"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {"url": "x"}}], None, 5, [{"text": "x"}], ["x"]])
def test_content_that_is_not_text_is_refused(content: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content"):
        for_template(chat(messages=[{"role": "user", "content": content}]).messages)


def test_max_tokens_fits_the_context() -> None:
    assert limits.fit_max_tokens(10, None, 16, 20, "prompt") == 10
    assert limits.fit_max_tokens(10, None, None, 100, "prompt") == 90
    assert limits.fit_max_tokens(10, 90, None, 100, "prompt") == 90
    with pytest.raises(ContextLengthExceeded, match="10 tokens and max_tokens is 91, 101 together"):
        limits.fit_max_tokens(10, 91, None, 100, "prompt")
    with pytest.raises(ContextLengthExceeded, match="100 tokens"):
        limits.fit_max_tokens(100, None, 16, 100, "prompt")


def test_the_front_end_works_without_torch(tmp_path: Path) -> None:
    program = """
import sys
import services.router.http.app
assert "torch" not in sys.modules, "importing the front end imports torch"
assert "transformers" not in sys.modules, "importing the front end takes seconds"
from services.router.torch_free import forbid_torch
forbid_torch()
from services.router.text.tokenizer import ChatTokenizer
tokenizer = ChatTokenizer.load(sys.argv[1])
print(tokenizer.render_chat([{"role": "user", "content": "hi"}], True, {}), tokenizer.eos_token_ids, tokenizer.vocab_size)
assert not [name for name in sys.modules if name.startswith("torch.")]
"""
    folder = save_tiny_tokenizer(tmp_path)
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n frozenset({0, 2}) ")
