// Attention of sequences with several queries each: chunks of prompts. The work is arithmetic, so it is cut into tiles that stay
// in the caches:
//
//   an item of work    about 96 rows (queries x heads of one KV head) of one sequence
//   its inner loop     64 keys at a time: keys transposed and values widened into strips as wide as two vectors, scores, online
//                      softmax (FlashAttention's: rescale what was summed whenever the maximum grows), mixed values
//
// Key tiles begin at multiples of 64 positions and skipped ones change nothing, so a row's result depends on neither the chunk it
// came in nor on the rest of the batch.
#include <limits>
#include <utility>
#include <vector>

#include "attention.h"
#include "tiles.h"
#include "work.h"

namespace twostroke {
namespace {

constexpr int64_t kRows = 96;
constexpr int64_t kKeys = 64;
constexpr int64_t kStrip = 2 * kLanes;

struct Item {
  int64_t sequence, first_token, num_queries, first_position, kv_head;
};

// Thread's working set, about 200 KB at D = 128.
struct Tile {
  float *queries;  // [rows, D]
  float *scores;   // [rows, kKeys]
  float *mixed;    // [rows, padded D]
  float *largest, *sum;  // [rows]
  float *keys;     // strips [kKeys / kStrip][D, kStrip]
  float *values;   // strips [padded D / kStrip][kKeys, kStrip]
  float *rows;     // [kStrip, D]: keys on their way into a strip
  int64_t padded_dim;

