"""One whole decode step of a model with the shape of Llama 3 8B and random weights, captured as the engine captures it, against its
floor: the time that the device's copy rate would take for the bytes that the step must read (all weights once, each sequence's KV).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.kernels.gpu_kernels import Rows, fits
from bench.kernels.gpu_timing import replay_seconds
from shared.base.blocks_of import num_blocks_of
from shared.base.request import Request, SamplingParams
from shared.base.worker_info import KvGeometry
from shared.engine.compute.decode_graphs import CudaCapture, DecodeGraphs
from shared.engine.memory.kv_pool import KvPool
from shared.engine.schedule.plan import Plan, ScheduledSequence
from shared.engine.schedule.sequence import Sequence
from shared.kernels.interface import SamplingBatch
from shared.kernels.triton import TritonKernels
from shared.models.config import ModelConfig, from_transformers
from shared.models.decoder import Decoder, Layer, Linear, Weights
from shared.models.rope import cos_sin_table

DTYPE = torch.bfloat16
BLOCK_SIZE = 16
BATCHES_AND_CONTEXTS = ((1, 1024), (16, 1024), (64, 1024), (64, 4096), (256, 1024))
MAX_MODEL_LEN = 8192


def decode_steps(copy_bytes_per_s: float) -> Rows:
    config = llama_3_8b()
    model, weight_bytes = random_decoder(config)
    rows: Rows = []
    for batch_size, context_len in BATCHES_AND_CONTEXTS:
        kv_bytes = batch_size * context_len * 2 * config.num_layers * config.num_kv_heads * config.head_dim * DTYPE.itemsize
        if not fits(kv_bytes):
            continue
        elapsed_s = step_seconds(model, batch_size, context_len)
        floor_s = (weight_bytes + kv_bytes) / copy_bytes_per_s
        rows.append(
            {
                "batch": batch_size,
                "context": context_len,
                "ms": elapsed_s * 1e3,
                "floor ms": floor_s * 1e3,
                "of floor": elapsed_s / floor_s,
                "tokens/s": batch_size / elapsed_s,
            }
        )
    return rows


def llama_3_8b() -> ModelConfig:
    from transformers import LlamaConfig

    return from_transformers(
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=MAX_MODEL_LEN,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            tie_word_embeddings=False,
        )
    )


def random_decoder(config: ModelConfig) -> tuple[Decoder, int]:
    """The model, and the bytes of weights that a step reads (all but the embedding)."""
    hidden, heads_size = config.hidden_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    sizes: list[int] = []

    def matrix(num_rows: int, num_columns: int) -> Linear:
        sizes.append(num_rows * num_columns * DTYPE.itemsize)
        return Linear(kernels.pack_linear(_random(num_rows, num_columns)))

    kernels = TritonKernels()
    ones = torch.ones(hidden, dtype=DTYPE, device="cuda")
    layers = [
        Layer(
            input_norm=ones,
            qkv=matrix(heads_size, hidden),
            q_norm=None,
            k_norm=None,
            o=matrix(hidden, config.num_heads * config.head_dim),
            mlp_norm=ones,
            gate_up=matrix(2 * config.intermediate_size, hidden),
            down=matrix(hidden, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    ]
    weights = Weights(
        embed=kernels.pack_linear(_random(config.vocab_size, hidden)),
        layers=tuple(layers),
        norm=ones,
        head=matrix(config.vocab_size, hidden),
        cos_sin=cos_sin_table(config.inv_freq, config.rope_scale, MAX_MODEL_LEN, torch.device("cuda")),
    )
    return Decoder(config, weights, kernels), sum(sizes)


def _random(num_rows: int, num_columns: int) -> Tensor:
    return torch.empty(num_rows, num_columns, dtype=DTYPE, device="cuda").normal_(std=num_columns**-0.5)


@torch.inference_mode()
def step_seconds(model: Decoder, batch_size: int, context_len: int) -> float:
    """Forward pass, logits and greedy sampling."""
    plan, num_blocks = _plan(batch_size, context_len)
    graphs = DecodeGraphs(model, kv_pool(model, num_blocks), MAX_MODEL_LEN, [batch_size], CudaCapture())
    token_ids = torch.arange(batch_size, device="cuda")
    size = graphs.fill(plan, token_ids)
    off, on = torch.zeros(batch_size, device="cuda"), torch.ones(batch_size, device="cuda")
    greedy = SamplingBatch(off, torch.zeros_like(token_ids), on, off, off, all_greedy=True, needs_filter=False)
    return replay_seconds(lambda: model.kernels.sample(graphs.replay(size), greedy), num_runs=10)


def kv_pool(model: Decoder, num_blocks: int) -> KvPool:
    config = model.config
    heads = (config.num_layers, config.num_kv_heads, config.head_dim)
    geometry = KvGeometry("random", "bfloat16", *heads, BLOCK_SIZE, "bfloat16")
    return KvPool(geometry, num_blocks, torch.device("cuda"), model.kernels)


def _plan(batch_size: int, context_len: int) -> tuple[Plan, int]:
    """The last tokens of equally long sequences, over blocks in random order; and the number of blocks."""
    num_blocks_each = num_blocks_of(context_len, BLOCK_SIZE)
    num_blocks = 1 + batch_size * num_blocks_each
    tables = (torch.randperm(num_blocks - 1) + 1).view(batch_size, num_blocks_each)
    scheduled = []
    for row, table in enumerate(tables.tolist()):
        sequence = Sequence(Request(f"r{row}", [0] * context_len, context_len, SamplingParams(temperature=0.0)))
        sequence.block_table = table
        scheduled.append(ScheduledSequence(sequence, context_len - 1, num_tokens=1, num_samples=1))
    return Plan(tuple(scheduled)), num_blocks
