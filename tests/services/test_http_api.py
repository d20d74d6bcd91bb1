"""The router's HTTP API as clients see it: a real server, the official OpenAI client, and a backend that is told what to say."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from services.router.http import limits
from services.router.text.tokenizer import ChatTokenizer
from shared.base.errors import Overloaded, Unavailable
from shared.base.request import FinishReason
from tests.support.http_service import MAX_MODEL_LEN, MODEL, FakeBackend, Service
from tests.support.tiny_tokenizer import EOS_ID

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared_service(tokenizer: ChatTokenizer, raw: Tokenizer) -> Iterator[Service]:
    service = Service(tokenizer, raw)
    yield service
    service.stop()


@pytest.fixture
def service(shared_service: Service) -> Service:
    """The shared one, with the backend's script reset."""
    shared_service.backend.say()
    return shared_service


@pytest.fixture
def backend(service: Service) -> FakeBackend:
    return service.backend


@pytest.fixture(scope="module")
def shared_client(shared_service: Service) -> Iterator[openai.OpenAI]:
    with shared_service.client() as client:
        yield client


@pytest.fixture
def client(service: Service, shared_client: openai.OpenAI) -> openai.OpenAI:
    return shared_client


def _events(service: Service, path: str, body: dict[str, Any]) -> list[str]:
    """The data of all events of a streamed answer, as they are on the wire."""
    response = service.http.post(path, json={"model": MODEL, "stream": True} | body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def _num_tokens(raw: Tokenizer, text: str) -> int:
    return len(raw.encode(text).ids)


# What is generated


def test_a_completion_has_text_reason_and_usage(client: openai.OpenAI, backend: FakeBackend, raw: Tokenizer) -> None:
    backend.say(text="one two 👍 日本", num_cached_tokens=2)
    answer = client.completions.create(model=MODEL, prompt="quick brown fox", temperature=0)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("one two 👍 日本", "stop", 0, None)
    num_prompt, num_output = _num_tokens(raw, "quick brown fox"), _num_tokens(raw, "one two 👍 日本") + 1
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_output)  # the stop token counts
    assert answer.usage.total_tokens == num_prompt + num_output
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.id.startswith("cmpl-")


def test_a_chat_is_rendered_by_the_models_template(client: openai.OpenAI, backend: FakeBackend, tokenizer: ChatTokenizer) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "s"}, *CHAT], extra_body={"chat_template_kwargs": {"style": "short"}}
    )
    assert answer.choices[0].message.content == "one two three"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    [request] = backend.requests
    expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nshort"
    assert tokenizer.decode(request.token_ids) == expected
    assert request.token_ids[0] == 1  # <|im_start|> is one token
    assert request.num_prompt_tokens == len(request.token_ids)


def test_defaults_are_openais(client: openai.OpenAI, backend: FakeBackend) -> None:
    client.completions.create(model=MODEL, prompt="one")
    client.chat.completions.create(model=MODEL, messages=CHAT)
    completion, chat = backend.requests
    assert completion.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == MAX_MODEL_LEN - chat.num_prompt_tokens
    assert completion.sampling.temperature == completion.sampling.top_p == 1.0
    assert completion.sampling.stop_token_ids == (0, EOS_ID)
    assert all(0 < deadline_s <= 600 for deadline_s in backend.deadlines_s)


