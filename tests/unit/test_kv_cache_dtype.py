"""One-byte KV caches: what is stored, what it costs in precision, what it saves in memory, and which options go together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.base.errors import ConfigError
from shared.base.worker_info import KvGeometry
from shared.engine.compute.batch import build_batch, known_token_ids
from shared.engine.compute.runner import ModelRunner
from shared.engine.compute.sampler import NotFiniteLogits
from shared.engine.memory import sizing
from shared.engine.memory.kv_pool import KvPool
from shared.engine.schedule.plan import Plan
from shared.kernels.interface import AttentionBatch
from shared.kernels.kv_layout import LARGEST_STORED, SMALLEST_SCALE
from shared.kernels.reference import ReferenceKernels, quantize
from shared.models.dtype import choose_kv_dtype
from shared.options.config import parse_config
from shared.options.worker import WorkerConfig
from tests.support.engine import VOCAB_SIZE, make_sequence, make_tiny_model, schedule, tiny_runner
from tests.support.quantized_kv import ONE_BYTE_TYPES, empty_layer, quantized_layer, restored

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GEOMETRY = KvGeometry("digest", "bfloat16", num_layers=3, num_kv_heads=4, head_dim=64, block_size=16, kv_dtype="bfloat16")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The most that storing may change each element of x [..., D]: half a step of int8; of float8_e4m3fn half of the last of four
    significant bits, or half of its smallest number."""
    step = x.abs().amax(-1, keepdim=True) / LARGEST_STORED[dtype]
    if dtype is torch.int8:
        return step / 2 * torch.ones_like(x)
    return torch.maximum(x.abs() * 2**-4, step * 2**-10)


# What is stored


@pytest.mark.parametrize("dtype", ONE_BYTE_TYPES, ids=str)
def test_what_is_stored_is_off_by_at_most_half_a_step_of_its_own_token_and_head(dtype: torch.dtype) -> None:
    x = torch.randn(5, 2, 3, 16, 64, generator=generator(1)) * torch.logspace(-30, 30, 16)[:, None]
    layer = quantized_layer(x, dtype)
    assert ((restored(layer) - x).abs() <= rounding(x, dtype) * (1 + 1e-6)).all()
    alone = quantized_layer(x[2:3], dtype)
    assert torch.equal(alone.values.float(), layer.values[2:3].float())


@pytest.mark.parametrize("dtype", ONE_BYTE_TYPES, ids=str)
def test_a_token_of_zeros_or_of_tiny_numbers_is_stored_as_such(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -0.0, 0.0], [1e-45, -1e-40, 0.0]])
    values, scales = quantize(x, dtype)
    assert scales.tolist() == [SMALLEST_SCALE, SMALLEST_SCALE]
    assert (values.float() * scales[:, None]).abs().max() <= 1e-38


@pytest.mark.parametrize("dtype", ONE_BYTE_TYPES, ids=str)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_is_not_finite_as_a_whole(dtype: torch.dtype, odd: float) -> None:
    values, scales = quantize(torch.tensor([[1.0, odd, 2.0], [1.0, 1.0, 1.0]]), dtype)
    assert scales.isfinite().tolist() == [False, True]
    assert (values.float() * scales[:, None]).isnan().all(1).tolist() == [True, False]


@pytest.mark.parametrize("kv_dtype", ONE_BYTE_TYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_queries", [1, 7])
def test_attention_is_off_from_a_float_cache_by_no_more_than_rounding_explains(
    dtype: torch.dtype, kv_dtype: torch.dtype, num_queries: int
) -> None:
    """Scores are off by at most e = max over keys of |q| . rounding(k), so each weight by a factor of exp(+-2e) at most."""
    num_keys, scale, kernels = 40, 0.1, ReferenceKernels()
    q = torch.randn(num_queries, 6, 32, generator=generator(2)).to(dtype)
    k, v = torch.randn(2, num_keys, 2, 32, generator=generator(3)).to(dtype)
    layer = empty_layer(4, 2, 16, 32, kv_dtype)
    still = torch.stack((torch.ones(num_keys, 16), torch.zeros(num_keys, 16)), dim=1)
    kernels.rope_store(torch.zeros(num_keys, 6, 32, dtype=dtype), k, v, still, layer, batch_of(num_keys, num_keys))
    out = kernels.attention(q, layer, batch_of(num_queries, num_keys), scale).float().view(num_queries, 6, 32)
    k, v = (x.float().repeat_interleave(3, dim=1) for x in (k, v))
    for i in range(num_queries):
        seen = num_keys - num_queries + i + 1
        scores = torch.einsum("hd,khd->hk", q[i].float(), k[:seen]) * scale
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), v[:seen])
        score_error = torch.einsum("hd,khd->hk", q[i].float().abs(), rounding(k[:seen], kv_dtype)).amax(1) * scale
        error = rounding(v[:seen], kv_dtype).amax((0, 2)) + (torch.exp(2 * score_error) - 1) * v[:seen].abs().amax((0, 2))
        allowed = error[:, None] + expected.abs() * torch.finfo(dtype).eps + 1e-5
        assert ((out[i] - expected).abs() <= allowed).all()


def batch_of(num_queries: int, num_keys: int) -> AttentionBatch:
    """The last queries of one sequence, in blocks 1, 2, …"""
    positions = torch.arange(num_keys - num_queries, num_keys)
    return AttentionBatch(
        positions=positions,
        slots=positions + 16,
        query_starts=torch.tensor([0, num_queries], dtype=torch.int32),
        context_lens=torch.tensor([num_keys], dtype=torch.int32),
        block_tables=torch.tensor([[1, 2, 3]], dtype=torch.int32),
        num_single=int(num_queries == 1),
        max_query_len=num_queries,
        max_context_len=num_keys,
    )


