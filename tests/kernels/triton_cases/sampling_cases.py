"""Sampling against the reference: every filter alone and together, ties, masked tokens, several tiles."""

from __future__ import annotations

import pytest
import torch
from problems import DEVICE, randn, sampling_batch

from shared.kernels.interface import SamplingBatch
from shared.kernels.reference import ReferenceKernels
from shared.kernels.triton import TritonKernels
from shared.kernels.triton.sampling import MAX_TILE, sample_launch

NUM_ROWS = 2
FILTERS: list[dict[str, float | int]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5, "temperature": 2.0},
    {"top_p": 0.7},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7},
    {"top_k": 100000},
]


def compare(logits: torch.Tensor, batch: SamplingBatch, max_tile: int = MAX_TILE) -> torch.Tensor:
    out = torch.full((len(logits),), -1, dtype=torch.int64, device=DEVICE)
    sample_launch(logits.clone(), batch, out, max_tile).run()
    assert out.tolist() == ReferenceKernels().sample(logits.clone(), batch).tolist()
    return out


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [50, 200])
def test_filtered_draws_match(filters: dict[str, float | int], vocab_size: int) -> None:
    compare(randn(NUM_ROWS, vocab_size, seed=1) * 3, sampling_batch(NUM_ROWS, **filters, seed=2), max_tile=128)


def test_rows_with_different_parameters_share_a_batch() -> None:
    batch = sampling_batch(4, [0.0, 1.0, 0.5, 1.5], [0, 3, 0, 7], [1.0, 1.0, 0.6, 0.9], [0.0, 0.0, 0.1, 0.0], seed=3)
    compare(randn(4, 120, seed=4) * 2, batch, max_tile=64)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, 300, device=DEVICE)
    logits[0, [7, 200]] = 2.0
    logits[1, [299, 130]] = 1.0
    chosen = compare(logits, sampling_batch(3, temperature=0.0), max_tile=128)
    assert chosen.tolist() == [7, 130, 0]


def test_of_equal_logits_the_lower_ids_stay_under_top_k_and_top_p() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 3.0, -5.0, 0.0, -0.0]] * 6, device=DEVICE)
    uniforms = [0.01, 0.2, 0.45, 0.6, 0.8, 0.99]
    for max_tile in (4, MAX_TILE):
        assert set(compare(logits, sampling_batch(6, top_k=1, uniforms=uniforms), max_tile).tolist()) == {1}
        assert set(compare(logits, sampling_batch(6, top_k=2, uniforms=uniforms), max_tile).tolist()) == {1, 3}
        assert set(compare(logits, sampling_batch(6, top_p=0.5, uniforms=uniforms), max_tile).tolist()) == {1, 3}
        compare(logits, sampling_batch(6, top_k=4, top_p=0.99, uniforms=uniforms), max_tile)
        compare(logits, sampling_batch(6, top_k=7, uniforms=uniforms), max_tile)


def test_min_p_goes_before_top_k_and_top_p() -> None:
    logits = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05], device=DEVICE).log().repeat(16, 1)
    uniforms = [(i + 0.5) / 16 for i in range(16)]
    assert set(compare(logits, sampling_batch(16, top_p=0.85, min_p=0.15, uniforms=uniforms)).tolist()) == {0, 1, 2}
    assert set(compare(logits, sampling_batch(16, min_p=0.15, uniforms=uniforms)).tolist()) == {0, 1, 2, 3}
    assert set(compare(logits, sampling_batch(16, top_k=3, min_p=0.3, uniforms=uniforms)).tolist()) == {0, 1}


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((5, 100), -torch.inf, device=DEVICE)
    logits[:, [3, 75, 99]] = torch.tensor([0.0, 1.0, 0.5], device=DEVICE)
    uniforms = [0.0, 0.3, 0.6, 0.9, 1 - 2**-24]
    assert set(compare(logits, sampling_batch(5, uniforms=uniforms), max_tile=64).tolist()) == {3, 75, 99}
    compare(logits[:2], sampling_batch(2, top_k=50, top_p=0.9, uniforms=uniforms[:2]), max_tile=64)


def test_draws_follow_the_distribution() -> None:
    num_rows = 32
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE).log().repeat(num_rows, 1)
    uniforms = [(i + 0.5) / num_rows for i in range(num_rows)]
    counts = torch.bincount(compare(logits, sampling_batch(num_rows, uniforms=uniforms)), minlength=4)
    assert (counts / num_rows - torch.tensor([0.1, 0.2, 0.3, 0.4], device=DEVICE)).abs().max() <= 1 / num_rows


def test_the_backend_samples_a_large_vocabulary() -> None:
    logits, batch = randn(2, 50_000, seed=5) * 2, sampling_batch(2, [0.8, 0.0], 40, 0.9, seed=6)
    assert TritonKernels().sample(logits.clone(), batch).tolist() == ReferenceKernels().sample(logits, batch).tolist()
