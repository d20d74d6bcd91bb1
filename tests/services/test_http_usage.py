"""Usage and logprobs tell of the same tokens, however an answer ends and is sent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.router.text.tokenizer import ChatTokenizer
from shared.base.request import FinishReason
from tests.support.http_service import MODEL, Service
from tests.support.tiny_tokenizer import EOS_ID

TEXT = "one two 👍 three"
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "logprobs": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2},
}


@pytest.fixture(scope="module")
def service(tokenizer: ChatTokenizer, raw: Tokenizer) -> Iterator[Service]:
    service = Service(tokenizer, raw)
    yield service
    service.stop()


def answers(service: Service, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices, in the parts that they came in, and the usage."""
    response = service.http.post(path, json={"model": MODEL} | PROMPTS[path] | body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        whole = response.json()
        return whole["choices"], whole["usage"]
    *events, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return [choice for chunk in chunks for choice in chunk["choices"]], chunks[-1].get("usage", {})


def listed(choices: list[dict[str, Any]]) -> Counter[int]:
    """How many tokens the logprobs of each choice list."""
    found: Counter[int] = Counter()
    for choice in choices:
        if (logprobs := choice["logprobs"]) is not None:
            lengths = {len(items) for items in logprobs.values() if items is not None}
            assert len(lengths) == 1, "the lists are parallel"
            found[choice["index"]] += lengths.pop()
    return found


@pytest.mark.parametrize("tokens_per_output", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("end", ["stop string", "shown stop string", "stop token", "shown stop token", "length"])
def test_every_counted_token_is_listed_and_no_other(
    service: Service, raw: Tokenizer, end: str, path: str, n: int, stream: bool, tokens_per_output: int
) -> None:
    ids = raw.encode(TEXT).ids
    to_stop_string = next(count for count in range(len(ids)) if "two" in raw.decode(ids[:count], skip_special_tokens=False))
    expected = {"length": 4, "stop token": len(ids) + 1, "stop string": to_stop_string}[end.removeprefix("shown ")]
    reason = FinishReason.LENGTH if end == "length" else FinishReason.STOP
    service.backend.say(text=TEXT, tokens_per_output=tokens_per_output, reason=reason)
    options: dict[str, Any] = {"n": n, "stream": stream, "include_stop_str_in_output": end.startswith("shown")}
    if end == "length":
        options["max_tokens"] = 4
    if end.endswith("stop string"):
        options["stop"] = "two"
    if stream:
        options["stream_options"] = {"include_usage": True}
    choices, usage = answers(service, path, options)
    assert listed(choices) == dict.fromkeys(range(n), expected)
    assert usage["completion_tokens"] == n * expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_hidden_stop_token_is_listed_by_its_name_and_has_no_bytes(service: Service, raw: Tokenizer, stream: bool) -> None:
    service.backend.say(text=TEXT)
    choices, _ = answers(service, "/v1/chat/completions", {"stream": stream})
    last = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]][-1]
    assert (last["token"], last["bytes"]) == (raw.id_to_token(EOS_ID), [])
