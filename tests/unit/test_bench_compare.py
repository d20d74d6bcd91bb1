"""Which engines are compared, how they stand to the best peer, and that nothing of an engine is left when it is stopped."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from pathlib import Path

import pytest

from bench.compare.compare import _work_for
from bench.compare.comparison import Entry, comparison_json, comparison_table, standings
from bench.compare.config import CompareConfig
from bench.compare.engine_process import EngineFailed, running
from bench.compare.engines import Engine, Missing, engines_at
from bench.load.exchange import Endpoint
from bench.load.measures import ITL_P50, OUTPUT_TOKENS_PER_S, TTFT_P50, Measure, Result
from bench.load.report import ClientCost, Report
from shared.base.errors import ConfigError
from tests.support.eventually import eventually


def entry(name: str, values: dict[Measure, float], *, is_ours: bool = False, num_failed: int = 0) -> Entry:
    result = Result("single", 1, 1, num_failed, "HTTP 500: oops" if num_failed else "", values)
    report = Report("http://h", "m", 1, "2026-01-01T00:00:00+00:00", [result], ClientCost(0.01, 1.0, 100))
    return Entry(Engine(name, ("run", name), {}, is_ours=is_ours), report)


def test_above_one_is_better_than_the_best_peer_for_times_and_for_rates():
    ours = entry("ours", {ITL_P50: 0.010, OUTPUT_TOKENS_PER_S: 150.0}, is_ours=True)
    peers = [
        entry("slow", {ITL_P50: 0.040, OUTPUT_TOKENS_PER_S: 300.0}),
        entry("fast", {ITL_P50: 0.020, OUTPUT_TOKENS_PER_S: 100.0}),
    ]
    entries = [
        dataclasses.replace(one, report=dataclasses.replace(one.report, results=[dataclasses.replace(result, workload="mixed")]))
        for one in (ours, *peers)
        if one.report
        for result in one.report.results
    ]
    found = {standing.measure: standing for standing in standings(entries)}
    assert (found[ITL_P50].best_peer, found[ITL_P50].ratios) == ("fast", {"ours": pytest.approx(2.0)})
    assert (found[OUTPUT_TOKENS_PER_S].best_peer, found[OUTPUT_TOKENS_PER_S].ratios) == ("slow", {"ours": pytest.approx(0.5)})
    assert TTFT_P50 not in found


def test_the_table_shows_ratios_failures_and_engines_that_did_not_run():
    entries = [
        entry("ours", {ITL_P50: 0.010}, is_ours=True),
        entry("peer", {ITL_P50: 0.020}, num_failed=1),
        Entry(Engine("gone", ("run",), {}), None, "ended with exit code 3"),
    ]
    table = comparison_table(entries)
    assert "10.0 ms (2.00x)" in table
    assert "gone: ended with exit code 3" in table
    assert "peer, single: 1 of 1 requests failed: HTTP 500: oops" in table
    assert comparison_json(entries)["standings"][0]["times_as_good_as_best_peer"] == {"ours": pytest.approx(2.0)}


def test_without_peers_there_are_values_and_no_ratios():
    (standing,) = standings([entry("ours", {ITL_P50: 0.010}, is_ours=True)])
    assert (standing.values, standing.best_peer, standing.ratios) == ({"ours": 0.010}, "", {})


def test_an_engine_without_its_variable_is_missing_and_the_variable_is_named():
    found = {engine.name: engine for engine in engines_at(CompareConfig(model="/m"), port=1)}
    assert found["vllm"] == Missing("vllm", "TWOSTROKE_BENCH_VLLM_PYTHON")
    assert isinstance(found["openvino"], Missing)
    assert isinstance(found["llama.cpp"], Missing)
    assert isinstance(found["transformers"], Engine)


def test_a_path_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"TWOSTROKE_BENCH_VLLM_PYTHON is '/no/python'"):
        engines_at(CompareConfig(model="/m", bench_vllm_python="/no/python"), port=1)


def test_peers_run_with_the_same_model_cores_and_type(tmp_path: Path):
    server, model = tmp_path / "llama-server", tmp_path / "m.gguf"
    for path in (server, model):
        path.touch()
    config = CompareConfig(
        model="/m", bench_vllm_python=sys.executable, bench_llama_server=str(server), bench_llama_model=str(model)
    )
    commands = {engine.name: " ".join(engine.command) for engine in engines_at(config, port=7) if isinstance(engine, Engine)}
    num_cores = len(os.sched_getaffinity(0))
    for name in ("twostroke-colocated", "twostroke-disaggregated", "vllm", "transformers"):
        assert "--model /m" in commands[name]
        assert "--dtype bfloat16" in commands[name]
        assert "--port 7" in commands[name]
    assert f"-m {model} -t {num_cores}" in commands["llama.cpp"]
    assert "--colocated 1" in commands["twostroke-colocated"]


def test_options_of_the_bench_do_not_reach_the_engines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TWOSTROKE_REPEAT", "9")
    monkeypatch.setenv("TWOSTROKE_CACHE", "/cache")
    engines = [engine for engine in engines_at(CompareConfig(model="/m"), port=1) if isinstance(engine, Engine)]
    assert {engine.environ.get("TWOSTROKE_REPEAT") for engine in engines} == {None}
    assert {engine.environ["TWOSTROKE_CACHE"] for engine in engines} == {"/cache"}


def test_a_serial_engine_is_spared_what_it_cannot_do_and_every_engine_gets_the_same_prompts():
    config = CompareConfig(model="/m")
    serial = _work_for(Engine("serial", (), {}, is_serial=True), config)
    other = _work_for(Engine("other", (), {}), config)
    assert (serial.workloads, serial.repeat) == (("single", "mixed", "prefix"), 1)
    assert (other.workloads, other.repeat) == (config.workloads, 3)
    assert serial.prompt_seed == other.prompt_seed


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# Starts a helper that ignores SIGTERM, as engines start helpers, says which, and serves.
ENGINE = """
import http.server, subprocess, sys
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
helper = subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 1000"])
print(helper.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ok).serve_forever()
"""


async def test_a_stopped_engine_leaves_no_process_of_its_group(tmp_path: Path):
    port, log = free_port(), tmp_path / "log"
    engine = Engine("fake", (sys.executable, "-c", ENGINE, str(port)), dict(os.environ))
    async with running(engine, Endpoint.parse(f"http://127.0.0.1:{port}", ""), log, start_timeout_s=20.0):
        helper = int(log.read_text())
        os.kill(helper, 0)
    await eventually(lambda: not is_running(helper))


def is_running(pid: int) -> bool:
    """A zombie does not run: whether somebody reaps it is not the engine's affair."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_an_engine_that_ends_at_its_start_is_reported_with_its_last_words(tmp_path: Path):
    engine = Engine("fake", (sys.executable, "-c", "print('no model here'); raise SystemExit(3)"), dict(os.environ))
    endpoint = Endpoint.parse(f"http://127.0.0.1:{free_port()}", "")
    with pytest.raises(EngineFailed, match=r"exit code 3: no model here"):
        async with running(engine, endpoint, tmp_path / "log", start_timeout_s=20.0):
            pass


async def test_an_engine_that_never_gets_ready_is_given_up(tmp_path: Path):
    engine = Engine("fake", ("sleep", "1000"), dict(os.environ))
    endpoint = Endpoint.parse(f"http://127.0.0.1:{free_port()}", "")
    with pytest.raises(EngineFailed, match="not ready after 0 s"):
        async with running(engine, endpoint, tmp_path / "log", start_timeout_s=0.0):
            pass
