"""Sampling on the CPU against the reference, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shared.kernels.interface import SamplingBatch
from tests.kernels.cpu_cases import REFERENCE, cpu_kernels


def sampling(
    num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, uniforms: Tensor | None = None
) -> SamplingBatch:
    return SamplingBatch(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int64),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        uniforms=torch.rand(num_rows, generator=torch.Generator().manual_seed(9)) if uniforms is None else uniforms,
        all_greedy=temperature == 0.0,
        needs_filter=top_k > 0 or top_p < 1.0 or min_p > 0.0,
    )


def same_tokens(logits: Tensor, batch: SamplingBatch) -> None:
    expected = REFERENCE.sample(logits.clone(), batch)
    assert torch.equal(cpu_kernels().sample(logits.clone(), batch), expected)


def random_logits(num_rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (1, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1),
                                                       (40, 0.8, 0.05), (5000, 0.01, 0.0), (0, 0.0, 0.0)])  # fmt: skip
def test_every_filter_chooses_what_the_reference_chooses(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(24, 1500, seed=top_k)
    same_tokens(logits, sampling(24, temperature, top_k, top_p, min_p))


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    batch = SamplingBatch(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.5]),
        top_k=torch.tensor([0, 3, 0, 20]),
        top_p=torch.tensor([1.0, 1.0, 0.5, 0.9]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.2]),
        uniforms=torch.tensor([0.1, 0.99, 0.5, 0.0]),
        all_greedy=False,
        needs_filter=True,
    )
    same_tokens(random_logits(4, 49152, seed=5), batch)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_equal_logits_the_lower_ids_stay(temperature: float) -> None:
    logits = random_logits(64, 300, seed=6).round()
    for top_k, top_p, min_p in [(0, 1.0, 0.0), (4, 1.0, 0.0), (0, 0.6, 0.0), (7, 0.5, 0.0), (9, 0.9, 0.1), (0, 1.0, 0.2)]:
        same_tokens(logits, sampling(64, temperature, top_k, top_p, min_p))


def test_min_p_goes_before_top_k_and_top_p() -> None:
    logits = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05]).log().repeat(100, 1)
    uniforms = (torch.arange(100) + 0.5) / 100
    for kept, filters in [
        ({0, 1, 2}, {"top_p": 0.85, "min_p": 0.15}),
        ({0, 1, 2, 3}, {"min_p": 0.15}),
        ({0, 1}, {"top_k": 3, "min_p": 0.3}),
        ({0, 1, 2}, {"top_k": 3, "min_p": 0.15}),
        ({0}, {"top_p": 0.0}),
    ]:
        batch = sampling(100, uniforms=uniforms, **filters)
        assert set(cpu_kernels().sample(logits.clone(), batch).tolist()) == kept
        same_tokens(logits, batch)


def test_masked_tokens_are_never_chosen() -> None:
    logits = torch.full((50, 400), -math.inf)
    logits[:, [7, 123, 399]] = torch.tensor([1.0, 0.5, 0.0])
    for batch in [sampling(50), sampling(50, top_k=10), sampling(50, top_p=0.999), sampling(50, temperature=0.0)]:
        same_tokens(logits, batch)


def test_the_ends_of_the_unit_interval_give_the_first_and_the_last_possible_token() -> None:
    logits = torch.zeros(2, 1000)
    logits[:, :10] = logits[:, 990:] = -math.inf
    almost_one = 1.0 - 2.0**-24
    tokens = cpu_kernels().sample(logits.clone(), sampling(2, uniforms=torch.tensor([0.0, almost_one])))
    assert tokens.tolist() == [10, 989]


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(1000, 4)
    tokens = cpu_kernels().sample(logits.clone(), sampling(1000, uniforms=(torch.arange(1000) + 0.5) / 1000))
    assert torch.bincount(tokens).tolist() == [500, 250, 125, 125]
