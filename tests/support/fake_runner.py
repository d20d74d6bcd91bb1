"""A runner without a model, in which KV is still real: it writes a fingerprint of the prefix at each position, and before each
step checks that every earlier position of every sequence still holds the right one. A wrong, stale, missing or swapped block
shows at once, and tokens depend on the whole prefix, so outputs do not depend on scheduling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch

from shared.engine.kv_pool import KvPool
from shared.engine.plan import Plan, SampledToken
from shared.kernels.reference import ReferenceKernels
from shared.request import choice_seed
from shared.worker_info import KvGeometry

VOCAB_SIZE = 1000
GEOMETRY = KvGeometry("fake-weights", num_layers=2, num_kv_heads=2, head_dim=4, block_size=16, kv_dtype="float32")


def fingerprint(prefix: Sequence[int]) -> int:
    """Of all tokens up to and including a position; exact in float32."""
    digest = blake2b(b"".join(t.to_bytes(4, "little") for t in prefix), digest_size=3).digest()
    return int.from_bytes(digest, "little")


def next_token(prefix: Sequence[int], seed: int) -> int:
    return (fingerprint(prefix) + seed) % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], num_tokens: int, seed: int = 0, choice: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, choice_seed(seed, choice)))
    return tokens[len(prompt) :]


class FakeRunner:
    """`gate`, when cleared, holds the engine before its next step; `layer_gate`, after its next layer."""

    vocab_size = VOCAB_SIZE

    def __init__(self, num_blocks: int, geometry: KvGeometry = GEOMETRY) -> None:
        self.pool = KvPool(geometry, num_blocks, torch.device("cpu"), ReferenceKernels())
        self.max_model_len = min(512, (num_blocks - 1) * geometry.block_size)
        self.gate = threading.Event()
        self.gate.set()
        self.layer_gate = threading.Event()
        self.layer_gate.set()
        self.num_steps = 0
        self.fail_next: Exception | None = None
        self.fail_after_layer: Exception | None = None

    def execute(self, plan: Plan, on_layer: Callable[[int], None] | None = None) -> list[list[SampledToken]]:
        self.gate.wait(30)
        self.num_steps += 1
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.pool.copy(plan.copies)
        self._write_layers(plan, on_layer)
        samples = []
        for item in plan.scheduled:
            sequence, end = item.sequence, item.start + item.num_tokens
            tokens = list(sequence.token_ids[:end])
            for position in range(item.start):
                self._check(sequence.block_table, tokens, position)
            seed, first = sequence.request.sampling.seed, sequence.choice
            samples.append([SampledToken(next_token(tokens, choice_seed(seed, first + i))) for i in range(item.num_samples)])
        return samples

    def _write_layers(self, plan: Plan, on_layer: Callable[[int], None] | None) -> None:
        for layer in range(self.pool.geometry.num_layers):
            for item in plan.scheduled:
                for position in range(item.start, item.start + item.num_tokens):
                    value = fingerprint(item.sequence.token_ids[: position + 1])
                    self._slot(item.sequence.block_table, position)[layer] = value
            if on_layer is not None:
                on_layer(layer + 1)
            self.layer_gate.wait(30)
            if self.fail_after_layer is not None:
                error, self.fail_after_layer = self.fail_after_layer, None
                raise error

    def _slot(self, table: Sequence[int], position: int) -> torch.Tensor:
        block_size = self.pool.geometry.block_size
        return self.pool.kv[table[position // block_size], :, :, :, position % block_size]

    def _check(self, table: Sequence[int], tokens: Sequence[int], position: int) -> None:
        want = float(fingerprint(tokens[: position + 1]))
        found = self._slot(table, position)
        assert bool((found == want).all()), f"KV at position {position} is not that of its prefix"