@pytest.mark.parametrize("tokens_per_output", [1, 3, 100])
def test_a_streamed_completion_adds_up_to_the_whole(client: openai.OpenAI, backend: FakeBackend, tokens_per_output: int) -> None:
    backend.say(text="one 👩🏽‍🚀 日本語", tokens_per_output=tokens_per_output)
    chunks = list(client.completions.create(model=MODEL, prompt="x", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one 👩🏽‍🚀 日本語"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_chat_chunks_are_shaped_as_openais(service: Service) -> None:
    *events, done = _events(service, "/v1/chat/completions", {"messages": CHAT, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["model"] == MODEL for chunk in chunks)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    first, *texts, end, usage = chunks
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert (first["choices"], first["usage"]) == ([opening], None)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in texts) == "one two three"
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + usage["usage"]["completion_tokens"] > 0


def test_without_include_usage_no_chunk_speaks_of_usage(service: Service) -> None:
    *events, _ = _events(service, "/v1/completions", {"prompt": "x"})
    assert all("usage" not in json.loads(event) for event in events)


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_keep_their_texts_apart(client: openai.OpenAI, backend: FakeBackend, stream: bool) -> None:
    if stream:
        texts, reasons = ["", ""], ["", ""]
        for chunk in client.chat.completions.create(model=MODEL, messages=CHAT, n=2, stream=True):
            [choice] = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    else:
        answer = client.chat.completions.create(model=MODEL, messages=CHAT, n=2)
        texts = [choice.message.content or "" for choice in answer.choices]
        reasons = [choice.finish_reason for choice in answer.choices]
    assert (texts, reasons) == (["one two three"] * 2, ["stop"] * 2)
    assert backend.requests[0].sampling.n == 2


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_numbered_prompt_by_prompt(client: openai.OpenAI, backend: FakeBackend, stream: bool) -> None:
    prompts = ["quick", "lazy"]
    if stream:
        chunks = list(client.completions.create(model=MODEL, prompt=prompts, n=2, stream=True, extra_body={"echo": True}))
        texts = ["".join(c.choices[0].text for c in chunks if c.choices[0].index == i) for i in range(4)]
    else:
        answer = client.completions.create(model=MODEL, prompt=prompts, n=2, echo=True)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        texts = [choice.text for choice in answer.choices]
    assert texts == ["quickone two three"] * 2 + ["lazyone two three"] * 2
    first, second = backend.requests
    assert first.request_id != second.request_id
    assert first.sampling.seed != second.sampling.seed


def test_token_ids_are_taken_as_prompts(client: openai.OpenAI, backend: FakeBackend) -> None:
    client.completions.create(model=MODEL, prompt=[5, 6, 7], seed=3)
    client.completions.create(model=MODEL, prompt=[[5, 6], [7]], seed=3)
    assert [list(request.token_ids) for request in backend.requests] == [[5, 6, 7], [5, 6], [7]]
    assert {request.sampling.seed for request in backend.requests} == {3}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_closes_the_generation(
    service: Service, client: openai.OpenAI, backend: FakeBackend, stream: bool
) -> None:
    backend.say(text="one two three four five", hang_after=16)
    if stream:
        chunks = list(client.completions.create(model=MODEL, prompt="x", stop=["zzz", "o thr"], stream=True))
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        [choice] = client.completions.create(model=MODEL, prompt="x", stop=["zzz", "o thr"]).choices
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == ("one tw", "stop")
    assert backend.closed.acquire(timeout=10)


def test_include_stop_str_in_output_keeps_it(client: openai.OpenAI) -> None:
    body = {"include_stop_str_in_output": True}
    [choice] = client.completions.create(model=MODEL, prompt="x", stop="two", extra_body=body).choices
    assert choice.text == "one two"


def test_a_choice_ended_by_a_stop_string_ignores_what_its_siblings_still_get(client: openai.OpenAI, backend: FakeBackend) -> None:
    # Both choices have the same text, but the second gets each token after the first.
    answer = client.completions.create(model=MODEL, prompt="x", n=3, stop=["two"])
    assert [choice.text for choice in answer.choices] == ["one "] * 3


def test_max_tokens_ends_with_length(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.say(reason=FinishReason.LENGTH)
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


# Logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_are_aligned_with_tokens(
    client: openai.OpenAI, backend: FakeBackend, tokenizer: ChatTokenizer, raw: Tokenizer, stream: bool
) -> None:
    backend.say(text="one two 日本", tokens_per_output=2)
    if stream:
        chunks = list(client.completions.create(model=MODEL, prompt="x", logprobs=2, stream=True))
        found = [chunk.choices[0].logprobs for chunk in chunks]
    else:
        found = [client.completions.create(model=MODEL, prompt="x", logprobs=2).choices[0].logprobs]
    ids = [*raw.encode("one two 日本").ids, EOS_ID]  # what usage counts is what is listed
    tokens = [token for part in found if part for token in part.tokens or []]
    assert [value for part in found if part for value in part.token_logprobs or []] == [-i / 8 for i in range(len(ids))]
    assert [value for part in found if part for value in part.text_offset or []][:2] == [0, len(tokens[0])]
    for token, token_id in zip(tokens, ids, strict=True):
        its_bytes = tokenizer.vocabulary.token_bytes(token_id)
        escaped = "bytes:" + "".join(f"\\x{byte:02x}" for byte in its_bytes)
        assert token == (escaped if "\ufffd" in its_bytes.decode(errors="replace") else its_bytes.decode())
    tops = [top for part in found if part for top in part.top_logprobs or []]
    assert all(len(top) == 2 and token in top for top, token in zip(tops, tokens, strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_carry_the_bytes_of_the_text(client: openai.OpenAI, backend: FakeBackend, stream: bool) -> None:
    backend.say(text="Grüße 👍")
    content = []
    if stream:
        for chunk in client.chat.completions.create(model=MODEL, messages=CHAT, logprobs=True, top_logprobs=2, stream=True):
            if chunk.choices[0].logprobs:
                content += chunk.choices[0].logprobs.content or []
    else:
        answer = client.chat.completions.create(model=MODEL, messages=CHAT, logprobs=True, top_logprobs=2)
        assert answer.choices[0].logprobs is not None
        content += answer.choices[0].logprobs.content or []
    assert bytes(byte for entry in content for byte in entry.bytes or []).decode() == "Grüße 👍"
    assert [entry.logprob for entry in content] == [-i / 8 for i in range(len(content))]
    assert all(len(entry.top_logprobs) == 2 for entry in content)


# Errors


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"frequency_penalty": 3}, "frequency_penalty", "between -2 and 2"),
        ({"max_tokens": MAX_MODEL_LEN}, "prompt", f"max_tokens is {MAX_MODEL_LEN}"),
        ({"prompt": []}, "prompt", "string"),
        ({"prompt": [1, "x"]}, "prompt", "string"),
        ({"prompt": ""}, "prompt", "at least 1 token"),
        ({"prompt": [[1], []]}, "prompt", "string"),
        ({"prompt": [10**6]}, "prompt", "1000000"),
        ({"prompt": ["x"] * 129}, "prompt", "at most 128"),
        ({"prompt": ["x"] * 3, "n": 100}, "n", "300 outputs"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate", "does not know"),
        ({"best_of": 4}, "best_of", "does not support"),
        ({"echo": True, "logprobs": 1}, "echo", "logprobs"),
    ],
)
def test_a_clients_mistake_is_a_400_that_names_it(client: openai.OpenAI, fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text) as refused:
        client.completions.create(**({"model": MODEL, "prompt": "x"} | fields))
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_a_prompt_beyond_the_context_has_its_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{MAX_MODEL_LEN}") as refused:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * MAX_MODEL_LEN}])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_a_chat_template_argument_cannot_replace_the_template(client: openai.OpenAI) -> None:
    for name in ("chat_template", "messages", "tokenize", "eos_token"):
        with pytest.raises(openai.BadRequestError, match=name):
            client.chat.completions.create(model=MODEL, messages=CHAT, extra_body={"chat_template_kwargs": {name: "x"}})


def test_unknown_models_paths_and_methods_have_openais_shape(service: Service, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9") as refused:
        client.completions.create(model="gpt-9", prompt="x")
    assert refused.value.code == "model_not_found"
    for method, path, status in (("GET", "/v1/nowhere", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/other", 404)):
        response = service.http.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (Overloaded("no room"), openai.RateLimitError, 429),
        (Unavailable("nobody there"), openai.InternalServerError, 503),
        (RuntimeError("secret detail"), openai.InternalServerError, 500),
    ],
)
def test_an_error_before_the_first_token_has_its_status_also_when_streaming(
    client: openai.OpenAI, backend: FakeBackend, error: Exception, kind: type[openai.APIStatusError], status: int, stream: bool
) -> None:
    backend.say(error=error)
    with pytest.raises(kind) as refused:
        client.completions.create(model=MODEL, prompt="x", stream=stream)
    assert refused.value.status_code == status
    assert "secret" not in refused.value.message
    assert ("retry-after" in refused.value.response.headers) == (status != 500)
    assert backend.closed.acquire(timeout=10)


@pytest.mark.parametrize("error", [Unavailable("the last worker left"), RuntimeError("secret detail")])
def test_an_error_in_a_stream_is_an_event_and_no_done_follows(
    service: Service, client: openai.OpenAI, backend: FakeBackend, error: Exception
) -> None:
    backend.say(error=error, error_after=2)
    events = _events(service, "/v1/completions", {"prompt": "x"})
    assert "[DONE]" not in events
    assert "secret" not in events[-1]
    assert set(json.loads(events[-1])["error"]) == {"message", "type", "param", "code"}
    with pytest.raises(openai.APIError):
        list(client.completions.create(model=MODEL, prompt="x", stream=True))


def test_one_failing_prompt_fails_the_request_and_closes_all(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.say(error=Unavailable("gone"), error_after=2)
    with pytest.raises(openai.InternalServerError, match="gone"):
        client.completions.create(model=MODEL, prompt=["x", "y", "z"])
    for _ in range(3):
        assert backend.closed.acquire(timeout=10)


# Clients that go away


@pytest.mark.parametrize("hang_after", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_a_disconnect_closes_the_generation_at_once(
    service: Service, backend: FakeBackend, prompt: Any, stream: bool, hang_after: int
) -> None:
    backend.say(hang_after=hang_after)
    while backend.closed.acquire(blocking=False) or backend.started.acquire(blocking=False):
        pass
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
    body = json.dumps({"model": MODEL, "prompt": prompt, "stream": stream})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    num_generations = len(prompt)
    for _ in range(num_generations):
        assert backend.started.acquire(timeout=10)
    assert not backend.closed.acquire(blocking=False)
    assert connection.sock is not None
    connection.sock.close()
    for _ in range(num_generations):
        assert backend.closed.acquire(timeout=10)


# Limits and keys


def test_requests_beyond_the_limit_get_429_and_the_place_is_given_back(tokenizer: ChatTokenizer, raw: Tokenizer) -> None:
    service = Service(tokenizer, raw, max_concurrent_requests=1)
    try:
        service.backend.say(hang_after=1)
        with service.client() as client:
            stream = client.completions.create(model=MODEL, prompt="x", stream=True)
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(model=MODEL, prompt="x")
            assert refused.value.response.headers["retry-after"] == "1"
            assert client.models.list().data[0].id == MODEL  # not a generation
            stream.close()
            assert service.backend.closed.acquire(timeout=10)
            service.backend.say()
            # The place is free once the server's side has ended, which nothing announces: the client does what 429 asks for.
            with service.client().with_options(max_retries=5) as patient:
                assert patient.completions.create(model=MODEL, prompt="x").choices[0].text == "one two three"
    finally:
        service.stop()


def test_bodies_that_are_too_large_get_413(tokenizer: ChatTokenizer, raw: Tokenizer) -> None:
    service = Service(tokenizer, raw, max_request_bytes=1000)
    try:
        for content in (b"x" * 1001, iter([b"x" * 600] * 2)):  # announced, and chunked
            response = service.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
        assert not service.backend.requests
    finally:
        service.stop()


def test_keys_guard_all_but_the_probes(tokenizer: ChatTokenizer, raw: Tokenizer) -> None:
    service = Service(tokenizer, raw, api_key="alpha, beta-ß")
    try:
        for key in ("alpha", "wrong", "alph"):
            with service.client(key) as client:
                if key == "alpha":
                    assert client.models.list().data
                    continue
                with pytest.raises(openai.AuthenticationError) as refused:
                    client.models.list()
                assert refused.value.code == "invalid_api_key"
        assert service.http.get("/v1/models", headers={"Authorization": "Bearer beta-ß".encode()}).status_code == 200
        assert service.http.get("/v1/models", headers={"Authorization": "Basic alpha"}).status_code == 401
        assert service.http.post("/tokenize", json={}).status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert service.http.get(path).status_code == 200
    finally:
        service.stop()


# Who may


def test_api_keys_share_no_prefix_cache_unless_they_are_told_to(tokenizer: ChatTokenizer, raw: Tokenizer) -> None:
    for share in (False, True):
        service = Service(tokenizer, raw, api_key="alpha,beta", share_prefix_cache=share)
        try:
            for key, salt in (("alpha", ""), ("beta", ""), ("alpha", "s"), ("alpha", "")):
                with service.client(key) as client:
                    client.completions.create(model=MODEL, prompt="x", extra_body={"cache_salt": salt})
            salts = [request.cache_salt for request in service.backend.requests]
            assert salts[0] == salts[3]
            assert salts[2].endswith("s")
            assert len(set(salts)) == (2 if share else 3)
            assert (salts == ["", "", "s", ""]) == share
            assert not any("alpha" in salt for salt in salts)
        finally:
            service.stop()


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_what_is_not_said_to_be_json_is_refused(service: Service, backend: FakeBackend, content_type: str) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert service.http.post(path, content=body, headers=headers).status_code == 415
    assert not backend.requests
    utf8 = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert service.http.post("/v1/completions", content=body, headers=utf8).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://example.com", 403),
        ("https://localhost.example.com:8000", 403),
        ("http://[", 403),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8000", 200),
        ("http://[::1]:8000", 200),
        ("https://good.example", 200),
    ],
)
def test_pages_of_foreign_origins_may_not_use_a_server_without_keys(
    tokenizer: ChatTokenizer, raw: Tokenizer, origin: str, status: int
) -> None:
    service = Service(tokenizer, raw, allowed_origins="https://good.example")
    try:
        answer = service.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"Origin": origin})
        assert answer.status_code == status
        assert ("access-control-allow-origin" in answer.headers) == (origin == "https://good.example")
    finally:
        service.stop()


