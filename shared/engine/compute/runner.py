"""The model runner: executes plans. `shared/engine/load.py` makes one from a worker's options.

plan ──> copy blocks ──┬─> batch ──> forward ──> logits of sampled rows ─┬─> sampler ──> tokens
                       └─> replay of a captured decode step (on a GPU) ──┘
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shared.engine.compute.batch import build_batch, known_token_ids
from shared.engine.compute.decode_graphs import DecodeGraphs
from shared.engine.compute.sampler import Sampler, Samples
from shared.engine.compute.staging import to_device
from shared.engine.memory.kv_pool import KvPool
from shared.engine.schedule.plan import Plan, SampledToken
from shared.models.decoder import Decoder


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
        """Whether a launched step is computed while the CPU does something else."""
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
