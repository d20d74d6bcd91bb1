"""Sampling without sorting: one program per row, several passes over its logits.

1. The largest logit and its lowest id; a greedy row ends here.
2. Where min-p, then top-k, then top-p cut: a key, and how many of the tokens that have it stay, those with the lowest ids. Keys are
   32-bit integers ordered as the logits are. The cut of top-k or top-p is the largest key t such that the tokens with key >= t are
   at least k, or have at least p of the mass: found by bisection over keys, exact, at most 32 passes.
3. Inverse CDF in vocabulary order: tiles are summed until the drawn mass is passed; only that tile is scanned.

weight(x) = exp((x - max) / temperature), so the best token weighs 1.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.interface import SamplingBatch
from shared.kernels.triton.launch import Launch, pad, require

MAX_TILE = 4096
LOWEST_KEY = tl.constexpr(-2147483648)


@triton.jit
def float_key(x):
    """Integers ordered as the floats are. Adding 0 makes minus zero zero."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_tile(logits, start, vocab_size, TILE: tl.constexpr):
    token = start + tl.arange(0, TILE)
    return token, tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))


@triton.jit
def best_token(logits, vocab_size, TILE: tl.constexpr):
    """(largest logit, its lowest id)."""
    best_logit, best = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, TILE):
        token, x = load_tile(logits, start, vocab_size, TILE)
        top = tl.max(x, 0)
        if top > best_logit:
            best_logit = top
            best = tl.min(tl.where(x == top, token, vocab_size), 0)
    return best_logit, best