# Engine


@torch.inference_mode()
def logits_of(runner: ModelRunner, ids: list[int]) -> Tensor:
    """Of all tokens, the first 20 in one chunk and the others one by one."""
    sequence = make_sequence(ids, 1, 8)
    parts = []
    for count in [20] + [1] * (len(ids) - 20):
        plan = Plan((schedule(sequence, count),))
        batch = build_batch(plan, runner.pool.geometry.block_size, CPU)
        token_ids = torch.from_numpy(known_token_ids(plan))
        parts.append(runner.model.logits(runner.model.forward(token_ids, runner.pool.layers, batch.attention)))
        sequence.num_computed_tokens += count
    return torch.cat(parts)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize(("option", "most"), [("int8", 0.01), ("fp8", 0.05)])
def test_a_models_perplexity_stays_near_that_of_a_float_cache(kernels: str, option: str, most: float, tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    ids = torch.randint(VOCAB_SIZE, (90,), generator=generator(4)).tolist()
    targets = torch.tensor(ids[1:])
    expected = logits_of(tiny_runner(tmp_path, kernels=kernels), ids)
    actual = logits_of(tiny_runner(tmp_path, kernels=kernels, kv_cache_dtype=option), ids)
    assert not torch.equal(actual, expected)
    losses = [torch.nn.functional.cross_entropy(x[:-1], targets) for x in (expected, actual)]
    assert abs(losses[1] - losses[0]) <= most
    divergence = torch.nn.functional.kl_div(
        actual.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert divergence <= most


@pytest.mark.parametrize("option", ["int8", "fp8"])
@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
def test_a_layer_that_gives_no_numbers_still_ends_its_request(option: str, projection: str, tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path)
    with torch.no_grad():
        model.get_parameter(f"model.layers.2.self_attn.{projection}.weight")[0, 0] = torch.inf
    model.save_pretrained(tmp_path)
    with pytest.raises(NotFiniteLogits):
        tiny_runner(tmp_path, kv_cache_dtype=option)  # already its first step


# Memory


@pytest.mark.parametrize(("kv_dtype", "gain"), [("int8", 128 / 68), ("float8_e4m3fn", 128 / 68), ("float32", 0.5)])
def test_the_same_memory_holds_as_many_more_blocks_as_they_are_smaller(kv_dtype: str, gain: float) -> None:
    config = WorkerConfig(kv_cache_memory=64 << 20)
    before = sizing.cpu_num_blocks(config, GEOMETRY, 1 << 20, 1 << 40)
    after = sizing.cpu_num_blocks(config, replace(GEOMETRY, kv_dtype=kv_dtype), 1 << 20, 1 << 40)
    assert after == pytest.approx(before * gain, rel=0.01)


def test_a_block_of_a_one_byte_pool_is_one_run_of_values_and_scales() -> None:
    geometry = replace(GEOMETRY, kv_dtype="int8")
    assert geometry.head_bytes == 16 * 64 + 16 * 4
    assert geometry.block_bytes == 3 * 2 * 4 * geometry.head_bytes
    pool = KvPool(geometry, 5, CPU, ReferenceKernels())
    assert pool.scales is not None
    pool.kv[2, 1, 0, 3] = 7
    pool.scales[2, 1, 0, 3] = 0.5
    run = pool.blocks[2, 1, 0, 3]
    assert run[: 16 * 64].tolist() == [7] * (16 * 64)
    assert run[16 * 64 :].view(torch.float32).tolist() == [0.5] * 16
    pool.copy([(2, 4)])
    layer = pool.layers[1]
    assert layer.scales is not None
    assert bool((layer.values[4, 0, 3] == 7).all() & (layer.scales[4, 0, 3] == 0.5).all())
    assert int((pool.blocks != 0).sum()) == 2 * int((run != 0).sum())


# Options


def test_the_option_names_the_stored_type() -> None:
    assert choose_kv_dtype("auto", torch.bfloat16, CPU) is torch.bfloat16
    assert choose_kv_dtype("int8", torch.float32, CPU) is torch.int8
    assert {choose_kv_dtype(name, torch.float32, CPU) for name in ("fp8", "fp8_e4m3")} == {torch.float8_e4m3fn}
    with pytest.raises(ConfigError, match="--kv-cache-dtype is 'int4'; it must be one of auto, fp8, fp8_e4m3, int8"):
        parse_config(WorkerConfig, ["--kv-cache-dtype", "int4"], "twostroke", {})


def test_fp8_is_refused_on_a_gpu_that_cannot_convert_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_kv_dtype("int8", torch.bfloat16, CUDA) is torch.int8
    with pytest.raises(
        ConfigError, match=r"--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 or later, and A100 is older"
    ):
        choose_kv_dtype("fp8", torch.bfloat16, CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_kv_dtype("fp8", torch.bfloat16, CUDA) is torch.float8_e4m3fn


def test_stored_and_computed_types_are_both_in_the_digest() -> None:
    variants = [
        replace(GEOMETRY, dtype=d, kv_dtype=s) for d in ("bfloat16", "float32") for s in ("bfloat16", "int8", "float8_e4m3fn")
    ]
    assert len({g.digest for g in variants}) == len(variants)
