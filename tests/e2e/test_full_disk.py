"""`twostroke up` on a full disk: its logs and its own output are lost, and it serves."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.stack import stack
from tests.support.tiny_model import save_tiny_model


def test_up_serves_though_neither_logs_nor_its_output_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", "/dev/full/cache")
    flags = ("--kernels", "reference", "--device", "cpu", "--num-blocks", "64", "--handoff", "always")
    with open("/dev/full", "w") as full, stack(save_tiny_model(tmp_path / "m"), *flags, output=full) as running:
        reply = httpx.post(f"{running.url}/v1/completions", json={"model": "m", "prompt": "The quick", "max_tokens": 4}, timeout=60)
        assert reply.status_code == 200, reply.text