def test_preflights_are_answered_without_a_key_for_allowed_origins_only(
    tokenizer: ChatTokenizer, raw: Tokenizer, service: Service
) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    assert service.http.options("/v1/completions", headers={"Origin": "http://localhost", **asked}).status_code == 405
    guarded = Service(tokenizer, raw, allowed_origins="https://good.example", api_key="alpha")
    try:
        for origin, status in (("https://good.example", 200), ("https://bad.example", 400)):
            answer = guarded.http.options("/v1/completions", headers={"Origin": origin, **asked})
            assert answer.status_code == status
            assert answer.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
    finally:
        guarded.stop()


# Around it


def test_a_request_without_a_model_goes_to_the_only_one(service: Service) -> None:
    answer = service.http.post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)


def test_head_is_answered_wherever_get_is(service: Service) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{MODEL}"):
        answer = service.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) > 0


@pytest.mark.parametrize(("given", "is_kept"), [("abc-1.2:3_4", True), ("", False), ("a b", False), ("x" * 129, False)])
def test_a_sane_request_id_is_taken_over_and_another_is_made(
    service: Service, backend: FakeBackend, given: str, is_kept: bool
) -> None:
    answers = [service.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": given}) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert all((request_id == given) == is_kept for request_id in ids)
    for request_id, answer, request in zip(ids, answers, backend.requests, strict=True):
        assert answer.json()["id"].startswith(f"cmpl-{request_id}")
        assert request.request_id.startswith(answer.json()["id"])
    assert backend.requests[0].request_id != backend.requests[1].request_id  # although the client repeats its id
    assert "x-request-id" in service.http.get("/nowhere").headers


@pytest.mark.parametrize(
    "message", ["ipv4:10.0.0.7:7001: refused", "worker at decode-1:7001 left", "cannot reach [fd00::1]:7", "see /var/log/x"]
)
def test_failures_name_nothing_internal(service: Service, backend: FakeBackend, message: str) -> None:
    backend.say(error=Unavailable(message), error_after=0)
    answer = service.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no worker can serve this request now; try again"
    backend.say(error=Unavailable(message), error_after=2)
    assert message not in _events(service, "/v1/completions", {"prompt": "x"})[-1]


def test_a_stop_string_stops_its_choice_at_the_backend_and_no_other(service: Service, backend: FakeBackend) -> None:
    answer = service.http.post("/v1/completions", json={"prompt": "x", "n": 2, "stop": "two"}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one "] * 2
    assert backend.stopped == [0, 1]
    backend.say()
    service.http.post("/v1/completions", json={"prompt": "x", "n": 2})
    assert backend.stopped == []


def test_an_answer_too_large_to_be_held_is_refused_and_a_default_shortened(
    service: Service, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_RESULT_VALUES", 2 * 5 * 10)
    body = {"messages": CHAT, "n": 2, "logprobs": True, "top_logprobs": 3}
    assert service.http.post("/v1/chat/completions", json=body | {"max_tokens": 10}).status_code == 200
    refused = service.http.post("/v1/chat/completions", json=body | {"max_tokens": 11})
    assert refused.status_code == 400
    assert "100" in refused.json()["error"]["message"]
    assert len(_events(service, "/v1/chat/completions", body | {"max_tokens": 11})) > 1
    backend.say()
    assert service.http.post("/v1/chat/completions", json=body).status_code == 200
    assert backend.requests[0].sampling.max_tokens == 10


def test_models_are_listed_and_shown(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "twostroke")
    assert client.models.retrieve(MODEL).id == MODEL


def test_ready_says_why_it_is_not(service: Service, client: openai.OpenAI, backend: FakeBackend) -> None:
    assert service.http.get("/ready").status_code == 200
    backend.say(not_ready="no decode worker")
    response = service.http.get("/ready")
    assert (response.status_code, response.json()["error"]["message"]) == (503, "no decode worker")
    assert service.http.get("/health").status_code == 200
    assert service.http.get("/v1/models").status_code == 200
    with pytest.raises(openai.InternalServerError, match="no decode worker"):
        client.completions.create(model=MODEL, prompt="x")


def test_tokenize_and_detokenize_are_inverse(service: Service, tokenizer: ChatTokenizer, raw: Tokenizer) -> None:
    answer = service.http.post("/tokenize", json={"model": MODEL, "prompt": "naïve fox"}).json()
    assert answer["count"] == len(answer["tokens"]) == _num_tokens(raw, "naïve fox")
    assert answer["max_model_len"] == MAX_MODEL_LEN
    back = service.http.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]}).json()
    assert back == {"prompt": "naïve fox"}
    chat = service.http.post("/tokenize", json={"model": MODEL, "messages": CHAT}).json()
    assert tokenizer.decode(chat["tokens"]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_metrics_count_requests_tokens_and_latencies(service: Service, client: openai.OpenAI, backend: FakeBackend) -> None:
    samples = (
        'twostroke_http_requests_total{endpoint="/v1/completions",status="200"}',
        'twostroke_http_requests_total{endpoint="/v1/completions",status="400"}',
        'twostroke_http_requests_total{endpoint="other",status="404"}',
        "twostroke_prompt_tokens_total",
        "twostroke_cached_prompt_tokens_total",
        "twostroke_completion_tokens_total",
        "twostroke_time_to_first_token_seconds_count",
        "twostroke_inter_token_latency_seconds_count",
    )
    before = [service.metric(sample) for sample in samples]
    backend.say(num_cached_tokens=1)
    answer = client.completions.create(model=MODEL, prompt="quick brown fox")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[])
    service.http.get("/some/random/path")
    assert answer.usage is not None
    num_prompt, num_output = answer.usage.prompt_tokens, answer.usage.completion_tokens
    after = [service.metric(sample) for sample in samples]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 1, num_prompt, 1, num_output, 1, num_output - 1]
    assert service.metric("twostroke_http_requests_in_flight") == 0


