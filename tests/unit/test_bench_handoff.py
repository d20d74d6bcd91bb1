"""What the handoff and failover measurements conclude from what they have seen; expected values are worked out by hand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from bench.compare.stack import Metrics, model_folder
from bench.failover import __main__ as failover
from bench.failover.__main__ import FailoverConfig, Findings
from bench.failover.rounds import DecodeKill, PrefillKill, Verdict
from bench.failover.token_stream import Difference, StreamEnded, TokenStream, compare
from bench.handoff import __main__ as handoff
from bench.handoff.__main__ import COLOCATED, HandoffConfig, MeasurementFailed, Sample, Stages, summarize
from bench.load.exchange import Endpoint
from shared.base.errors import ConfigError
from shared.options.config import parse_config


def prefills(counts: int, queue_s: float, compute_s: float, transfer_s: float) -> Metrics:
    """A router's page after so many remote prefills that took so long in all."""
    lines = ["# TYPE twostroke_prefill_seconds histogram"]
    for stage, seconds in (("queue", queue_s), ("compute", compute_s), ("transfer", transfer_s)):
        lines.append(f'twostroke_prefill_seconds_bucket{{stage="{stage}",le="+Inf"}} {counts}')
        lines.append(f'twostroke_prefill_seconds_count{{stage="{stage}"}} {counts}')
        lines.append(f'twostroke_prefill_seconds_sum{{stage="{stage}"}} {seconds}')
    return Metrics("\n".join(lines) + "\n")


def test_metrics_are_summed_over_the_labels_that_are_not_named():
    page = 'a_total{leg="decode",cause="x"} 2\na_total{leg="decode",cause="y"} 3\na_total{leg="prefill",cause="x"} 7\n'
    metrics = Metrics(page)
    assert metrics.total("a_total", leg="decode") == 5
    assert metrics.total("a_total") == 12
    assert metrics.total("b_total", leg="decode") == 0


def test_stages_are_what_one_prompt_added_to_the_histograms():
    stages = Stages.between(prefills(3, 1.0, 10.0, 0.5), prefills(4, 1.25, 12.0, 0.75))
    assert (stages.queue_s, stages.compute_s, stages.transfer_s) == pytest.approx((0.25, 2.0, 0.25))
    sample = Sample("shm", 512, 2.5, stages)
    assert sample.overhead_s == pytest.approx(0.25)


def test_the_first_prompt_ever_has_stages_too():
    assert Stages.between(Metrics(""), prefills(1, 0.1, 0.2, 0.3)) == Stages(0.1, 0.2, 0.3)


@pytest.mark.parametrize("num_counted", [0, 2])
def test_a_request_that_was_not_the_only_one_handed_over_is_no_measurement(num_counted: int):
    with pytest.raises(MeasurementFailed, match=f"counted {num_counted}"):
        Stages.between(prefills(3, 1, 1, 1), prefills(3 + num_counted, 2, 2, 2))


def test_rows_hold_medians_and_stand_beside_the_colocated_worker():
    samples = [Sample(COLOCATED, 512, ttft_s, None) for ttft_s in (0.9, 1.0, 5.0)]
    samples += [Sample("shm", 512, compute_s + 0.2, Stages(0.1, compute_s, 0.05)) for compute_s in (1.0, 1.8, 0.6)]
    colocated, shm = summarize(samples)
    assert (colocated.way, colocated.ttft_s, colocated.overhead_s) == (COLOCATED, 1.0, None)
    assert (shm.ttft_s, shm.colocated_ttft_s, shm.compute_s) == pytest.approx((1.2, 1.0, 1.0))
    assert shm.overhead_s == pytest.approx(0.1)
    assert shm.overhead_share == pytest.approx(0.1 / 1.2)
    assert shm.transfer_share == pytest.approx(0.05 / 1.2)
    _, second, third = handoff.table([colocated, shm]).splitlines()
    assert second.split()[:3] == ["512", COLOCATED, "1,000.0"]
    assert third.split()[:5] == ["512", "shm", "1,200.0", "ms", "120.0%"]


@pytest.mark.parametrize(
    ("expected", "got", "difference"),
    [
        ("abcdef", "abcdef", Difference()),
        ("abcdef", "abdefg", Difference(num_lost=1, num_repeated=1)),  # c is lost, so g has come
        ("abcdef", "abccde", Difference(num_lost=1, num_repeated=1)),  # c is repeated, so f is missing
        ("abcdef", "abcxef", Difference(num_changed=1)),
        ("abcdef", "abc", Difference(num_lost=3)),
        ("abcdef", "", Difference(num_lost=6)),
        ("", "ab", Difference(num_repeated=2)),
    ],
)
def test_every_token_that_differs_is_counted(expected: str, got: str, difference: Difference):
    assert compare(expected, got) == difference
    assert bool(difference) == (expected != got)


