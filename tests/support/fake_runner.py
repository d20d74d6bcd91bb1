"""A runner without a model, in which KV is still real: it writes a fingerprint of the prefix at each position, and before each
step checks that every earlier position of every sequence still holds the right one. A wrong, stale, missing or swapped block
shows at once, and tokens depend on the whole prefix, so outputs do not depend on scheduling.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import torch

from shared.base.request import choice_seed
from shared.base.worker_info import KvGeometry
from shared.engine.memory.kv_pool import KvPool
from shared.engine.schedule.plan import Pending, Plan, SampledToken
from shared.kernels.reference import ReferenceKernels
from tests.support.launched import Launched, Work

VOCAB_SIZE = 1000
GEOMETRY = KvGeometry("fake-weights", "float32", num_layers=2, num_kv_heads=2, head_dim=4, block_size=16, kv_dtype="float32")


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
    is_asynchronous = False

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
        self._sampled: list[list[SampledToken]] = []  # by the step computed last

    def launch(self, plan: Plan, on_layer: Callable[[int], None] | None = None) -> Pending:
        return _Done(self._compute(Launched.of(plan), on_layer))

    def _compute(self, launched: Launched, on_layer: Callable[[int], None] | None = None) -> list[list[SampledToken]]:
        self.gate.wait(30)
        self.num_steps += 1
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.pool.copy(launched.plan.copies)
        launched.take(self._sampled)
        self._write_layers(launched.works, on_layer)
        self._sampled = [self._sample(work) for work in launched.works]
        return self._sampled

    def _sample(self, work: Work) -> list[SampledToken]:
        for position in range(work.item.start):
            self._check(work.block_table, work.token_ids, position)
        sequence = work.item.sequence
        seed, first = sequence.request.sampling.seed, sequence.choice
        return [SampledToken(next_token(work.token_ids, choice_seed(seed, first + i))) for i in range(work.item.num_samples)]

    def _write_layers(self, works: list[Work], on_layer: Callable[[int], None] | None) -> None:
        for layer in range(self.pool.geometry.num_layers):
            for work in works:
                for position in range(work.item.start, work.item.end):
                    self._slot(work.block_table, position)[layer] = fingerprint(work.token_ids[: position + 1])
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


@dataclass(frozen=True)
class _Done:
    samples: list[list[SampledToken]]

    def is_done(self) -> bool:
        return True

    def wait(self) -> list[list[SampledToken]]:
        return self.samples


class FakeAsyncRunner(FakeRunner):
    """Computes as a GPU does: later than the launch, one step after the other, from what was known at the launch.

    `launches` gets every plan when it is launched, `permits`, if there is one, is taken before each step is computed.
    """

    is_asynchronous = True

    def __init__(self, num_blocks: int, geometry: KvGeometry = GEOMETRY) -> None:
        super().__init__(num_blocks, geometry)
        self.launches: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        self.permits: threading.Semaphore | None = None
        self.fail_launch_ahead: Exception | None = None
        self._device = ThreadPoolExecutor(max_workers=1)

    def launch(self, plan: Plan, on_layer: Callable[[int], None] | None = None) -> Pending:
        self.launches.put(plan)
        if plan.sampled_rows is not None and self.fail_launch_ahead is not None:
            error, self.fail_launch_ahead = self.fail_launch_ahead, None
            raise error
        return _Later(self._device.submit(self._compute_later, Launched.of(plan)))

    def close(self) -> None:
        self._device.shutdown()

    def _compute_later(self, launched: Launched) -> list[list[SampledToken]]:
        if self.permits is not None:
            assert self.permits.acquire(timeout=30)
        return self._compute(launched)


@dataclass(frozen=True)
class _Later:
    result: Future[list[list[SampledToken]]]

    def is_done(self) -> bool:
        return self.result.done()

    def wait(self) -> list[list[SampledToken]]:
        return self.result.result(timeout=60)
