"""An engine that cannot go on ends its process at once, rather than to look alive while nothing moves."""

from __future__ import annotations

import threading

import pytest

from shared.base.worker_info import Role
from shared.engine import engine as engine_module
from tests.support.cluster import FakeWorker, prompt_of, request


class Exits:
    """Stands for the end of the process, which it only notes."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.happened = threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self.happened.set()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Exits:
    made = Exits()
    monkeypatch.setattr(engine_module.os, "_exit", made)
    return made


async def test_mistake_in_the_bookkeeping_ends_the_process(exits: Exits, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(Role.COLOCATED)

    def lose_a_request() -> None:
        raise KeyError("request")

    monkeypatch.setattr(worker.worker.engine._scheduler, "schedule", lose_a_request)
    worker.worker.engine.start()
    worker.worker.engine.submit(request(prompt_of(5)))
    assert exits.happened.wait(10)
    assert exits.code
    worker.worker.engine.stop()


async def test_one_failed_step_ends_its_requests_and_three_in_a_row_the_process(
    exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker(Role.COLOCATED)

    def fail(plan: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(worker.runner, "launch", fail)
    worker.worker.engine.start()
    for count in range(3):
        asked = request(prompt_of(5))
        mailbox = worker.worker.streams.open(asked.request_id)
        assert not exits.happened.is_set(), f"after {count} failed steps"
        worker.worker.engine.submit(asked)
        if count < 2:
            assert "step failed" in str((await mailbox.take())[0].error)
    assert exits.happened.wait(10)
    assert exits.code
    worker.worker.engine.stop()
