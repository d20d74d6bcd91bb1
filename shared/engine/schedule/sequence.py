"""A sequence: tokens, how many of them are computed, and the blocks that hold their KV. Everything else is derived."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from shared.base.request import FinishReason, Request


class Status(Enum):
    WAITING = auto()  # in line for a seat and blocks; holds neither
    ASKING = auto()  # in line for blocks that a prefill worker is going to fill
    RESERVED = auto()  # holds blocks that a prefill worker is filling; not schedulable
    COMMITTED = auto()  # its blocks have been filled; in line for a seat, its first tokens not yet passed on
    RUNNING = auto()  # holds a seat and blocks; some tokens may still be uncomputed
    HELD = auto()  # prompt computed and first token sampled; holds its blocks until they are shipped
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """One output of one request, from the queue to its end. Owned by the scheduler; others only read.

    The engine computes tokens `num_computed_tokens .. num_tokens - 1` in one or several steps; when all are computed it samples
    one more. There is no prefill state and no decode state: a new, a continued and a preempted sequence differ only in these
    two counters.
    """

    request: Request
    choice: int = 0  # which of the request's n outputs
    hold: bool = False  # stop after the first sampled token and keep the blocks (a prefill worker's sequence)
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    hash_seed: bytes = b""  # root of the hash chain of its blocks; the scheduler sets it
    block_hashes: list[bytes] = field(default_factory=list)  # of leading full blocks of token_ids, as far as anyone asked
    num_cached_tokens: int = 0  # found in the prefix cache at first admission
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    arrival: int = 0  # of its request, among all that have come to its scheduler, which sets it
    stopped_choices: set[int] = field(default_factory=set)  # outputs that nobody will read, known before the fork

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def order(self) -> tuple[int, int]:
        """Its place among others: requests as they arrived, outputs of one request as they are numbered."""
        return self.arrival, self.choice

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """All output tokens, those of an earlier worker included: also the index of the next one."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def is_forking(self) -> bool:
        """The next sampling gives one token for each of the request's n outputs, and makes n sequences of this one."""
        return self.request.sampling.n > 1 and self.choice == 0 and self.num_output_tokens == self.request.num_emitted

    @property
    def num_seats(self) -> int:
        """Places in a step: a sequence that is going to fork takes those of all its outputs from the start."""
        n = self.request.sampling.n
        return n if n > 1 and self.is_forking and not self.hold else 1