def test_the_longest_gap_counts_from_the_last_token_before_the_kill():
    stream = TokenStream([1], 5, arrived_at=[1.0, 3.0, 3.1, 5.1, 5.2])
    assert stream.longest_gap_s(after=3.2) == pytest.approx(2.0)
    assert stream.longest_gap_s(after=5.15) == pytest.approx(0.1)
    assert stream.longest_gap_s(after=6.0) == 0.0
    assert stream.gaps_s(until=3.2) == pytest.approx([2.0, 0.1])


@asynccontextmanager
async def server(pieces: Iterable[bytes]) -> AsyncIterator[Endpoint]:
    """Answers any request with these pieces of a body, and the end of the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield Endpoint("127.0.0.1", listening.sockets[0].getsockname()[1], is_tls=False, base_path="", api_key="")


def event(*tokens: str) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"text": "".join(tokens), "logprobs": {"tokens": tokens}}]}) + b"\n\n"


async def test_a_stream_knows_its_tokens_however_they_are_packed():
    body = event("a") + event("b", "c") + event() + b"data: [DONE]\n\n"
    stream = TokenStream([1], 3)
    async with server([body[:20], body[20:50], body[50:]]) as endpoint:
        await stream.run(endpoint, "m", "salt", timeout_s=10.0)
    assert (stream.tokens, stream.error) == (["a", "b", "c"], "")
    assert len(stream.arrived_at) == 3
    assert stream.sent_at < stream.arrived_at[0] <= stream.arrived_at[1] == stream.arrived_at[2]
    await stream.until(3)
    with pytest.raises(StreamEnded, match="after 3 tokens"):
        await stream.until(4)


async def test_a_stream_that_fails_says_why_and_has_no_first_token():
    stream = TokenStream([1], 3)
    async with server([b'data: {"error": {"message": "no worker"}}\n\n']) as endpoint:
        await stream.run(endpoint, "m", "salt", timeout_s=10.0)
    assert (stream.error, stream.ttft_s) == ("no worker", math.inf)
    with pytest.raises(StreamEnded, match="no worker"):
        await stream.until(1)


def test_the_table_of_kills_leaves_out_those_that_came_too_late_and_counts_every_token():
    decode = DecodeKill("decode-0", 0.02, [0.5, 0.7], [0.03], 2, Verdict(40, Difference(num_lost=1)))
    hit = PrefillKill("prefill-0", True, 0.2, 0.9, [0.04], Verdict(20, Difference(num_changed=2), ("HTTP 503: gone",)))
    missed = PrefillKill("prefill-1", False, 0.2, 0.2, [9.0], Verdict(20))
    findings = Findings([decode], [hit, missed])
    table = failover.table(findings)
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert "pause of its streams 2 600 ms 698 ms 700 ms" in lines  # p99 of two lies at 99% of the way between them
    assert "increase 1 700 ms 700 ms 700 ms" in lines
    assert "9,000" not in table
    assert "80 tokens compared: 1 lost, 0 repeated, 2 changed; 1 streams failed" in lines
    assert "first error: HTTP 503: gone" in lines
    assert not findings.verdict.is_good
    assert Findings([], [missed]).verdict.is_good


@pytest.mark.parametrize(
    ("module", "argv", "words"),
    [
        (handoff, ["--lengths", "512,many"], ["--lengths", "'512,many'"]),
        (handoff, ["--lengths", "0"], ["--lengths", "'0'"]),
        (handoff, ["--transports", "shm,pigeon"], ["--transports", "'shm,pigeon'", "gloo"]),
        (handoff, ["--repeats", "0"], ["--repeats", "0"]),
        (failover, ["--kills", "0"], ["--kills", "0"]),
        (failover, ["--time-limit-s", "0"], ["--time-limit-s", "0"]),
        (failover, ["--model", "/no/such/model"], ["--model", "'/no/such/model'"]),
    ],
)
def test_a_mistake_in_the_options_names_the_value(module, argv, words):
    with pytest.raises(ConfigError) as caught:
        module.main(argv)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_prompts_that_do_not_fit_the_model_are_refused_before_anything_is_killed():
    with pytest.raises(ConfigError, match=r"128 \+ 192 .* model's 300"):
        FailoverConfig().check_lengths(300)
    FailoverConfig().check_lengths(320)


def test_the_seed_is_drawn_unless_given_and_lengths_are_read_in_order():
    config = parse_config(HandoffConfig, ["--seed", "0", "--lengths", "64, 16"], "handoff", {})
    assert (config.prompt_seed, config.lengths) == (0, (64, 16))
    assert parse_config(HandoffConfig, [], "handoff", {}).prompt_seed > 0


def test_a_model_is_a_folder_with_a_configuration(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_folder(str(tmp_path), lambda text: None)
    (tmp_path / "config.json").touch()
    assert model_folder(str(tmp_path), lambda text: None) == tmp_path
