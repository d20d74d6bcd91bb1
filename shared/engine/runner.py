"""The model runner: executes plans.

    plan ──> copy blocks ──> batch ──> forward ──> logits of sampled rows ──> sampler ──> tokens

`load_runner` makes one from a worker's options: device, type, weights, size of the pool, pool, and a first step, so that no request
pays for what happens once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from math import prod

import torch

from shared.engine import sizing
from shared.engine.batch import build_batch
from shared.engine.kv_pool import KvPool
from shared.engine.plan import Plan, SampledToken, ScheduledSequence
from shared.engine.pool_memory import SharedStorage, Storage, zeroed_storage
from shared.engine.sampler import Sampler
from shared.engine.sequence import Sequence
from shared.errors import ConfigError
from shared.kernels import load_kernels
from shared.models.checkpoint import open_checkpoint
from shared.models.config import read_config
from shared.models.decoder import Decoder
from shared.models.digest import weights_digest
from shared.models.dtype import DTYPES, choose_dtype
from shared.models.loading import expected_shapes, load_decoder
from shared.models.locate import locate
from shared.readiness import notify_progress
from shared.request import Request, SamplingParams
from shared.worker_config import WorkerConfig
from shared.worker_info import KvGeometry, Role

log = logging.getLogger(__name__)


class ModelRunner:
    """Used by one thread at a time. `pool` may be read and written by others, on blocks that no plan in progress has."""

    def __init__(self, model: Decoder, pool: KvPool, max_model_len: int) -> None:
        self.model = model
        self.pool = pool
        self.max_model_len = max_model_len
        self._sampler = Sampler(model.kernels)

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @torch.inference_mode()
    def execute(self, plan: Plan, on_layer: Callable[[int], None] | None = None) -> list[list[SampledToken]]:
        """Per scheduled sequence, its `num_samples` tokens. Raises NotFiniteLogits if the model gives no numbers for one.

        `on_layer` is called with how many layers' KV is there, on a CPU: on a GPU that is not known before the step has ended."""
        self.pool.copy(plan.copies)
        if not plan.scheduled:
            return []
        batch = build_batch(plan, self.pool.geometry.block_size, self.pool.kv.device)
        is_computed_at_once = self.pool.kv.device.type == "cpu"
        hidden = self.model.forward(batch.token_ids, self.pool.kv, batch.attention, on_layer if is_computed_at_once else None)
        if not len(batch.sample_rows):
            return [[] for _ in plan.scheduled]
        logits = self.model.logits(hidden[batch.sample_rows])
        return self._sampler.sample(logits, plan.scheduled)


def load_runner(config: WorkerConfig, role: Role) -> ModelRunner:
    """Raises ConfigError if the model, the machine and the options do not go together."""
    device = _choose_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    files = locate(config.model, config.revision)
    model_config = read_config(files.folder, files.gguf_file)
    max_model_len = sizing.choose_max_model_len(config.max_model_len, model_config.max_position)
    num_weights = sum(prod(shape) for shape in expected_shapes(model_config).values())
    if files.gguf_file:  # unpacked as a whole, on the host
        sizing.check_weights_fit(num_weights * torch.float32.itemsize, torch.device("cpu"))
    checkpoint = open_checkpoint(files)
    dtype = choose_dtype(config.dtype, checkpoint.dtype, device)
    sizing.check_weights_fit(num_weights * dtype.itemsize, device)
    kernels = load_kernels(config.kernels, device)
    model = load_decoder(model_config, checkpoint, kernels, dtype, device, max_model_len)
    geometry = KvGeometry(
        weights_digest=weights_digest(files),
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.block_size,
        kv_dtype=next(name for name, value in DTYPES.items() if value is dtype),
    )
    num_blocks = _num_blocks(config, role, model, geometry, max_model_len, device)
    sizing.check_pool(num_blocks, geometry, max_model_len)
    storage = _storage(config, role, device)
    runner = ModelRunner(model, KvPool(geometry, num_blocks, device, kernels, storage), max_model_len)
    notify_progress("warming up")
    runner.execute(_full_plan(runner, num_tokens=2, num_seqs=2))
    log.info(
        "%s on %s: %s, %s kernels, %.0f million weights, %d KV blocks (%.2f GiB), sequences up to %d tokens",
        config.model_name,
        device,
        geometry.kv_dtype,
        kernels.name,
        num_weights / 1e6,
        num_blocks,
        num_blocks * geometry.block_bytes / 2**30,
        max_model_len,
    )
    return runner


def _storage(config: WorkerConfig, role: Role, device: torch.device) -> Storage:
    """Shared where prefill workers of the same host may write the blocks they hand over straight into the pool."""
    takes_blocks = role is Role.DECODE and config.transport in ("auto", "shm")
    return SharedStorage() if takes_blocks and device.type == "cpu" else zeroed_storage


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu, or auto")
    return torch.device(name)


def _num_blocks(
    config: WorkerConfig, role: Role, model: Decoder, geometry: KvGeometry, max_model_len: int, device: torch.device
) -> int:
    if device.type == "cpu":
        return sizing.cpu_num_blocks(config, geometry, max_model_len, sizing.free_memory_bytes(device))
    step_bytes = _measure_step(config, role, model, geometry, max_model_len, device)
    return sizing.gpu_num_blocks(config, geometry, device, step_bytes)


def _measure_step(
    config: WorkerConfig, role: Role, model: Decoder, geometry: KvGeometry, max_model_len: int, device: torch.device
) -> int:
    """GPU memory that the largest step takes besides weights and pool, allocator's waste included."""
    num_tokens = sizing.max_step_tokens(config, role)
    pool = KvPool(geometry, sizing.num_blocks_of(num_tokens, geometry.block_size) + 1, device, model.kernels)
    runner = ModelRunner(model, pool, max_model_len)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    runner.execute(_full_plan(runner, num_tokens, config.max_num_seqs))
    step_bytes = torch.cuda.max_memory_reserved(device) - before
    del runner, pool
    torch.cuda.empty_cache()
    return step_bytes


def _full_plan(runner: ModelRunner, num_tokens: int, num_seqs: int) -> Plan:
    """About `num_tokens` tokens of equally long sequences that all sample with a filter. They share their blocks: what is
    computed does not matter."""
    num_seqs = min(num_seqs, num_tokens)
    length = min(num_tokens // num_seqs, runner.max_model_len)
    request = Request("warm-up", [0] * length, length, SamplingParams(top_p=0.9))
    sequence = Sequence(request)
    sequence.block_table = list(range(1, sizing.num_blocks_of(length, runner.pool.geometry.block_size) + 1))
    return Plan((ScheduledSequence(sequence, 0, length, 1),) * num_seqs)
