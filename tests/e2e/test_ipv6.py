"""`twostroke up` on an IPv6 address."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.support.stack import stack
from tests.support.tiny_model import save_tiny_model


def test_up_serves_on_ipv6(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "m")
    flags = ("--kernels", "reference", "--device", "cpu", "--num-blocks", "64", "--handoff", "always")
    with stack(model, *flags, host="::1") as running:
        assert running.url == f"http://[::1]:{running.port}"
        reply = httpx.post(f"{running.url}/v1/completions", json={"model": "m", "prompt": "The quick", "max_tokens": 4}, timeout=60)
        assert reply.status_code == 200, reply.text
        assert any(f"{running.url}/v1" in line for line in running.lines)
