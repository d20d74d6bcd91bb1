"""Paged attention against the reference: ragged lengths, shuffled tables, every GQA ratio and head size, windows, soft caps."""

from __future__ import annotations

import pytest
import torch
from problems import DEVICE, DTYPES, LAYER, Heads, Problem, assert_close, make_problem

from shared.base.errors import Internal
from shared.kernels.kv_layout import KvLayer
from shared.kernels.reference import ReferenceKernels
from shared.kernels.triton import TritonKernels
from shared.kernels.triton.attention_decode import decode_launches
from shared.kernels.triton.launch import device_traits
from tests.support.quantized_kv import ONE_BYTE_TYPES, quantized_layer

HEADS = [
    Heads(6, 2, 8, 8),
    Heads(4, 4, 64, 16),
    Heads(6, 2, 80, 32),
    Heads(7, 1, 96, 16),
    Heads(8, 2, 128, 64),
    Heads(17, 1, 64, 16),
    Heads(2, 1, 256, 128),
]
WINDOWS_AND_CAPS = [(0, 0.0), (20, 0.0), (0, 2.0), (70, 1.5), (1, 0.0)]

TRAITS = device_traits(DEVICE)


def compare(problem: Problem, dtype: torch.dtype, window: int = 0, softcap: float = 0.0) -> None:
    scale = problem.q.shape[2] ** -0.5
    floats = KvLayer(problem.kv_layer.values.float())
    expected = ReferenceKernels().attention(problem.q.float(), floats, problem.batch, scale, window, softcap)
    actual = TritonKernels().attention(problem.q, problem.kv_layer, problem.batch, scale, window, softcap)
    assert actual.dtype == dtype
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_matches_at_the_edges_of_blocks(heads: Heads) -> None:
    edges = [1, heads.block_size - 1, heads.block_size, heads.block_size + 1, 2 * heads.block_size + 3]
    compare(make_problem(heads, [1] * len(edges), edges, torch.float32, seed=1), torch.float32)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill_matches_for_ragged_chunks(heads: Heads) -> None:
    query_lens, earlier = [5, heads.block_size, 2, 19], [0, 3, heads.block_size - 1, 2 * heads.block_size]
    context_lens = [n + e for n, e in zip(query_lens, earlier, strict=True)]
    compare(make_problem(heads, query_lens, context_lens, torch.float32, seed=2), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_batches_match_in_every_dtype(dtype: torch.dtype) -> None:
    heads = Heads(8, 2, 128, 16)
    compare(make_problem(heads, [1, 1, 1, 7, 1, 33], [17, 1, 150, 7, 40, 100], dtype, seed=3), dtype)


@pytest.mark.parametrize(("window", "softcap"), WINDOWS_AND_CAPS)
def test_windows_and_soft_caps_match(window: int, softcap: float) -> None:
    problem = make_problem(Heads(6, 2, 64, 16), [1, 1, 1, 50, 9], [1, 21, 131, 50, 120], torch.float32, seed=4)
    compare(problem, torch.float32, window, softcap)


@pytest.mark.parametrize("num_splits", [2, 3, 7])
@pytest.mark.parametrize("window", [0, 100])
def test_split_decode_matches_also_where_shares_are_empty(num_splits: int, window: int) -> None:
    problem = make_problem(Heads(6, 2, 80, 16), [1, 1, 1, 1], [1, 63, 129, 300], torch.float32, seed=5)
    expected = ReferenceKernels().attention(problem.q, problem.kv_layer, problem.batch, 0.1, window)
    out = torch.full_like(expected, torch.nan)
    for launch in decode_launches(problem.q, problem.kv_layer, problem.batch, out, TRAITS, 0.1, window, num_splits=num_splits):
        launch.run()
    assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_padding_row_without_keys_gives_zeros(num_splits: int) -> None:
    problem = make_problem(Heads(4, 2, 64, 16), [1, 1], [20, 1], torch.float32, seed=6)
    problem.batch.context_lens[1] = 0
    out = torch.full((2, 4 * 64), torch.nan, device=DEVICE)
    for launch in decode_launches(problem.q, problem.kv_layer, problem.batch, out, TRAITS, 0.1, num_splits=num_splits):
        launch.run()
    assert bool((out[1] == 0).all())
    assert bool(out[0].isfinite().all())


@pytest.mark.parametrize("kv_dtype", ONE_BYTE_TYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_byte_pools_match_the_reference(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Also where scales are as small as a float16 weight times them would not be."""
    problem = make_problem(Heads(6, 2, 64, 16), [1, 1, 20], [18, 70, 30], torch.float32, seed=7)
    problem.kv[:, :, 1] *= 1e-3
    kv_layer = quantized_layer(problem.kv[:, LAYER], kv_dtype)
    q = problem.q.to(dtype)
    expected = ReferenceKernels().attention(q.float(), kv_layer, problem.batch, 0.1, 40)
    actual = TritonKernels().attention(q, kv_layer, problem.batch, 0.1, 40)
    assert actual.dtype == dtype
    assert_close(actual.float() * 1e3, expected * 1e3, dtype)


@pytest.mark.parametrize("kv_dtype", ONE_BYTE_TYPES, ids=str)
def test_split_decode_of_a_one_byte_pool_matches(kv_dtype: torch.dtype) -> None:
    problem = make_problem(Heads(4, 2, 32, 8), [1, 1], [63, 300], torch.float32, seed=9)
    kv_layer = quantized_layer(problem.kv[:, LAYER], kv_dtype)
    expected = ReferenceKernels().attention(problem.q, kv_layer, problem.batch, 0.1)
    out = torch.full_like(expected, torch.nan)
    for launch in decode_launches(problem.q, kv_layer, problem.batch, out, TRAITS, 0.1, num_splits=3):
        launch.run()
    assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_what_is_not_finite_shows_in_the_results_of_its_sequence_alone(which: int) -> None:
    problem = make_problem(Heads(2, 1, 32, 16), [1, 1, 5, 5], [20, 20, 20, 20], torch.float32, seed=10)
    for sequence in (1, 3):
        problem.kv[int(problem.batch.block_tables[sequence, 0]), LAYER, which, 0, 3, 5] = torch.inf
    out = TritonKernels().attention(problem.q, quantized_layer(problem.kv[:, LAYER], torch.int8), problem.batch, 0.1)
    finite = out.isfinite().all(1).tolist()
    assert finite == [True, False] + [True] * 5 + [False] * 5
    assert finite == out.isfinite().any(1).tolist()


def test_heads_that_do_not_divide_are_refused() -> None:
    problem = make_problem(Heads(5, 2, 64, 16), [1], [3], torch.float32, seed=8)
    with pytest.raises(Internal, match="5 query heads"):
        TritonKernels().attention(problem.q, problem.kv_layer, problem.batch, 0.1)
