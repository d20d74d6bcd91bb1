"""From logits to tokens: numbers, penalties, log-probabilities, forks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from shared.base.request import Request, SamplingParams, choice_seed, finish_reason
from shared.engine.compute.penalties import adjust_logits, needs_adjusting
from shared.engine.compute.sampler import NotFiniteLogits, Sampler
from shared.engine.compute.uniform import uniforms
from shared.engine.schedule.plan import SampledToken, ScheduledSequence
from shared.engine.schedule.sequence import Sequence
from shared.kernels.interface import SamplingBatch
from shared.kernels.reference import ReferenceKernels

VOCAB_SIZE = 40
SAMPLER = Sampler(ReferenceKernels())


def random_logits(num_rows: int, seed: int) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def item(
    request_id: str = "r",
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    choice: int = 0,
    num_samples: int = 1,
    **sampling: Any,
) -> ScheduledSequence:
    ids = [*prompt, *output]
    sequence = Sequence(Request(request_id, ids, len(prompt), SamplingParams(**{"max_tokens": 64, **sampling})), choice=choice)
    return ScheduledSequence(sequence, start=len(ids) - 1, num_tokens=1, num_samples=num_samples)


def sample(logits: Tensor, *items: ScheduledSequence) -> list[list[SampledToken]]:
    return SAMPLER.launch(logits.clone(), items).wait()


def ids_of(samples: list[list[SampledToken]]) -> list[list[int]]:
    return [[token.token_id for token in tokens] for tokens in samples]


# Numbers


def test_a_number_depends_on_seed_and_position_alone() -> None:
    together = uniforms([5, 5, 9], [0, 7, 7])
    assert together.dtype == np.float32
    assert together[1] == uniforms([5], [7])[0]
    assert len(set(together.tolist())) == 3
    # Worked out by hand with Python's integers from the published SplitMix64 constants; must never change: running requests
    # move between versions.
    assert uniforms([0, 1, 2**64 - 1], [0, 3, 2**31]).tolist() == [
        hand_uniform(0, 0),
        hand_uniform(1, 3),
        hand_uniform(2**64 - 1, 2**31),
    ]


def hand_uniform(seed: int, position: int) -> float:
    def mix(z: int) -> int:
        z = (z + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    return (mix((mix(seed) + position * 0xD1342543DE82EF95) % 2**64) >> 40) / 2**24


@pytest.mark.parametrize("of", ["positions", "seeds", "choices"])
def test_numbers_are_uniform_and_neighbours_are_independent(of: str) -> None:
    n = 50_000
    seeds = {"positions": [42] * n, "seeds": list(range(n)), "choices": [choice_seed(42, c) for c in range(n)]}[of]
    numbers = uniforms(seeds, range(n) if of == "positions" else [17] * n).astype(np.float64)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    expected = n / 100
    chi_square = (((np.histogram(numbers, 100, (0, 1))[0] - expected) ** 2) / expected).sum()
    assert chi_square < 150  # 99 degrees of freedom: mean 99, standard deviation 14
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / math.sqrt(n)


def test_a_choice_does_not_repeat_another_choices_numbers_at_another_position() -> None:
    numbers = {choice: uniforms([choice_seed(7, choice)] * 200, range(200)).tolist() for choice in range(8)}
    assert len({x for values in numbers.values() for x in values}) > 8 * 200 - 5  # chance hits of 24 bits at most


# Drawing


def test_sampled_tokens_follow_the_softmax() -> None:
    n = 8_000
    logits = random_logits(1, seed=1)
    tokens = [
        t.token_id
        for start in range(0, n, 1000)
        for (t,) in sample(logits.repeat(1000, 1), *[item(seed=start + i, temperature=0.8) for i in range(1000)])
    ]
    expected = (logits[0] / 0.8).softmax(-1).numpy()
    variation = 0.5 * np.abs(np.bincount(tokens, minlength=VOCAB_SIZE) / n - expected).sum()
    assert variation < 0.04  # sqrt(40 / 8000) / 2.5 is what 40 independent counts give


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.85, "min_p": 0.15}, {0, 1, 2}),
        ({}, set(range(6))),
    ],
)
def test_each_filter_restricts_alone_and_min_p_goes_first(filters: dict[str, float], kept: set[int]) -> None:
    logits = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.05, 0.05]]).log().repeat(300, 1)
    sampled = ids_of(sample(logits, *[item(seed=i, **filters) for i in range(300)]))
    assert {token_id for (token_id,) in sampled} == kept


def test_a_greedy_row_beside_one_with_a_filter_and_a_filter_of_a_greedy_row_change_nothing() -> None:
    logits = random_logits(2, seed=21)
    best = logits.argmax(-1).tolist()
    assert ids_of(sample(logits, item(temperature=0.0, min_p=0.9), item(temperature=0.0, top_k=1))) == [[best[0]], [best[1]]]
    assert ids_of(sample(logits, item(temperature=0.0), item(top_k=1)))[0] == [best[0]]


@pytest.mark.parametrize("cold", [{"temperature": t} for t in (0.0, 5e-324, 1.18e-38, 1e-30, 9.99e-6)] + [{"top_p": 0.0}])
def test_a_temperature_near_zero_and_a_top_p_of_zero_are_greedy(cold: dict[str, float]) -> None:
    logits = random_logits(50, seed=22) / 1000
    logits[0] *= 1e36  # would overflow
    sampled = ids_of(sample(logits, *[item(seed=i, **cold) for i in range(50)]))
    assert sampled == [[token_id] for token_id in logits.argmax(-1).tolist()]


@pytest.mark.parametrize("cold", [{"temperature": 1.18e-38}, {"temperature": 9.99e-6}, {"top_p": 0.0}])
def test_a_cold_row_is_greedy_beside_one_that_draws(cold: dict[str, float]) -> None:
    logits = random_logits(2, seed=26) * 1e30
    logits[1] /= 1e30
    assert ids_of(sample(logits, item(**cold), item(seed=3)))[0] == [int(logits[0].argmax())]


def batch_of(*items: ScheduledSequence) -> SamplingBatch:
    """What a sampler asks of its kernels for these rows."""
    asked = []

    class Recording(ReferenceKernels):
        def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
            asked.append(batch)
            return super().sample(logits, batch)

    Sampler(Recording()).launch(random_logits(len(items), seed=27), items).wait()
    return asked[0]


def test_kernels_are_told_when_no_row_draws_or_filters() -> None:
    greedy, plain = item(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5), item(seed=1)
    assert batch_of(greedy, greedy).all_greedy is True
    assert batch_of(greedy, plain).all_greedy is False
    assert batch_of(greedy, plain).needs_filter is False
    for filters in ({"top_k": 1}, {"top_p": 0.99}, {"min_p": 0.01}):
        assert batch_of(greedy, plain, item(**filters)).needs_filter is True


def test_the_lowest_temperature_that_is_one_draws() -> None:
    logits = torch.zeros(1, VOCAB_SIZE).repeat(200, 1)
    drawn = {i for (i,) in ids_of(sample(logits, *[item(seed=i, temperature=1e-5) for i in range(200)]))}
    assert len(drawn) > VOCAB_SIZE // 2


def test_the_same_seed_and_position_give_the_same_token_whatever_shares_the_step() -> None:
    logits = random_logits(3, seed=2)
    a, b, c = item(seed=1), item(seed=2, output=(4, 5), top_p=0.5), item(temperature=0.0)
    alone = [sample(logits[i : i + 1], x)[0] for i, x in enumerate((a, b, c))]
    assert sample(logits, a, b, c) == alone
    assert sample(logits.flip(0), c, b, a) == alone[::-1]


def test_a_continued_request_draws_what_the_first_worker_would_have() -> None:
    logits = random_logits(1, seed=3).repeat(20, 1)
    first = [item(prompt=(1, 2), output=tuple(range(k)), seed=11) for k in range(20)]
    other = [item(prompt=(1, 2), output=tuple(range(k)), seed=choice_seed(11, 3)) for k in range(20)]
    forked = [item(prompt=(1, 2), output=tuple(range(k)), seed=11, choice=3, n=4) for k in range(20)]
    assert sample(logits, *other) == sample(logits, *forked)
    assert sample(logits, *other) != sample(logits, *first)


def test_a_fork_draws_each_choice_with_its_own_seed_from_one_row() -> None:
    logits = random_logits(2, seed=4)
    plain, forked = item(seed=5), item(seed=9, n=6, num_samples=6)
    samples = sample(logits, plain, forked)
    assert samples[0] == sample(logits[:1], plain)[0]
    expected = [sample(logits[1:], item(seed=choice_seed(9, choice)))[0][0] for choice in range(6)]
    assert samples[1] == expected
    assert len({t.token_id for t in samples[1]}) > 1


def test_a_greedy_fork_gives_equal_tokens() -> None:
    logits = random_logits(1, seed=5)
    best = int(logits.argmax())
    assert sample(logits, item(temperature=0.0, n=3, num_samples=3)) == [[SampledToken(best)] * 3]
    with_logprobs = sample(logits, item(temperature=0.0, n=3, num_samples=3, num_logprobs=1))[0]
    assert [t.token_id for t in with_logprobs] == [best] * 3
    assert with_logprobs == [with_logprobs[0]] * 3


def test_sequences_that_do_not_sample_get_nothing() -> None:
    logits = random_logits(1, seed=6)
    unfinished = item(num_samples=0)
    assert ids_of(sample(logits, unfinished, item(temperature=0.0), unfinished)) == [[], [int(logits.argmax())], []]
    assert sample(logits[:0], unfinished) == [[]]


# Log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_of_the_raw_logits_for_rows_that_ask(temperature: float) -> None:
    logits = random_logits(3, seed=7)
    items = [
        item(temperature=temperature, seed=1, num_logprobs=3, logit_bias={7: 100.0}),
        item(temperature=temperature, seed=2),
        item(temperature=temperature, seed=3, num_logprobs=0, n=2, num_samples=2),
    ]
    (biased,), (plain,), (first, second) = sample(logits, *items)
    expected = logits.log_softmax(-1)
    assert biased.token_id == 7
    assert biased.logprob == pytest.approx(float(expected[0, 7]))
    top = expected[0].topk(3)
    assert [t for t, _ in biased.top_logprobs] == top.indices.tolist()
    assert [p for _, p in biased.top_logprobs] == pytest.approx(top.values.tolist())
    assert plain.logprob is None
    assert plain.top_logprobs == ()
    for token in (first, second):
        assert token.logprob == pytest.approx(float(expected[2, token.token_id]))
        assert token.top_logprobs == ()


# What changes logits


def test_the_repetition_penalty_equals_transformers_over_prompt_and_output() -> None:
    logits = random_logits(2, seed=8)
    items = [item(prompt=(3, 4, 3), output=(9, 4), repetition_penalty=1.7), item(prompt=(5,), repetition_penalty=0.6)]
    expected = torch.cat(
        [
            RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([x.sequence.token_ids]), logits[i : i + 1])
            for i, (x, penalty) in enumerate(zip(items, (1.7, 0.6), strict=True))
        ]
    )
    adjusted = logits.clone()
    adjust_logits(adjusted, items)
    torch.testing.assert_close(adjusted, expected)


def test_presence_and_frequency_penalties_and_bias_follow_openais_formula_over_the_output_alone() -> None:
    logits = random_logits(2, seed=9)
    items = [
        item(prompt=(3, 8, 8), output=(9, 4, 9, 9), presence_penalty=0.5, frequency_penalty=0.25, logit_bias={9: -3.0, 8: 2.0}),
        item(presence_penalty=1.0),
    ]
    expected = logits.clone()
    expected[0, 9] += -0.5 - 3 * 0.25 - 3.0
    expected[0, 4] += -0.5 - 0.25
    expected[0, 8] += 2.0
    adjusted = logits.clone()
    adjust_logits(adjusted, items)
    torch.testing.assert_close(adjusted, expected)


def test_bias_comes_before_penalties_and_the_repetition_penalty_before_the_others() -> None:
    logits = torch.full((1, VOCAB_SIZE), -1.0)
    asked = item(output=(9, 9), logit_bias={9: 3.0}, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    adjusted = logits.clone()
    adjust_logits(adjusted, [asked])
    assert adjusted[0, 9] == (-1.0 + 3.0) / 2.0 - 0.5 - 2 * 0.25
    assert adjusted[0, 1] == -1.0 * 2.0  # in the prompt
    assert adjusted[0, 30] == -1.0


def test_no_bias_and_no_penalty_lifts_the_mask_of_a_stop_token() -> None:
    logits = random_logits(1, seed=23)
    best = int(logits.argmax())
    options: dict[str, Any] = {"min_tokens": 1, "stop_token_ids": (best,), "logit_bias": {best: 100.0}, "repetition_penalty": 0.5}
    adjusted = logits.clone()
    adjust_logits(adjusted, [item(**options)])
    assert adjusted[0, best] == -math.inf
    assert ids_of(sample(logits, item(temperature=0.0, **options))) != [[best]]


def test_each_adjustment_is_made_where_it_alone_is_asked_for() -> None:
    logits = random_logits(1, seed=24).abs() + 1
    for options in (
        {"logit_bias": {1: 2.0}}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0},
        {"min_tokens": 2, "stop_token_ids": (1,)},
    ):  # fmt: skip
        asked = item(output=(1,), **options)
        assert needs_adjusting(asked)
        adjusted = logits.clone()
        adjust_logits(adjusted, [asked])
        assert adjusted[0, 1] != logits[0, 1]
    for options in ({}, {"min_tokens": 1, "stop_token_ids": (1,)}, {"min_tokens": 2}, {"stop_token_ids": (1,)}):
        assert not needs_adjusting(item(output=(1,), **options))


def test_stop_tokens_are_masked_until_min_tokens_are_out() -> None:
    logits = random_logits(1, seed=10)
    order = logits[0].argsort(descending=True).tolist()
    options: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (order[0], order[1])}
    tokens = [ids_of(sample(logits, item(output=tuple(range(k)), **options)))[0][0] for k in range(4)]
    assert tokens == [order[2], order[2], order[0], order[0]]


def test_ignored_end_tokens_are_masked_until_min_tokens_are_out_as_in_vllm() -> None:
    logits = random_logits(1, seed=25)
    order = logits[0].argsort(descending=True).tolist()
    for stops, ignored in (((), (order[0], order[1])), ((order[1],), (order[0],))):
        options: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": stops, "ignored_eos_token_ids": ignored}
        tokens = [ids_of(sample(logits, item(output=tuple(range(k)), **options)))[0][0] for k in range(4)]
        assert tokens == [order[2], order[2], order[0], order[0]]
    assert finish_reason(SamplingParams(max_tokens=9, ignored_eos_token_ids=(5,)), 5, 3) is None


def test_ids_outside_the_vocabulary_are_passed_over() -> None:
    logits = random_logits(1, seed=11)
    options: dict[str, Any] = {"logit_bias": {VOCAB_SIZE: 100.0, 10**9: 5.0}, "stop_token_ids": (VOCAB_SIZE,), "min_tokens": 1}
    assert ids_of(sample(logits, item(temperature=0.0, **options))) == [[int(logits.argmax())]]


def test_one_rows_penalties_do_not_touch_the_others() -> None:
    logits = random_logits(3, seed=12)
    plain = item(temperature=0.0)
    tokens = ids_of(sample(logits, plain, item(temperature=0.0, logit_bias={5: 100.0}), plain))
    best = logits.argmax(-1).tolist()
    assert tokens == [[best[0]], [5], [best[2]]]


# Garbage


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "num_logprobs": 2, "top_k": 3}]
)
def test_logits_that_are_not_finite_are_refused_and_the_requests_named(bad: float, sampling: dict[str, Any]) -> None:
    logits = random_logits(3, seed=13)
    logits[1, 20] = bad
    with pytest.raises(NotFiniteLogits, match="request broken") as caught:
        sample(logits, item("fine", **sampling), item("broken", **sampling), item("fine too", **sampling))
    assert caught.value.request_ids == ["broken"]
    # The step after it may have been launched with these before anybody looks.
    launched = SAMPLER.launch(logits.clone(), [item(**sampling)] * 3).token_ids
    assert launched.min() >= 0
    assert launched.max() < VOCAB_SIZE
    with pytest.raises(NotFiniteLogits):
        sample(torch.full((1, VOCAB_SIZE), -math.inf), item(**sampling))


@pytest.mark.parametrize(
    ("size", "sampling"),
    [
        (1e35, {"temperature": 2e-5}),
        (-1e35, {"temperature": 2e-5}),
        (1e38, {"repetition_penalty": 0.1}),
        (3.4e38, {"logit_bias": {1: 0.0}, "temperature": 0.9}),
    ],
)
def test_scores_that_overflow_after_a_penalty_or_the_division_are_refused(size: float, sampling: dict[str, Any]) -> None:
    logits = torch.full((2, VOCAB_SIZE), size)
    with pytest.raises(NotFiniteLogits) as caught:
        sample(logits, item("broken", **sampling), item("fine", temperature=0.0))
    assert caught.value.request_ids == ["broken"]
    fine = {name: value for name, value in sampling.items() if name == "logit_bias"}
    assert len(sample(logits, item(temperature=2.0, **fine), item(temperature=0.0))) == 2


def test_all_broken_requests_are_named() -> None:
    with pytest.raises(NotFiniteLogits, match=r"for request a, b$") as caught:
        sample(torch.full((2, VOCAB_SIZE), math.nan), item("a"), item("b"))
    assert caught.value.request_ids == ["a", "b"]
