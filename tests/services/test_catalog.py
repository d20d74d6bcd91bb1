"""The models that a router lists and finds, while their workers come and go."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from services.router.config import RouterConfig
from services.router.dispatch.model_pool import ModelPool
from services.router.text.tokenizer import ChatTokenizer
from shared.base.errors import ConfigError
from tests.support.eventually import eventually
from tests.support.http_service import MODEL, Service

REFUSED = 'twostroke_models_refused_total{{reason="{}"}}'


def pool(name: str, source: str = "", max_model_len: int = 100) -> ModelPool:
    return ModelPool(name, source, "", max_model_len, 8)


@pytest.fixture
def go_on() -> threading.Event:
    return threading.Event()


@pytest.fixture
def service(raw: Tokenizer, model_folder: Path, go_on: threading.Event) -> Iterator[Service]:
    """Without a model of its own. "broken" cannot be loaded, "slow" once the test says so."""

    def load(asked: ModelPool) -> ChatTokenizer:
        if asked.source == "broken":
            raise ConfigError("no tokenizer.json")
        if asked.source == "slow":
            assert go_on.wait(20)
        return ChatTokenizer.load(str(model_folder))

    service = Service(None, raw, load, max_models=2)
    service.serve_models()
    yield service
    go_on.set()
    service.stop()


def listed(service: Service) -> dict[str, int]:
    return {card["id"]: card["max_model_len"] for card in service.http.get("/v1/models").json()["data"]}


def post(service: Service, **body: Any) -> httpx.Response:
    return service.http.post("/v1/completions", json={"prompt": "one", **body})


async def test_models_are_listed_while_they_have_workers_and_found_by_name(service: Service) -> None:
    assert listed(service) == {}
    assert "tokenizer" in service.http.get("/ready").json()["error"]["message"]
    assert post(service, model="a").status_code == post(service).status_code == 503
    service.serve_models(pool("a", max_model_len=100))
    await eventually(lambda: listed(service) == {"a": 100})
    assert service.http.get("/ready").status_code == 200
    assert post(service).json()["model"] == "a"  # the only one
    service.serve_models(pool("a", max_model_len=100), pool("b", max_model_len=50))
    await eventually(lambda: listed(service) == {"a": 100, "b": 50})
    assert post(service, model="b").json()["model"] == "b"
    assert [request.model for request in service.backend.requests] == ["a", "b"]
    for status, body in ((400, {}), (404, {"model": "c"})):
        for path in ("/v1/completions", "/tokenize"):
            refused = service.http.post(path, json={"prompt": "one", **body})
            assert refused.status_code == status
            assert refused.json()["error"]["param"] == "model"
            assert "'a', 'b'" in refused.json()["error"]["message"]
    assert service.http.get("/v1/models/b").json()["max_model_len"] == 50
    service.serve_models(pool("b"))
    await eventually(lambda: "a" not in listed(service))
    assert post(service, model="a").status_code == 404


async def test_a_model_whose_tokenizer_cannot_be_loaded_is_said_counted_and_not_listed(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    before = service.metric(REFUSED.format("tokenizer"))
    service.serve_models(pool("good"), pool("bad", "broken"))
    await eventually(lambda: service.metric(REFUSED.format("tokenizer")) == before + 1)
    await eventually(lambda: listed(service) == {"good": 100})
    assert post(service, model="bad").status_code == 404
    for _ in range(3):  # workers come and go
        service.serve_models(pool("good"), pool("bad", "broken", max_model_len=50))
    assert listed(service) == {"good": 100}
    assert [r.message for r in caplog.records if "bad" in r.message] == [
        "model bad is not served: its tokenizer (broken) cannot be loaded: no tokenizer.json"
    ]


async def test_a_model_beyond_the_limit_waits_for_one_to_go(service: Service) -> None:
    before = service.metric(REFUSED.format("max_models"))
    service.serve_models(pool("a"), pool("b"), pool("c"))
    await eventually(lambda: listed(service) == {"a": 100, "b": 100})
    assert service.metric(REFUSED.format("max_models")) == before + 1
    assert post(service, model="c").status_code == 404
    service.serve_models(pool("b"), pool("c"))
    await eventually(lambda: listed(service) == {"b": 100, "c": 100})


async def test_a_tokenizer_is_loaded_beside_the_loop_and_one_that_comes_too_late_is_dropped(
    service: Service, go_on: threading.Event
) -> None:
    service.serve_models(pool("a"), pool("slow", "slow"))
    await eventually(lambda: listed(service) == {"a": 100})  # and so the server answers meanwhile
    refused = post(service, model="slow")
    assert refused.status_code == 503
    assert "being loaded" in refused.json()["error"]["message"]
    service.serve_models(pool("a"))
    await eventually(lambda: post(service, model="slow").status_code == 404)
    go_on.set()
    assert listed(service) == {"a": 100}


async def test_the_routers_own_model_stays_found_but_is_not_listed_without_workers(
    tokenizer: ChatTokenizer, raw: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    service = Service(tokenizer, raw, lambda _: tokenizer)
    try:
        assert list(listed(service)) == [MODEL]
        with caplog.at_level(logging.WARNING):
            service.serve_models(pool("other"))
            await eventually(lambda: listed(service) == {"other": 100})
        assert f"no worker has model {MODEL}, as --model says; there are other" in caplog.text
        assert service.http.get(f"/v1/models/{MODEL}").status_code == 200
    finally:
        service.stop()


@pytest.mark.parametrize("options", [{"tokenizer": "x"}, {"chat_template": "x"}, {"max_models": 0}])
def test_options_of_a_model_need_one(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"--model|max.models"):
        RouterConfig(**options)


_LOAD_IN_THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from services.router.text.tokenizer import ChatTokenizer
with ThreadPoolExecutor(4) as threads:
    print(len({id(tokenizer) for tokenizer in threads.map(ChatTokenizer.load, [sys.argv[1]] * 4)}))
"""


def test_a_new_process_may_load_several_tokenizers_at_once(model_folder: Path) -> None:
    done = subprocess.run((sys.executable, "-c", _LOAD_IN_THREADS, model_folder), capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "4", done.stderr