def test_a_long_prompt_does_not_hold_up_the_server(service: Service) -> None:
    """While a thread tokenizes 600 kB, the event loop goes on."""
    answers: list[int] = []
    is_done = threading.Event()

    def post_long() -> None:
        body = {"model": MODEL, "prompt": "the quick brown fox " * 30_000}
        answers.append(service.http.post("/v1/completions", json=body).status_code)
        is_done.set()

    thread = threading.Thread(target=post_long)
    thread.start()
    num_answers = 0
    while not is_done.is_set():
        assert service.http.get("/health").status_code == 200
        num_answers += 1
    thread.join()
    assert answers == [400]
    assert num_answers >= 5


def test_a_long_list_of_ids_does_not_hold_up_the_server(service: Service, tokenizer: ChatTokenizer, monkeypatch: Any) -> None:
    """The event loop serves another request while a thread decodes."""
    has_begun, is_served = threading.Event(), threading.Event()

    def decode(token_ids: list[int]) -> str:
        has_begun.set()
        return "served" if is_served.wait(10) else "held up"

    monkeypatch.setattr(tokenizer, "decode", decode)
    answers: list[str] = []
    body = {"model": MODEL, "tokens": [5]}
    thread = threading.Thread(target=lambda: answers.append(service.http.post("/detokenize", json=body).json()["prompt"]))
    thread.start()
    assert has_begun.wait(10)
    assert service.http.get("/health").status_code == 200
    is_served.set()
    thread.join()
    assert answers == ["served"]
