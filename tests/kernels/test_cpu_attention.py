"""Paged attention on the CPU against the reference, over ragged batches in a pool whose unused slots are NaN."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from shared.kernels.kv_layout import KvLayer
from tests.kernels.cpu_cases import DTYPES, REFERENCE, Paged, Shape, assert_near, cpu_kernels, paged
from tests.support.quantized_kv import ONE_BYTE_TYPES

SINGLES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 100), (1, 256), (1, 257), (1, 600)]
CHUNKS = [(2, 2), (15, 15), (16, 16), (17, 17), (33, 90), (100, 300), (2, 130)]


def compare(case: Paged, window: int = 0, softcap: float = 0.0, kv_layer: KvLayer | None = None) -> Tensor:
    scale = case.q.shape[2] ** -0.5
    kv_layer = kv_layer or case.kv_layer
    out = cpu_kernels().attention(case.q, kv_layer, case.batch, scale, window, softcap)
    assert out.is_contiguous()
    assert_near(out, REFERENCE.attention(case.q, kv_layer, case.batch, scale, window, softcap))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", [SINGLES, CHUNKS, SINGLES[:3] + CHUNKS[-3:]], ids=["singles", "chunks", "mixed"])
def test_ragged_batches_equal_the_reference(lens: list[tuple[int, int]], dtype: torch.dtype) -> None:
    compare(paged(lens, Shape(6, 2, 64, dtype=dtype), seed=1))


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
def test_every_ratio_of_heads_and_block_size_equals_the_reference(group: int, block_size: int) -> None:
    lens = [(1, 1), (1, block_size - 1), (1, block_size), (1, block_size + 1), (1, 3 * block_size + 5)]
    lens += [(block_size - 1, block_size), (5, block_size + 1), (9, 3 * block_size)]
    compare(paged(lens, Shape(2 * group, 2, 32, block_size), seed=group))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 128, 256])
def test_every_head_size_equals_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    compare(paged([(1, 7), (1, 300), (20, 70), (3, 200)], Shape(3, 1, head_dim, dtype=dtype), seed=head_dim))


@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (10, 0.0), (70, 0.0), (0, 3.0), (65, 30.0)])
def test_windows_and_softcaps_equal_the_reference(window: int, softcap: float) -> None:
    compare(paged(SINGLES + CHUNKS, Shape(4, 2, 32), seed=window, window=window), window, softcap)


@pytest.mark.parametrize("seed", range(8))
def test_random_batches_equal_the_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_single, num_chunks, num_kv_heads, group = (int(torch.randint(1, 5, (), generator=generator)) for _ in range(4))
    queries = [1] * num_single + torch.randint(2, 120, (num_chunks,), generator=generator).tolist()
    past = torch.randint(0, 400, (num_single + num_chunks,), generator=generator).tolist()
    lens = [(q, q + p) for q, p in zip(queries, past, strict=True)]
    compare(paged(lens, Shape(num_kv_heads * group, num_kv_heads, 48, dtype=DTYPES[seed % 2]), seed))


@pytest.mark.parametrize("kv_dtype", ONE_BYTE_TYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "window", "softcap"), [(Shape(6, 2, 64), 0, 0.0), (Shape(3, 1, 20, 8), 10, 0.0), (Shape(8, 2, 128, 32), 0, 3.0)]
)
def test_one_byte_pools_equal_the_reference(
    shape: Shape, window: int, softcap: float, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    case = paged(SINGLES + CHUNKS, dataclasses.replace(shape, dtype=dtype), seed=9, window=window)
    compare(case, window, softcap, case.quantized(kv_dtype))


@pytest.mark.parametrize("kv_dtype", ONE_BYTE_TYPES, ids=str)
def test_every_value_that_a_one_byte_pool_can_hold_is_read_exactly(kv_dtype: torch.dtype) -> None:
    """One key, so the result is its value: all 256 codes but NaN's, which are never stored."""
    codes = torch.arange(256).to(torch.uint8).view(kv_dtype)
    codes = torch.where(codes.float().isfinite(), codes.float(), 0.0).to(kv_dtype)
    for queries in (1, 2):
        case = paged([(queries, queries)], Shape(1, 1, 256), seed=1)
        kv_layer = case.quantized(kv_dtype)
        assert kv_layer.scales is not None
        kv_layer.values[case.batch.block_tables[0, 0], :, 0, :queries] = codes
        kv_layer.scales[case.batch.block_tables[0, 0], :, 0, :queries] = 1.0
        out = cpu_kernels().attention(case.q * 0, kv_layer, case.batch, 1.0)
        assert torch.equal(out, codes.float().expand(queries, 256))


@pytest.mark.parametrize("kv_dtype", ONE_BYTE_TYPES, ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("queries", [1, 20])
def test_a_key_or_value_that_is_not_finite_shows_in_the_results_of_its_sequence_alone(
    queries: int, which: int, kv_dtype: torch.dtype
) -> None:
    case = paged([(1, 40)] * 2 if queries == 1 else [(queries, 40)] * 2, Shape(2, 1, 32), seed=2)
    case.kv[case.batch.block_tables[1, 0], 1, which, 0, 3, 5] = math.inf
    out = cpu_kernels().attention(case.q, case.quantized(kv_dtype), case.batch, 0.2)
    assert out[:queries].isfinite().all()
    assert out[queries:].isnan().all()


def test_large_scores_neither_overflow_nor_vanish() -> None:
    case = paged([(1, 300), (40, 300)], Shape(2, 1, 64), seed=3)
    case = dataclasses.replace(case, q=case.q * 40)
    out = cpu_kernels().attention(case.q, case.kv_layer, case.batch, 0.125)
    # Scores are hundreds, and so are their rounding errors.
    assert_near(out, REFERENCE.attention(case.q, case.kv_layer, case.batch, 0.125), scale=10)


def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch_and_in_any_chunking() -> None:
    lens = [(1, 700), (1, 30), (70, 290), (9, 9)]
    case = paged(lens, Shape(6, 2, 64), seed=4)
    together = compare(case)
    starts = case.batch.query_starts.tolist()
    for s, (queries, keys) in enumerate(lens):
        for first, last in [(0, queries), (queries // 2, queries)]:
            if last - first == 1 and queries > 1:
                continue
            alone = dataclasses.replace(
                case.batch,
                query_starts=torch.tensor([0, last - first], dtype=torch.int32),
                context_lens=torch.tensor([keys], dtype=torch.int32),
                block_tables=case.batch.block_tables[s : s + 1],
                num_single=int(queries == 1),
            )
            rows = slice(starts[s] + first, starts[s] + last)
            assert torch.equal(cpu_kernels().attention(case.q[rows], case.kv_layer, alone, 0.125), together_at_scale(case)[rows])
    assert together.isfinite().all()


def together_at_scale(case: Paged) -> Tensor:
    return cpu_kernels().attention(case.q, case.kv_layer, case.batch, 0.125)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(num_threads: int) -> None:
    case = paged([(1, 900), (1, 40), (90, 200)], Shape(6, 2, 64), seed=5)
    before = torch.get_num_threads()
    expected = compare(case)
    try:
        torch.set_num_threads(num_threads)
        assert torch.equal(compare(case), expected)
    finally:
        torch.set_num_threads(before)


def test_float16_is_refused_by_name() -> None:
    case = paged([(1, 3)], Shape(2, 1, 16, dtype=torch.float16), seed=6)
    with pytest.raises(RuntimeError, match="float32 or bfloat16, not Half"):
        cpu_kernels().attention(case.q, case.kv_layer, case.batch, 1.0)