  Tile(Scratch& scratch, int64_t num_rows, int64_t dim) : padded_dim((dim + kStrip - 1) / kStrip * kStrip) {
    float* next = scratch.at_least(num_rows * (dim + kKeys + padded_dim + 2) + kKeys * (dim + padded_dim) + kStrip * dim);
    const auto take = [&](int64_t size) { return std::exchange(next, next + size); };
    keys = take(kKeys * dim);
    values = take(kKeys * padded_dim);
    scores = take(num_rows * kKeys);
    mixed = take(num_rows * padded_dim);
    queries = take(num_rows * dim);
    rows = take(kStrip * dim);
    largest = take(num_rows);
    sum = take(num_rows);
  }
};

// The keys and values of the tile at `first` that some query of the item sees: positions begin .. end - 1. The rest becomes 0:
// those slots may hold anything, and 0 * NaN would still be NaN.
template <typename T, typename P>
void load_keys(const Attention<T, P>& call, const Item& item, int64_t first, int64_t begin, int64_t end, const Tile& tile) {
  const int64_t dim = call.head_dim;
  if (begin > first || end < first + kKeys || dim < tile.padded_dim) std::fill_n(tile.values, kKeys * tile.padded_dim, 0.0f);
  for (int64_t strip = 0; strip < kKeys; strip += kStrip) {
    for (int64_t j = 0; j < kStrip; ++j) {
      float* row = tile.rows + j * dim;
      const int64_t position = first + strip + j;
      if (position < begin || position >= end) {
        std::fill_n(row, dim, 0.0f);
        continue;
      }
      const P* key = call.keys(item.sequence, position, item.kv_head);
      const P* value = key + call.kv.value_offset;
      float key_scale = 1.0f, value_scale = 1.0f;
      if constexpr (kIsScaled<P>) {  // here and not in the scores: each number is widened anyway
        const float* scale = call.key_scales(item.sequence, position, item.kv_head);
        key_scale = *scale, value_scale = scale[call.scales.value_offset];
      }
      widen_run(key, dim, key_scale, row);
      for (int64_t s = 0; s < dim; s += kStrip)
        widen_run(
            value + s, std::min(kStrip, dim - s), value_scale, tile.values + (s / kStrip * kKeys + strip + j) * kStrip);
    }
    at::vec::transpose_mxn<float>(tile.rows, dim, tile.keys + strip * dim, kStrip, kStrip, dim);
  }
}

// Turns one row of scores of keys first .. into probabilities relative to the row's largest score so far.
template <typename T, typename P>
void soften(const Attention<T, P>& call, int64_t position, int64_t first, const Tile& tile, int64_t row) {
  float* scores = tile.scores + row * kKeys;
  const int64_t begin = std::clamp<int64_t>(call.first_key(position) - first, 0, kKeys);
  const int64_t end = std::clamp<int64_t>(position + 1 - first, begin, kKeys);
  std::fill(scores, scores + begin, 0.0f);
  std::fill(scores + end, scores + kKeys, 0.0f);
  if (begin == end) return;
  call.cap(scores + begin, end - begin);
  const float largest = max_of(scores + begin, end - begin);
  if (largest > tile.largest[row]) {
    const float factor = exp_nonpositive(tile.largest[row] - largest);
    float* mixed = tile.mixed + row * tile.padded_dim;
#pragma omp simd
    for (int64_t d = 0; d < tile.padded_dim; ++d) mixed[d] *= factor;
    tile.sum[row] *= factor;
    tile.largest[row] = largest;
  }
  tile.sum[row] += exp_all(scores + begin, end - begin, tile.largest[row]);
}

template <typename T, typename P>
void attend_item(const Attention<T, P>& call, const Item& item) {
  const int64_t group = call.group(), dim = call.head_dim, num_rows = item.num_queries * group;
  static thread_local Scratch scratch;
  const Tile tile(scratch, num_rows, dim);
  for (int64_t r = 0; r < num_rows; ++r)
    call.load_query(item.first_token + r / group, item.kv_head * group + r % group, tile.queries + r * dim);
  std::fill_n(tile.mixed, num_rows * tile.padded_dim, 0.0f);
  std::fill_n(tile.largest, num_rows, -std::numeric_limits<float>::infinity());
  std::fill_n(tile.sum, num_rows, 0.0f);
  const int64_t begin = call.first_key(item.first_position), end = item.first_position + item.num_queries;
  for (int64_t first = begin / kKeys * kKeys; first < end; first += kKeys) {
    load_keys(call, item, first, begin, end, tile);
    std::fill_n(tile.scores, num_rows * kKeys, 0.0f);
    for (int64_t j = 0; j < kKeys; j += kStrip)
      add_products(tile.queries, num_rows, dim, dim, tile.keys + j * dim, kStrip, kStrip, tile.scores + j, kKeys);
    for (int64_t r = 0; r < num_rows; ++r) soften(call, item.first_position + r / group, first, tile, r);
    for (int64_t d = 0; d < tile.padded_dim; d += kStrip)
      add_products(
          tile.scores, num_rows, kKeys, kKeys, tile.values + d * kKeys, kStrip, kStrip, tile.mixed + d, tile.padded_dim);
  }
  for (int64_t r = 0; r < num_rows; ++r)
    call.store_output(
        item.first_token + r / group, item.kv_head * group + r % group, tile.mixed + r * tile.padded_dim, 1.0f / tile.sum[r]);
}

}  // namespace

template <typename T, typename P>
void attend_chunks(const Attention<T, P>& call) {
  const int64_t queries_per_item = std::max<int64_t>(1, kRows / call.group());
  static thread_local std::vector<Item> items;
  items.clear();
  for (int64_t s = call.num_single; s < call.num_sequences; ++s) {
    const int64_t begin = call.query_starts[s], end = call.query_starts[s + 1];
    for (int64_t token = begin; token < end; token += queries_per_item)
      for (int64_t h = 0; h < call.num_kv_heads; ++h)
        items.push_back({s, token, std::min(queries_per_item, end - token), call.context_lens[s] - (end - token), h});
  }
  const std::vector<Item>& work = items;  // a thread_local name means another object inside the threads' bodies
  // From the back: a sequence's last queries see the most keys, and the longest items should not start last.
  for_each_item(work.size(), [&](int64_t i) { attend_item(call, work[work.size() - 1 - i]); });
}

#define TWOSTROKE_INSTANTIATE(T, P) template void attend_chunks(const Attention<T, P>&);
TWOSTROKE_FOR_EACH_POOL(TWOSTROKE_INSTANTIATE)

}  // namespace twostroke