@triton.jit
def count_from(logits, vocab_size, key, TILE: tl.constexpr):
    """Tokens whose key is at least `key`."""
    count = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        token, x = load_tile(logits, start, vocab_size, TILE)
        count += ((float_key(x) >= key) & (token < vocab_size)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def mass_from(logits, vocab_size, key, best_logit, temperature, TILE: tl.constexpr):
    """Weight of the tokens whose key is at least `key`."""
    mass = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        _, x = load_tile(logits, start, vocab_size, TILE)
        mass += tl.where(float_key(x) >= key, tl.exp((x - best_logit) / temperature), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def top_k_threshold(logits, vocab_size, k, best_key, TILE: tl.constexpr):
    """The largest key that at least k tokens reach."""
    low, high = tl.full([], LOWEST_KEY, tl.int64), best_key + 1  # `low` is always reached by k, `high` never
    while high - low > 1:
        middle = (low + high) >> 1
        count = count_from(logits, vocab_size, middle, TILE)
        if count >= k:
            low = middle
            if count == k:  # exactly k: a larger key could only be the k-th token's own
                high = middle + 1
        else:
            high = middle
    return low


@triton.jit
def top_p_threshold(logits, vocab_size, wanted, floor_key, best_key, best_logit, temperature, TILE: tl.constexpr):
    """The largest key whose tokens have at least the mass `wanted`, from `floor_key` up."""
    low, high = floor_key, best_key + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if mass_from(logits, vocab_size, middle, best_logit, temperature, TILE) >= wanted:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def weight_of_key(key, best_logit, temperature):
    """Of a token with this key: `float_key` is its own inverse."""
    bits = key.to(tl.int32)
    x = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp((x - best_logit) / temperature)


@triton.jit
def id_of_equal(logits, vocab_size, key, count, TILE: tl.constexpr):
    """The id of the count-th token that has this key, or vocab_size if there are fewer."""
    start, seen = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    found = tl.full([], 0, tl.int32) + vocab_size
    while (start < vocab_size) & (found == vocab_size):
        token, x = load_tile(logits, start, vocab_size, TILE)
        equal = ((float_key(x) == key) & (token < vocab_size)).to(tl.int32)
        reached = (tl.cumsum(equal, 0).to(tl.int64) + seen >= count) & (equal == 1)
        found = tl.min(tl.where(reached, token, vocab_size), 0)
        seen += tl.sum(equal, 0)
        start += TILE
    return found


@triton.jit
def cut(logits, vocab_size, min_p, top_k, top_p, best_logit, temperature, TILE: tl.constexpr):
    """(key, id): tokens with a larger key stay, and those with this key up to this id."""
    best_key = float_key(best_logit).to(tl.int64)
    threshold, num_equal = tl.full([], LOWEST_KEY, tl.int64), tl.full([], 0, tl.int64) + vocab_size
    if min_p > 0:
        threshold = tl.minimum(float_key(best_logit + temperature * tl.log(min_p)).to(tl.int64), best_key)
    if (top_k > 0) & (top_k < vocab_size):
        kth = top_k_threshold(logits, vocab_size, top_k, best_key, TILE)
        if kth >= threshold:
            threshold = kth
            num_equal = top_k - count_from(logits, vocab_size, kth + 1, TILE)
    if top_p < 1:
        total = mass_from(logits, vocab_size, threshold, best_logit, temperature, TILE)
        if num_equal < vocab_size:
            above = mass_from(logits, vocab_size, threshold + 1, best_logit, temperature, TILE)
            total = above + num_equal.to(tl.float32) * weight_of_key(threshold, best_logit, temperature)
        wanted = top_p * total
        key = top_p_threshold(logits, vocab_size, wanted, threshold, best_key, best_logit, temperature, TILE)
        missing = wanted - mass_from(logits, vocab_size, key + 1, best_logit, temperature, TILE)
        needed = tl.maximum(tl.ceil(missing / weight_of_key(key, best_logit, temperature)), 1.0).to(tl.int64)
        num_equal = tl.where(key == threshold, tl.minimum(num_equal, needed), needed)
        threshold = key
    last_equal = tl.full([], 0, tl.int32) + vocab_size
    if num_equal < vocab_size:
        last_equal = id_of_equal(logits, vocab_size, threshold, num_equal, TILE)
    return threshold, last_equal


@triton.jit
def kept_weights(x, token, threshold, last_equal, best_logit, temperature):
    key = float_key(x)
    kept = (key > threshold) | ((key == threshold) & (token <= last_equal))
    return tl.where(kept, tl.exp((x - best_logit) / temperature), 0.0)


@triton.jit
def draw(logits, vocab_size, uniform, threshold, last_equal, best_logit, best, temperature, TILE: tl.constexpr):
    """The first token in vocabulary order at which the running mass passes uniform * total."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, TILE):
        token, x = load_tile(logits, start, vocab_size, TILE)
        total += tl.sum(kept_weights(x, token, threshold, last_equal, best_logit, temperature), 0).to(tl.float64)
    target = total * uniform.to(tl.float64)

    # Running sums over tiles are float64: with a large vocabulary float32 would shift the borders between tokens.
    start, before, tile_mass = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    passed = False
    while (start < vocab_size) & (not passed):
        token, x = load_tile(logits, start, vocab_size, TILE)
        tile_mass = tl.sum(kept_weights(x, token, threshold, last_equal, best_logit, temperature), 0).to(tl.float64)
        passed = before + tile_mass > target
        if not passed:
            before += tile_mass
            start += TILE

    token, x = load_tile(logits, start, vocab_size, TILE)
    weight = kept_weights(x, token, threshold, last_equal, best_logit, temperature)
    running = tl.cumsum(weight, 0).to(tl.float64) + before
    first = tl.min(tl.where((running > target) & (weight > 0), token, vocab_size), 0)
    last = tl.max(tl.where(weight > 0, token, -1), 0)
    # Scan and sum may round differently, so that no token passes: then the last kept one is meant.
    chosen = tl.where(first < vocab_size, first, last)
    return tl.where(chosen >= 0, chosen, best)


@triton.jit
def sample_kernel(
    logits,  # [N, V] float32
    out,  # [N] int64
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    stride_row,
    vocab_size,
    ALL_GREEDY: tl.constexpr,
    NEEDS_FILTER: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_row
    best_logit, token = best_token(logits, vocab_size, TILE)
    if not ALL_GREEDY:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            threshold, last_equal = tl.full([], LOWEST_KEY, tl.int64), tl.full([], 0, tl.int32) + vocab_size
            if NEEDS_FILTER:
                min_p, top_k, top_p = tl.load(min_ps + row), tl.load(top_ks + row), tl.load(top_ps + row)
                threshold, last_equal = cut(logits, vocab_size, min_p, top_k, top_p, best_logit, temperature, TILE)
            uniform = tl.load(uniforms + row)
            token = draw(logits, vocab_size, uniform, threshold, last_equal, best_logit, token, temperature, TILE)
    tl.store(out + row, token.to(tl.int64))


def sample_launch(logits: Tensor, batch: SamplingBatch, out: Tensor, max_tile: int = MAX_TILE) -> Launch:
    """One token per row of logits [N, V] float32 into out [N] int64, as `Kernels.sample`."""
    num_rows, vocab_size = logits.shape
    require(logits.stride(1) == 1, "a row of logits must be contiguous")
    require(out.shape == batch.uniforms.shape == (num_rows,), f"logits {logits.shape} do not fit {batch.uniforms.shape} rows")
    tile = min(pad(vocab_size), max_tile)
    arguments = {
        "logits": logits,
        "out": out,
        "temperatures": batch.temperature,
        "top_ks": batch.top_k,
        "top_ps": batch.top_p,
        "min_ps": batch.min_p,
        "uniforms": batch.uniforms,
        "stride_row": logits.stride(0),
        "vocab_size": vocab_size,
        "ALL_GREEDY": batch.all_greedy,
        "NEEDS_FILTER": batch.needs_filter,
        "TILE": tile,
    }
    return Launch(sample_kernel, (num_rows,), arguments, num_warps=max(4, tile // 512))
