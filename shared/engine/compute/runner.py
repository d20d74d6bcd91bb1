"""The model runner: executes plans.

    plan ──> copy blocks ──┬─> batch ──> forward ──> logits of sampled rows ─┬─> sampler ──> tokens
                           └─> replay of a captured decode step (on a GPU) ──┘

`load_runner` makes one from a worker's options: device, type, weights, size of the pool, pool, and a first step, so that no request
pays for what happens once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import prod

import numpy as np
import torch
from torch import Tensor

from shared.base.blocks_of import num_blocks_of
from shared.base.errors import ConfigError
from shared.base.request import Request, SamplingParams
from shared.base.worker_info import KvGeometry, Role
from shared.engine.compute.batch import build_batch, known_token_ids
from shared.engine.compute.decode_graphs import DecodeGraphs, capture_ladder, graphs_bytes
from shared.engine.compute.sampler import Sampler, Samples
from shared.engine.compute.staging import to_device
from shared.engine.memory import sizing
from shared.engine.memory.kv_pool import KvPool
from shared.engine.memory.pool_memory import SharedStorage, Storage, zeroed_storage
from shared.engine.schedule.plan import Plan, SampledToken, ScheduledSequence
from shared.engine.schedule.sequence import Sequence
from shared.kernels import load_kernels
from shared.models.checkpoint import open_checkpoint
from shared.models.config import read_config
from shared.models.decoder import Decoder
from shared.models.digest import weights_digest
from shared.models.dtype import choose_dtype, choose_kv_dtype, name_of
from shared.models.loading import expected_shapes, load_decoder
from shared.models.locate import locate
from shared.options.worker import WorkerConfig
from shared.process.cpus import num_usable_cpus
from shared.process.readiness import notify_progress

log = logging.getLogger(__name__)


class ModelRunner:
    """Used by one thread at a time. `pool` may be read and written by others, on blocks that no plan in progress has."""

    def __init__(self, model: Decoder, pool: KvPool, max_model_len: int, decode_graphs: DecodeGraphs | None = None) -> None:
        self.model = model
        self.pool = pool
        self.max_model_len = max_model_len
        self._decode_graphs = decode_graphs
        self._sampler = Sampler(model.kernels)
        self._sampled = torch.empty(0, dtype=torch.int64)  # on the device, by the step launched last

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def is_asynchronous(self) -> bool:
        """Whether a launched step is computed while the host does something else."""
        return self.pool.device.type == "cuda"

    @torch.inference_mode()
    def launch(self, plan: Plan, on_layer: Callable[[int], None] | None = None) -> Samples:
        """Starts a step. One that was planned ahead takes its tokens from the step launched before it.

        `on_layer` is called with how many layers' KV is there, on a CPU: on a GPU that is not known before the step has ended."""
        self.pool.copy(plan.copies)
        samples = self._sampler.launch(self._logits(plan, None if self.is_asynchronous else on_layer), plan.scheduled)
        self._sampled = samples.token_ids
        return samples

    def execute(self, plan: Plan) -> list[list[SampledToken]]:
        """Per scheduled sequence, its `num_samples` tokens. Raises NotFiniteLogits if the model gives no numbers for one."""
        return self.launch(plan).wait()

    def _logits(self, plan: Plan, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """[R, V]: of the last token of each sequence that samples, in the plan's order."""
        token_ids = self._token_ids(plan)
        if self._decode_graphs is not None and self._decode_graphs.can_run(plan):
            return self._decode_graphs.run(plan, token_ids)
        batch = build_batch(plan, self.pool.geometry.block_size, self.pool.device)
        hidden = self.model.forward(token_ids, self.pool.layers, batch.attention, on_layer)
        if not len(batch.sample_rows):
            return hidden.new_empty(0, self.vocab_size, dtype=torch.float32)
        return self.model.logits(hidden[batch.sample_rows])

    def _token_ids(self, plan: Plan) -> Tensor:
        """[T]: the tokens that the plan computes."""
        device = self.pool.device
        if plan.sampled_rows is None:
            return to_device(known_token_ids(plan), device)
        if len(plan.sampled_rows) == len(self._sampled):
            return self._sampled
        return self._sampled[to_device(np.array(plan.sampled_rows, np.int64), device)]


def load_runner(config: WorkerConfig, role: Role) -> ModelRunner:
    """Raises ConfigError if the model, the machine and the options do not go together."""
    device = _choose_device(config.device)
    if device.type == "cpu":  # for this thread, and for those that compute for the first time after it: the engine's
        torch.set_num_threads(config.num_threads or num_usable_cpus())
    files = locate(config.model, config.revision)
    model_config = read_config(files)
    max_model_len = sizing.choose_max_model_len(config.max_model_len, model_config.max_position)
    num_weights = sum(prod(shape) for shape in expected_shapes(model_config).values())
    if files.gguf_file:  # unpacked as a whole, on the host
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
    num_blocks = _num_blocks(config, role, model, geometry, max_model_len, device)
    sizing.check_pool(num_blocks, geometry, max_model_len)
    storage = _storage(config, role, device)
    pool = KvPool(geometry, num_blocks, device, kernels, storage)
    graphs = None
    if _captures(config, role, model, device):
        graphs = capture_ladder(model, pool, max_model_len, config.max_num_seqs)
    runner = ModelRunner(model, pool, max_model_len, graphs)
    notify_progress("warming up")
    runner.execute(_full_plan(runner, num_tokens=2, num_seqs=2))
    log.info(
        "%s on %s: %s, %s kernels, %.0f million weights, %d KV blocks of %s (%.2f GiB), sequences up to %d tokens",
        config.model_name,
        device,
        geometry.dtype,
        kernels.name,
        num_weights / 1e6,
        num_blocks,
        geometry.kv_dtype,
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


def _captures(config: WorkerConfig, role: Role, model: Decoder, device: torch.device) -> bool:
    """Whether decode steps are captured. A prefill worker has none."""
    return device.type == "cuda" and model.kernels.is_capturable and role is not Role.PREFILL and not config.enforce_eager


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
    """GPU memory that the largest step and captured decode steps take besides weights and pool, allocator's waste included."""
    num_tokens = sizing.max_step_tokens(config, role, device)
    pool = KvPool(geometry, num_blocks_of(num_tokens, geometry.block_size) + 1, device, model.kernels)
    runner = ModelRunner(model, pool, max_model_len)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    runner.execute(_full_plan(runner, num_tokens, config.max_num_seqs))
    step_bytes = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    if _captures(config, role, model, device):
        step_bytes += graphs_bytes(model, pool, max_model_len, config.max_num_seqs)
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
    sequence.block_table = list(range(1, num_blocks_of(length, runner.pool.geometry.block_size) + 1))
    return Plan((ScheduledSequence(sequence, 0, length, 1),) * num_seqs)
