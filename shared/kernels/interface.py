"""The one interface of all kernel backends, and the legend of axes that every backend uses.

    T  tokens in the step (flattened, no padding)      Hq  query heads      D   head size
    S  sequences in the step                           Hkv KV heads         BS  block size
    NB blocks in the pool                              L   layers           E   any feature size

The pool is `[NB, L, 2, Hkv, bytes of a head]`: a block is one contiguous run of bytes that holds K (0) and V (1) of all layers.
Kernels that compute get one layer of it as typed views (`KvLayer`, see `shared/kernels/kv_layout.py`); kernels that move whole
blocks get bytes. Block 0 is the null block: padding may point there.

A backend never allocates what it can write in place, never synchronizes with the CPU, and computes inside in float32.
`shared/kernels/reference.py` is the oracle; each other backend is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shared.kernels.kv_layout import KvLayer


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where each sequence's queries, keys and values are in one step. Sequences with a single query come first.

    Tensors live on the device of the pool.
    """

    positions: Tensor  # [T] int64: absolute position of each token
    slots: Tensor  # [T] int64: block_id * BS + offset, where the token's K and V go
    query_starts: Tensor  # [S + 1] int32: first token of each sequence in the flattened run; the last entry is T
    context_lens: Tensor  # [S] int32: keys of each sequence after this step's tokens are stored
    block_tables: Tensor  # [S, max_blocks] int32: block ids; entries past a sequence's last block are 0
    num_single: int  # the first num_single sequences have exactly one query each ("decodes")
    max_query_len: int
    max_context_len: int


class Kernels(Protocol):
    """What a model needs from the device. All tensors of one call share device and dtype unless a line says otherwise; the pool may
    also hold int8 or float8_e4m3fn with scales."""

    name: str
    is_capturable: bool  # launches depend on shapes and Python integers alone, so that a CUDA graph may repeat them

    def pack_linear(self, weight: Tensor) -> Any:
        """Prepares a weight [E_out, E_in] once, at load; the result is opaque and goes to `linear`."""

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None = None) -> Tensor:
        """x [T, E_in] -> [T, E_out]."""

    def embedding(self, token_ids: Tensor, packed: Any) -> Tensor:
        """Rows of a packed weight [V, E_in]: token_ids [T] int64 -> [T, E_in]. A head that shares the embedding is packed once."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last axis of x [..., E]; weight [E]. Returns a new tensor."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place; returns rms_norm(residual). Both [T, E]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2E] -> [T, E]: silu(first half) * second half."""

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, kv_layer: KvLayer, batch: AttentionBatch) -> None:
        """Rotates q [T, Hq, D] in place, and stores rotated k [T, Hkv, D] and v [T, Hkv, D] in the pool at `batch.slots`.

        cos_sin [max_position, 2, R / 2] float32, R <= D the rotary size, halves rotated against each other ("neox" order):
        (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). q, k, v may be strided views of one fused projection.

        A one-byte pool gets, for each token and head, scale = max(max |x| / LARGEST_STORED, SMALLEST_SCALE) and x / scale, rounded
        to nearest even, of the rotated k and of v; the scale is NaN where some x is not finite.
        """

    def attention(
        self, q: Tensor, kv_layer: KvLayer, batch: AttentionBatch, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        """Causal attention of q [T, Hq, D] over the paged keys. Returns [T, Hq * D], contiguous.

        The query at position p sees keys 0..p; with `window` w > 0 only the last w of them. softcap c > 0: c * tanh(score / c).
        Query head h reads KV head h // (Hq / Hkv).
        """

    def copy_blocks(self, pool: Tensor, sources: Tensor, targets: Tensor) -> None:
        """pool[targets[i]] = pool[sources[i]], whole blocks; pool [NB, ...] contiguous, of any type; sources, targets [N] int64.
        No target is also a source."""

    def gather_blocks(self, pool: Tensor, block_ids: Tensor) -> Tensor:
        """[N, ...], contiguous, on the pool's device: whole blocks for shipping. pool as above, block_ids [N] int64."""

    def scatter_blocks(self, pool: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        """The inverse of gather_blocks; block_ids are distinct."""

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Chooses one token per row of logits [N, V] float32 (may be overwritten). Returns [N] int64.

        Order of work: temperature, min-p, top-k, top-p (of the mass that the two before left), then inverse-CDF with
        `batch.uniforms` over the tokens in vocabulary order. Of equal logits the lower id is the better one: top-k keeps k tokens
        and not more. Rows with temperature 0 take the best one. Penalties, bias and masks are already in the logits.
        """


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Per-row sampling parameters, on the logits' device."""

    temperature: Tensor  # [N] float32, 0: greedy
    top_k: Tensor  # [N] int64, 0: off
    top_p: Tensor  # [N] float32, 1: off; 0: the best token alone
    min_p: Tensor  # [N] float32, 0: off
    uniforms: Tensor  # [N] float32 in [0, 1): a pure function of (seed, position)
    all_greedy: bool
    needs_filter: bool  # some row uses top-k, top-p or min-p
