"""The shape of the work, without a server."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from bench.compare.config import CompareConfig
from bench.load.config import BenchConfig, WorkConfig
from bench.load.text import PromptSource, documentation, tokenize_with
from bench.load.workloads import make_workloads, mixed_lengths, poisson_arrivals_s
from shared.base.errors import ConfigError
from shared.options.config import parse_config
from tests.support.tiny_tokenizer import tiny_tokenizer


def test_mixed_lengths_are_as_described_and_the_same_every_time():
    lengths = mixed_lengths(64)
    prompts, outputs = [one.prompt for one in lengths], [one.output for one in lengths]
    assert 16 <= min(prompts) <= max(prompts) <= 1024
    assert 8 <= min(outputs) <= max(outputs) <= 512
    assert 180 < statistics.median(prompts) < 360
    assert 90 < statistics.median(outputs) < 180
    assert mixed_lengths(64) == lengths
    assert mixed_lengths(100)[:64] == lengths


def test_poisson_arrivals_have_the_rate_asked_for_and_random_gaps():
    arrivals_s = poisson_arrivals_s(rate=50.0, duration_s=100.0)
    gaps_s = [b - a for a, b in pairwise(arrivals_s)]
    assert len(arrivals_s) == pytest.approx(5000, rel=0.05)
    assert arrivals_s[-1] < 100.0
    # Of exponential gaps the standard deviation equals the mean.
    assert statistics.stdev(gaps_s) == pytest.approx(statistics.mean(gaps_s), rel=0.1)


def test_scaling_is_one_workload_for_each_number_of_streams():
    names = [workload.name for workload in make_workloads(WorkConfig(workload=("scaling", "single")))]
    assert names == ["scaling-1", "scaling-8", "scaling-32", "single"]


def test_prompts_are_cuts_of_the_text_and_follow_the_seed():
    text = list(range(1000))
    prompts = PromptSource(text, seed=5)
    cuts = [prompts.cut(10) for _ in range(20)]
    assert all(cut == list(range(cut[0], cut[0] + 10)) for cut in cuts)
    assert len({cut[0] for cut in cuts}) > 10
    again, other = PromptSource(text, seed=5), PromptSource(text, seed=6)
    assert [again.cut(10) for _ in range(20)] == cuts
    assert [other.cut(10) for _ in range(20)] != cuts


def test_a_prompt_may_be_the_whole_text_and_not_more():
    assert PromptSource([1, 2, 3], seed=0).cut(3) == [1, 2, 3]
    with pytest.raises(ConfigError, match="4 tokens"):
        PromptSource([1, 2, 3], seed=0).cut(4)


def test_the_text_is_long_enough_and_tokenized_without_special_tokens(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = documentation()
    assert sum(map(len, texts)) > 300_000
    token_ids = tokenize_with(tmp_path, texts[:3])
    assert tokenizer.decode(token_ids) == "".join(texts[:3])


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        tokenize_with(tmp_path, [])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--workload", "single,doubles"], ["--workload", "'single,doubles'", "mixed"]),
        (["--workload", ","], ["--workload", "mixed"]),
        (["--repeat", "0"], ["--repeat", "0"]),
        (["--concurrency", "0"], ["--concurrency", "0"]),
        (["--rate", "-1"], ["--rate", "-1"]),
        (["--duration-s", "0"], ["--duration-s"]),
    ],
)
def test_a_mistake_in_the_options_names_the_value(argv, words):
    with pytest.raises(ConfigError) as caught:
        parse_config(BenchConfig, argv, "twostroke bench", {})
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_the_seed_is_drawn_unless_given():
    assert parse_config(BenchConfig, ["--seed", "0"], "bench", {}).prompt_seed == 0
    assert parse_config(BenchConfig, [], "bench", {}).prompt_seed > 0


def test_a_comparison_names_an_engine_it_does_not_know():
    with pytest.raises(ConfigError, match=r"'vllm,tgi'.*llama\.cpp"):
        parse_config(CompareConfig, ["--engines", "vllm,tgi"], "twostroke bench compare", {})
