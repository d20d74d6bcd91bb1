"""Every launch that dispatch can choose, as a list, and its compilation ahead of time, which needs no GPU.

The list comes from the wrappers themselves, called with tensors on torch's "meta" device (shapes without memory): a kernel,
type or configuration that a wrapper can choose is compiled as it will be on the device. What varies only a number that the
kernel reads at run time is listed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shared.kernels.interface import AttentionBatch, SamplingBatch
from shared.kernels.kv_layout import LARGEST_STORED, KvLayer, typed_views
from shared.kernels.triton.activation import silu_mul_launch
from shared.kernels.triton.attention_decode import MAX_SPLITS, decode_launches
from shared.kernels.triton.attention_prefill import prefill_launches
from shared.kernels.triton.blocks import copy_runs_launch
from shared.kernels.triton.launch import DeviceTraits, Launch
from shared.kernels.triton.norm import MAX_FEATURES, rms_norm_launch
from shared.kernels.triton.rope_store import rope_store_launch
from shared.kernels.triton.sampling import sample_launch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NUM_KV_HEADS = 8
ALIGNMENT = 16  # bytes for pointers, counts for integers: what Triton specializes on

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True)
class NamedLaunch:
    name: str
    launch: Launch
    min_capability: int = 80  # float8_e4m3fn conversions exist from 89 on


@dataclass(frozen=True, slots=True)
class AttentionShape:
    head_size: int
    dtype: torch.dtype
    group: int = 4  # query heads per KV head
    block_size: int = 16
    kv_dtype: torch.dtype | None = None  # where it differs from dtype
    window: int = 0
    softcap: float = 0.0

    def __str__(self) -> str:
        kv = "" if self.kv_dtype is None else f"-kv_{_POINTERS[self.kv_dtype][1:]}"
        extras = ("-window" if self.window else "") + ("-softcap" if self.softcap else "")
        return f"d{self.head_size}-{_POINTERS[self.dtype][1:]}{kv}-g{self.group}-bs{self.block_size}{extras}"


# 96 and other head sizes share the padded tile and the masks of 80; float16 takes the registers that bfloat16 takes.
ATTENTION_SHAPES = [
    *(AttentionShape(head_size, BF16) for head_size in (8, 64, 80, 128, 256)),
    *(AttentionShape(head_size, FP32) for head_size in (128, 256)),
    AttentionShape(128, FP16),
    AttentionShape(128, BF16, group=7, block_size=64),
    AttentionShape(128, BF16, group=32),
    AttentionShape(64, BF16, group=71),
    AttentionShape(128, BF16, block_size=128, window=1024),
    AttentionShape(256, BF16, group=2, window=1024, softcap=50.0),
    *(AttentionShape(head_size, BF16, kv_dtype=torch.float8_e4m3fn) for head_size in (64, 128, 256)),
    *(AttentionShape(head_size, BF16, kv_dtype=torch.int8) for head_size in (64, 80, 128, 256)),
    AttentionShape(128, FP16, kv_dtype=torch.int8),
    AttentionShape(128, BF16, group=32, kv_dtype=torch.int8),
    # Float32 heads of 256 over a one-byte pool are left out: their prefill spills a few registers.
    AttentionShape(128, FP32, kv_dtype=torch.int8),
]


def all_launches(capability: int) -> list[NamedLaunch]:
    """What dispatch can choose on an NVIDIA device of this capability."""
    traits = DeviceTraits(num_multiprocessors=132, capability=capability)
    launches = [
        *_attention_launches(traits),
        *_unsplit_and_merging_launches(traits),
        *_rope_launches(),
        *_rowwise_launches(),
        *_block_launches(),
        *_sampling_launches(),
    ]
    return [n for n in launches if n.min_capability <= capability]


def signature(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """(types, constants, attributes) that Triton would derive from the arguments at a launch: pointers and integers divisible
    by 16 are marked so, the integer 1 and None become constants."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            types[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        types[parameter.name] = _type_name(value)
        if isinstance(value, Tensor) or (isinstance(value, int) and value % ALIGNMENT == 0):
            attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
    return types, constants, attributes


