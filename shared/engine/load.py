"""From a worker's options to a model runner that has done its first step, so that no request pays for what happens once.

    options ─> files ─> configuration ─> weights ─> size of the pool ─> pool ─> captured decode steps ─> a first step

The size of the pool is what memory is left, which on a GPU is measured by a step as large as there can be.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import prod

import torch

from shared.base.blocks_of import num_blocks_of
from shared.base.errors import ConfigError
from shared.base.request import Request, SamplingParams
from shared.base.worker_info import KvGeometry, Role
from shared.engine.compute.decode_graphs import capture_ladder, graphs_bytes
from shared.engine.compute.runner import ModelRunner
from shared.engine.memory import sizing
from shared.engine.memory.kv_pool import KvPool
from shared.engine.memory.pool_memory import SharedStorage, Storage, zeroed_storage
from shared.engine.schedule.plan import Plan, ScheduledSequence
from shared.engine.schedule.sequence import Sequence
from shared.kernels import load_kernels
from shared.models.checkpoint import open_checkpoint
from shared.models.config_cache import cached_config
from shared.models.decoder import Decoder
from shared.models.digest import weights_digest
from shared.models.dtype import choose_dtype, choose_kv_dtype, name_of
from shared.models.loading import expected_shapes, load_decoder
from shared.models.locate import locate
from shared.options.worker import WorkerConfig
from shared.process.cpus import num_usable_cpus
from shared.process.readiness import notify_progress

log = logging.getLogger(__name__)


def load_runner(config: WorkerConfig, role: Role) -> ModelRunner:
    """Raises ConfigError if the model, the machine and the options do not go together."""
    device = _choose_device(config.device)
    if device.type == "cpu":  # for this thread, and for those that compute for the first time after it: the engine's
        torch.set_num_threads(config.num_threads or num_usable_cpus())
    loaded = _load(config, role, device)
    num_blocks = loaded.num_blocks()
    sizing.check_pool(num_blocks, loaded.geometry, loaded.max_model_len)
    pool = KvPool(loaded.geometry, num_blocks, device, loaded.model.kernels, _storage(config, role, device))
    graphs = None
    if loaded.captures_decode_steps:
        graphs = capture_ladder(loaded.model, pool, loaded.max_model_len, config.max_num_seqs)
    runner = ModelRunner(loaded.model, pool, loaded.max_model_len, graphs)
    notify_progress("warming up")
    runner.execute(_full_plan(runner, num_tokens=2, num_seqs=2))
    log.info(
        "%s on %s: %s, %s kernels, %.0f million weights, %d KV blocks of %s (%.2f GiB), sequences up to %d tokens",
        config.model_name,
        device,
        loaded.geometry.dtype,
        loaded.model.kernels.name,
        loaded.num_weights / 1e6,
        num_blocks,
        loaded.geometry.kv_dtype,
        num_blocks * loaded.geometry.block_bytes / 2**30,
        loaded.max_model_len,
    )
    return runner


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model whose pool is still to be made."""

    config: WorkerConfig
    role: Role
    device: torch.device
    model: Decoder
    geometry: KvGeometry
    max_model_len: int
    num_weights: int

    @property
    def captures_decode_steps(self) -> bool:
        """Never on a prefill worker, which has none."""
        can_capture = self.device.type == "cuda" and self.model.kernels.is_capturable
        return can_capture and self.role is not Role.PREFILL and not self.config.enforce_eager

    def num_blocks(self) -> int:
        if self.device.type == "cpu":
            free_bytes = sizing.free_memory_bytes(self.device)
            return sizing.cpu_num_blocks(self.config, self.geometry, self.max_model_len, free_bytes)
        return sizing.gpu_num_blocks(self.config, self.geometry, self.device, self._measure_step())

    def _measure_step(self) -> int:
        """GPU memory that the largest step and captured decode steps take besides weights and pool, allocator's waste included."""
        num_tokens = sizing.max_step_tokens(self.config, self.role, self.device)
        num_blocks = num_blocks_of(num_tokens, self.geometry.block_size) + 1
        pool = KvPool(self.geometry, num_blocks, self.device, self.model.kernels)
        runner = ModelRunner(self.model, pool, self.max_model_len)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_reserved(self.device)
        runner.execute(_full_plan(runner, num_tokens, self.config.max_num_seqs))
        step_bytes = torch.cuda.max_memory_reserved(self.device) - before
        torch.cuda.empty_cache()
        if self.captures_decode_steps:
            step_bytes += graphs_bytes(self.model, pool, self.max_model_len, self.config.max_num_seqs)
        del runner, pool
        torch.cuda.empty_cache()
        return step_bytes


def _load(config: WorkerConfig, role: Role, device: torch.device) -> _Loaded:
    files = locate(config.model, config.revision)
    model_config = cached_config(files)
    max_model_len = sizing.choose_max_model_len(config.max_model_len, model_config.max_position)
    num_weights = sum(prod(shape) for shape in expected_shapes(model_config).values())
    if files.gguf_file:  # unpacked as a whole, in main memory
        sizing.check_weights_fit(num_weights * torch.float32.itemsize, torch.device("cpu"))
    checkpoint = open_checkpoint(files)
    dtype = choose_dtype(config.dtype, checkpoint.dtype, device)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype, device)
    sizing.check_weights_fit(num_weights * dtype.itemsize, device)
    kernels = load_kernels(config.kernels, device)
    model = load_decoder(model_config, checkpoint, kernels, dtype, device, max_model_len)
    geometry = KvGeometry(
        weights_digest=weights_digest(files),
        dtype=name_of(dtype),
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.block_size,
        kv_dtype=name_of(kv_dtype),
    )
    return _Loaded(config, role, device, model, geometry, max_model_len, num_weights)


def _storage(config: WorkerConfig, role: Role, device: torch.device) -> Storage:
    """Shared where prefill workers of the same machine may write the blocks they hand over straight into the pool."""
    takes_blocks = role is Role.DECODE and config.transport in ("auto", "shm")
    return SharedStorage() if takes_blocks and device.type == "cpu" else zeroed_storage


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu, or auto")
    return torch.device(name)


def _full_plan(runner: ModelRunner, num_tokens: int, num_seqs: int) -> Plan:
    """About `num_tokens` tokens of equally long sequences that all sample with a filter. They share their blocks: what is
    computed does not matter."""
    num_seqs = min(num_seqs, num_tokens)
    length = min(num_tokens // num_seqs, runner.max_model_len)
    request = Request("warm-up", [0] * length, length, SamplingParams(top_p=0.9))
    sequence = Sequence(request)
    sequence.block_table = list(range(1, num_blocks_of(length, runner.pool.geometry.block_size) + 1))
    return Plan((ScheduledSequence(sequence, 0, length, 1),) * num_seqs)
