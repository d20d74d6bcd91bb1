"""Where a request should run: a pure function of what is known about the workers.

Costs are seconds of delay, summed over everyone whom the choice delays. Each leg has one cost function that looks at one worker:

    prefill   tokens queued there + the prompt's part that is not cached there, at its measured speed, + the transfer
    local     the same at the decode worker, with a share of the compute for each stream it holds up there, without the transfer
    decode    slower steps in a fuller batch, and waiting for a slot or for blocks if there are none

Either the decode worker computes the prompt itself (local + decode), or a prefill worker does (prefill + decode). So the handoff
is skipped when the part of the prompt that decode lacks is so short that computing it there, disturbance included, costs less
than the way over a prefill worker; and a prefix that is cached somewhere attracts requests until that worker's queue outweighs it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, TypeVar

from shared.base.blocks_of import num_blocks_of
from shared.base.errors import Unavailable
from shared.base.worker_info import Role, WorkerId, WorkerInfo

T = TypeVar("T")

# Assumed where nothing is measured. Only ratios matter, and the first request to a worker replaces them.
DEFAULT_PREFILL_TOKENS_PER_S = 2000.0
DEFAULT_TRANSFER_TOKENS_PER_S = 50_000.0  # of KV, beyond what is hidden behind the compute
CALLS_S = 0.003  # a handoff takes two calls more than computing locally

_Pair = tuple[WorkerInfo | None, WorkerInfo]  # prefill, decode

NOTHING_MEASURED: Mapping[WorkerId, float] = MappingProxyType({})

# A delayed stream weighs less than a delayed first token: its reader already has something to read.
STREAM_DELAY_WEIGHT = 0.25
FULL_BATCH_S = 0.5  # what a full batch adds to a request's decoding, compared with an empty one
WAIT_FOR_SLOT_S = 10.0  # until a whole batch of others has finished
WAIT_FOR_BLOCKS_S = 10.0  # until as many blocks are free as the prompt needs, if none are


@dataclass(frozen=True, slots=True)
class Placement:
    """prefill None: decode computes the prompt itself."""

    prefill: WorkerInfo | None
    decode: WorkerInfo


def place(
    prompt_tokens: int,
    workers: Collection[WorkerInfo],
    cached_blocks: Mapping[WorkerId, int],
    extra_load: Mapping[WorkerId, int],
    exclude: Collection[WorkerId] = (),
    tie_breaker: str = "",
    always_hand_off: bool = False,
    transfer_s: Mapping[WorkerId, float] = NOTHING_MEASURED,
) -> Placement:
    """The cheapest placement. Raises Unavailable, naming what is missing.

    prompt_tokens: to be computed, including output tokens that another worker already produced
    workers: candidates, all of the requested model
    cached_blocks: by worker id, leading blocks of the prompt that it holds; 0 where absent
    extra_load: by worker id, requests sent there since the heartbeat that `WorkerInfo.load` comes from
    exclude: worker ids that must not be used
    always_hand_off: every prompt goes over a prefill worker if there is one that fits, whatever it costs
    tie_breaker: decides between equal costs; give each router, or request, its own, so that not all choose the same worker
    transfer_s: by prefill worker id, how long its transfers lately took beyond what the compute hid, in seconds
    """
    usable = [w for w in workers if not w.draining and _fits(prompt_tokens, w) and w.worker_id not in exclude]
    decoders = [w for w in usable if w.role.can_decode]
    if not decoders:
        raise Unavailable(_what_is_missing(prompt_tokens, workers, exclude))
    costs = _Costs(prompt_tokens, cached_blocks, extra_load, transfer_s, _typical_speed(workers))

    prefills = {kind: _cheapest_prefill(kind, usable, costs, tie_breaker) for kind in {_kind(w) for w in decoders}}
    local: list[tuple[float, _Pair]] = []
    pairs: list[tuple[float, _Pair]] = []
    for worker in decoders:
        decode_s, prefill = costs.decode(worker), prefills[_kind(worker)]
        local.append((costs.local(worker) + decode_s, (None, worker)))
        if prefill is not None and worker.role is Role.DECODE:
            pairs.append((prefill[0] + costs.transfer(prefill[1], worker) + decode_s, (prefill[1], worker)))
    options = pairs if always_hand_off and pairs else local + pairs
    _, chosen = _cheapest(options, lambda pair: (pair[0] is not None, _lot(pair[1], tie_breaker)))
    return Placement(*chosen)


def _cheapest_prefill(
    kind: tuple[str, str], usable: Iterable[WorkerInfo], costs: _Costs, tie_breaker: str
) -> tuple[float, WorkerInfo] | None:
    """What a prefill worker costs does not depend on its partner, so one is best for all decode workers of its kind."""
    prefills = [(costs.prefill(w), w) for w in usable if w.role is Role.PREFILL and _kind(w) == kind]
    return _cheapest(prefills, lambda w: _lot(w, tie_breaker)) if prefills else None


@dataclass(frozen=True, slots=True)
class _Costs:
    """What one prompt costs on one worker, in seconds."""

    prompt_tokens: int
    cached_blocks: Mapping[WorkerId, int]
    extra_load: Mapping[WorkerId, int]
    transfer_s: Mapping[WorkerId, float]
    typical_tokens_per_s: float

    def prefill(self, worker: WorkerInfo) -> float:
        return self._compute_s(worker, 1.0)

    def local(self, worker: WorkerInfo) -> float:
        num_disturbed = worker.load.num_running
        return self._compute_s(worker, 1.0 + STREAM_DELAY_WEIGHT * num_disturbed)

    def transfer(self, prefill: WorkerInfo, decode: WorkerInfo) -> float:
        assumed_s = self._uncached_tokens(decode) / DEFAULT_TRANSFER_TOKENS_PER_S
        return CALLS_S + self.transfer_s.get(prefill.worker_id, assumed_s)

    def decode(self, worker: WorkerInfo) -> float:
        load, num_extra = worker.load, self._num_extra(worker)
        num_others = load.num_running + load.num_waiting + num_extra
        occupancy = num_others / worker.max_num_seqs
        excess = max(0.0, (num_others + 1) / worker.max_num_seqs - 1)
        needed = max(1, num_blocks_of(self.prompt_tokens, worker.block_size))
        missing = max(0, needed * (1 + num_extra) - load.num_free_blocks)
        return FULL_BATCH_S * occupancy + WAIT_FOR_SLOT_S * excess + WAIT_FOR_BLOCKS_S * missing / needed

    def _compute_s(self, worker: WorkerInfo, weight: float) -> float:
        """Until the prompt is computed, `weight` times what it takes itself and once what is ahead of it. Requests that are not
        yet reported are taken to be like this one."""
        weighted = (self._num_extra(worker) + weight) * self._uncached_tokens(worker)
        return (worker.load.num_waiting_tokens + weighted) / (worker.load.prefill_tokens_per_s or self.typical_tokens_per_s)

    def _uncached_tokens(self, worker: WorkerInfo) -> int:
        """The last token is always computed: the first output token is sampled from it."""
        num_cached = self.cached_blocks.get(worker.worker_id, 0) * worker.block_size
        return max(1, self.prompt_tokens - num_cached)

    def _num_extra(self, worker: WorkerInfo) -> int:
        return self.extra_load.get(worker.worker_id, 0)


def _cheapest(options: Sequence[tuple[float, T]], order: Callable[[T], Any]) -> tuple[float, T]:
    """The first in `order`, which is worked out for equals only, of those that cost least."""
    least = min(cost for cost, _ in options)
    equals = [option for option in options if option[0] == least]
    return min(equals, key=lambda option: order(option[1])) if len(equals) > 1 else equals[0]


def _lot(worker: WorkerInfo, tie_breaker: str) -> tuple[bytes, str]:
    """An order of the workers that is another one for each tie breaker."""
    return blake2b(f"{tie_breaker}\0{worker.worker_id}".encode(), digest_size=8).digest(), worker.worker_id


def _kind(worker: WorkerInfo) -> tuple[str, str]:
    return worker.model, worker.digest


def _fits(prompt_tokens: int, worker: WorkerInfo) -> bool:
    return prompt_tokens <= worker.max_model_len and prompt_tokens <= worker.num_blocks * worker.block_size


def _typical_speed(workers: Collection[WorkerInfo]) -> float:
    """What to expect of a worker that has not been measured: the like of its peers."""
    measured = [speed for w in workers if (speed := w.load.prefill_tokens_per_s) > 0]
    if len(measured) == len(workers):
        return DEFAULT_PREFILL_TOKENS_PER_S  # nobody needs it
    return statistics.median(measured) if measured else DEFAULT_PREFILL_TOKENS_PER_S


def _what_is_missing(prompt_tokens: int, workers: Collection[WorkerInfo], exclude: Collection[WorkerId]) -> str:
    decoders = [w for w in workers if w.role.can_decode]
    if not decoders:
        return f"no decode worker is registered ({len(workers)} prefill workers are)"
    num_draining = sum(w.draining for w in decoders)
    num_excluded = sum(not w.draining and w.worker_id in exclude for w in decoders)
    num_small = len(decoders) - num_draining - num_excluded
    reasons = ((num_draining, "draining"), (num_excluded, "failing"), (num_small, f"too small for {prompt_tokens} tokens"))
    return f"no decode worker can serve: {', '.join(f'{count} {reason}' for count, reason in reasons if count)}"