def compile_launch(launch: Launch, capability: int) -> Any:
    """Triton's compiled kernel (`.asm["cubin"]`, `.metadata`) for an NVIDIA device of this capability, such as 90."""
    types, constants, attributes = signature(launch)
    source = ASTSource(launch.kernel, types, constants, attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _type_name(value: Any) -> str:
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _meta_batch(num_seqs: int, num_tokens: int, num_single: int) -> AttentionBatch:
    return AttentionBatch(
        positions=_meta(num_tokens, dtype=torch.int64),
        slots=_meta(num_tokens, dtype=torch.int64),
        query_starts=_meta(num_seqs + 1, dtype=torch.int32),
        context_lens=_meta(num_seqs, dtype=torch.int32),
        block_tables=_meta(num_seqs, 512, dtype=torch.int32),
        num_single=num_single,
        max_query_len=num_tokens - num_single,
        max_context_len=8192,
    )


def _attention_launches(traits: DeviceTraits) -> Iterator[NamedLaunch]:
    for shape in ATTENTION_SHAPES:
        q, kv_layer, out, options = _attention_tensors(shape)
        capability = 89 if kv_layer.values.dtype == torch.float8_e4m3fn else 80
        split, _ = decode_launches(q, kv_layer, _meta_batch(32, 32, 32), out, traits, **options, num_splits=8)
        (prefill,) = prefill_launches(q, kv_layer, _meta_batch(2, 32, 0), out, traits, **options)
        yield NamedLaunch(f"prefill-{shape}", prefill, capability)
        yield NamedLaunch(f"decode_split-{shape}", split, capability)


def _unsplit_and_merging_launches(traits: DeviceTraits) -> Iterator[NamedLaunch]:
    """Without a split, decode differs only in the type and address of its result; merging hangs only on the head size."""
    for head_size in (64, 80, 128, 256):
        shape = AttentionShape(head_size, BF16)
        q, kv_layer, out, options = _attention_tensors(shape)
        batch = _meta_batch(32, 32, 32)
        (whole,) = decode_launches(q, kv_layer, batch, out, traits, **options, num_splits=1)
        _, reduce = decode_launches(q, kv_layer, batch, out, traits, **options, num_splits=MAX_SPLITS)
        if head_size == 128:
            yield NamedLaunch(f"decode-{shape}", whole)
        yield NamedLaunch(f"reduce-d{head_size}", reduce)


def _attention_tensors(shape: AttentionShape) -> tuple[Tensor, KvLayer, Tensor, dict[str, Any]]:
    """(q, kv_layer, out, the remaining arguments) of an attention wrapper."""
    num_heads = NUM_KV_HEADS * shape.group
    q, out = _meta(32, num_heads, shape.head_size, dtype=shape.dtype), _meta(32, num_heads * shape.head_size, dtype=shape.dtype)
    kv_dtype = shape.kv_dtype or shape.dtype
    options = {"scale": 0.1, "window": shape.window, "softcap": shape.softcap}
    return q, _meta_layer(shape.block_size, shape.head_size, kv_dtype), out, options


def _meta_layer(block_size: int, head_size: int, kv_dtype: torch.dtype) -> KvLayer:
    """Of a pool of 32 layers."""
    scale_bytes = 4 if kv_dtype in LARGEST_STORED else 0
    runs = _meta(1024, 32, 2, NUM_KV_HEADS, block_size * (head_size * kv_dtype.itemsize + scale_bytes), dtype=torch.uint8)
    return KvLayer(*typed_views(runs[:, 0], kv_dtype, block_size, head_size))


def _rope_launches() -> Iterator[NamedLaunch]:
    batch = _meta_batch(8, 8, 8)
    for head_size, rotary_size, dtype, kv_dtype in (
        (80, 32, FP16, FP16),
        (128, 128, BF16, BF16),
        (256, 256, FP32, FP32),
        (128, 128, BF16, torch.int8),
        (128, 128, BF16, torch.float8_e4m3fn),
        (256, 64, FP16, torch.int8),
    ):
        fused = _meta(8, 48, head_size, dtype=dtype)
        kv_layer = _meta_layer(16, head_size, kv_dtype)
        cos_sin = _meta(8192, 2, rotary_size // 2)
        launch = rope_store_launch(fused[:, :32], fused[:, 32:40], fused[:, 40:], cos_sin, kv_layer, batch)
        name = f"rope_store-d{head_size}-r{rotary_size}-{_POINTERS[dtype][1:]}-kv_{_POINTERS[kv_dtype][1:]}"
        yield NamedLaunch(name, launch, 89 if kv_dtype == torch.float8_e4m3fn else 80)


def _rowwise_launches() -> Iterator[NamedLaunch]:
    for dtype in (BF16, FP32):
        kind = _POINTERS[dtype][1:]
        heads = _meta(16, 32, 128, dtype=dtype)
        yield NamedLaunch(f"rms_norm-heads-{kind}", rms_norm_launch(heads, None, _meta(128, dtype=dtype), 1e-5, heads))
        for num_features in (576, 4096, MAX_FEATURES):
            x, weight = _meta(16, num_features, dtype=dtype), _meta(num_features, dtype=dtype)
            yield NamedLaunch(f"add_rms_norm-{num_features}-{kind}", rms_norm_launch(x, x, weight, 1e-5, x))
        yield NamedLaunch(f"silu_mul-{kind}", silu_mul_launch(_meta(16, 2 * 14336, dtype=dtype), _meta(16, 14336, dtype=dtype)))


def _block_launches() -> Iterator[NamedLaunch]:
    pool, ids = _meta(1024, 524288, dtype=torch.int32), _meta(8, dtype=torch.int64)
    yield NamedLaunch("copy_blocks", copy_runs_launch(pool, pool, ids, ids, 8))
    yield NamedLaunch("gather_blocks", copy_runs_launch(pool, pool, ids, None, 8))
    yield NamedLaunch("scatter_blocks", copy_runs_launch(pool, pool, None, ids, 8))


def _sampling_launches() -> Iterator[NamedLaunch]:
    for vocab_size in (2048, 128256):
        for all_greedy, needs_filter in ((True, False), (False, False), (False, True)):
            row = _meta(16)
            batch = SamplingBatch(row, _meta(16, dtype=torch.int64), row, row, row, all_greedy, needs_filter)
            launch = sample_launch(_meta(16, vocab_size), batch, _meta(16, dtype=torch.int64))
            kind = "greedy" if all_greedy else "filtered" if needs_filter else "plain"
            yield NamedLaunch(f"sample-{kind}-v{vocab_size}", launch)
