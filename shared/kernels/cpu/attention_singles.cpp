// Attention of sequences with one query each. The work is reading keys and values once, at the speed of memory:
//
//   1  each sequence's keys are cut into splits of 256; a split with its heads is one item of work, so that a single long
//      sequence keeps all cores busy. The cut depends on nothing but positions: a sequence gets the same values in any batch
//   2  an item scores all its keys, takes their softmax, and mixes the values: a partial output with its maximum and sum
//   3  the partials of a sequence are merged, weighted by exp(maximum - overall maximum) (the split-KV scheme of Flash-Decoding)
#include <vector>

#include "attention.h"
#include "tiles.h"
#include "work.h"

namespace twostroke {
namespace {

constexpr int64_t kSplit = 256;

struct Split {
  int64_t sequence, first, last;  // keys first .. last - 1
};

// Keys, or values, of one head of a split that lie in one block.
template <typename P>
struct Run {
  int64_t kv_head;
  int64_t index, count;  // keys index .. index + count - 1 of the split
  const P* here;
  const P* ahead;       // what comes after it: the next head, or the next block; null after the last one
  const float* scales;  // only if kIsScaled<P>
};

// body(run) for each block of the split and each head. `is_value`: of values instead of keys.
template <typename T, typename P, typename Body>
void for_each_run(
    const Attention<T, P>& call, const Split& split, int64_t kv_head_begin, int64_t kv_head_end, bool is_value, const Body& body) {
  const int64_t size = call.block_size, offset = is_value ? call.kv.value_offset : 0;
  const int64_t scale_offset = is_value ? call.scales.value_offset : 0;
  const int32_t* table = call.block_tables + split.sequence * call.table_stride;
  int64_t token = split.first % size, next = split.first / size;
  for (int64_t position = split.first, count; position < split.last; position += count, token = 0) {
    const int64_t block = table[next++];
    count = std::min(size - token, split.last - position);
    const P* next_block = position + count < split.last ? call.kv.at(table[next], kv_head_begin, 0) + offset : nullptr;
    for (int64_t h = kv_head_begin; h < kv_head_end; ++h) {
      const P* here = call.kv.at(block, h, token) + offset;
      Run<P> run{h, position - split.first, count, here, h + 1 < kv_head_end ? here + call.kv.head_stride : next_block, nullptr};
      if constexpr (kIsScaled<P>) run.scales = call.scales.at(block, h, token) + scale_offset;
      body(run);
    }
  }
}

// Calls body(index, keys, count) for each few keys of a run, and meanwhile fetches as many of what comes after it: blocks lie
// anywhere, and no hardware prefetcher follows a block table. A few at a time, since the queue of outstanding reads is short, and
// into the second-level cache, whose queue is the longer one.
template <int64_t FEW, typename P, typename Body>
void for_each_few(const Run<P>& run, int64_t dim, const Body& body) {
  constexpr int64_t line = 64 / sizeof(P);
  for (int64_t j = 0; j < run.count; j += FEW) {
    if (run.ahead != nullptr)
      for (int64_t i = j * dim; i < (j + FEW) * dim; i += line) __builtin_prefetch(run.ahead + i, 0, 2);
    body(run.index + j, run.here + j * dim, std::min(FEW, run.count - j));
  }
}

// scores [rows, kSplit]: multiplies the columns of a run by its scales.
template <typename P>
void fold_scales(const Run<P>& run, float* scores, int64_t num_rows) {
  if constexpr (kIsScaled<P>)
    for (int64_t r = 0; r < num_rows; ++r) {
      float* row = scores + r * kSplit + run.index;
#pragma omp simd
      for (int64_t j = 0; j < run.count; ++j) row[j] *= run.scales[j];
    }
}

// partial [Hq, D + 2]: the unnormalized output, the largest score, the sum of exponentials.
template <typename T, typename P>
void attend_split(const Attention<T, P>& call, const Split& split, int64_t kv_head_begin, int64_t kv_head_end, float* partial) {
  const int64_t group = call.group(), dim = call.head_dim, size = dim + 2;
  const int64_t head_begin = kv_head_begin * group, num_rows = (kv_head_end - kv_head_begin) * group;
  static thread_local Scratch scratch;
  float* queries = scratch.at_least(num_rows * (dim + kSplit));
  float* scores = queries + num_rows * dim;
  for (int64_t r = 0; r < num_rows; ++r) call.load_query(split.sequence, head_begin + r, queries + r * dim);
  for_each_run(call, split, kv_head_begin, kv_head_end, false, [&](const Run<P>& run) {
    const int64_t r = (run.kv_head - kv_head_begin) * group;
    for_each_few<4>(run, dim, [&](int64_t index, const P* keys, int64_t few) {
      dot_rows(queries + r * dim, group, dim, keys, few, dim, dim, scores + r * kSplit + index, kSplit);
    });
    fold_scales(run, scores + r * kSplit, group);
  });
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t count = split.last - split.first;
    float *row = scores + r * kSplit, *mixed = partial + (head_begin + r) * size;
    call.cap(row, count);
    std::fill_n(mixed, dim, 0.0f);
    mixed[dim] = max_of(row, count);
    mixed[dim + 1] = exp_all(row, count, mixed[dim]);
  }
  for_each_run(call, split, kv_head_begin, kv_head_end, true, [&](const Run<P>& run) {
    const int64_t r = (run.kv_head - kv_head_begin) * group;
    fold_scales(run, scores + r * kSplit, group);
    for_each_few<8>(run, dim, [&](int64_t index, const P* values, int64_t few) {
      add_products(scores + r * kSplit + index, group, kSplit, few, values, dim, dim, partial + (head_begin + r) * size, size);
    });
  });
}

// partials [num_splits, Hq, D + 2]; the result replaces the first of them.
template <typename T, typename P>
void merge(const Attention<T, P>& call, int64_t sequence, int64_t head, float* partials, int64_t num_splits) {
  const int64_t dim = call.head_dim, size = dim + 2, stride = call.num_heads * size;
  float* total = partials + head * size;
  float largest = total[dim];
  for (int64_t i = 1; i < num_splits; ++i) largest = std::max(largest, total[i * stride + dim]);
  float sum = 0.0f;
  for (int64_t i = 0; i < num_splits; ++i) {
    const float* part = total + i * stride;
    const float factor = exp_nonpositive(part[dim] - largest);
    sum += factor * part[dim + 1];
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) total[d] = (i == 0 ? 0.0f : total[d]) + factor * part[d];
  }
  call.store_output(sequence, head, total, 1.0f / sum);
}

}  // namespace

template <typename T, typename P>
void attend_singles(const Attention<T, P>& call) {
  static thread_local std::vector<Split> splits;
  static thread_local std::vector<int64_t> first_split;  // of each sequence, and the end
  splits.clear();
  first_split.assign(1, 0);
  for (int64_t s = 0; s < call.num_single; ++s) {
    const int64_t num_keys = call.context_lens[s];
    for (int64_t first = call.first_key(num_keys - 1), last; first < num_keys; first = last) {
      last = std::min((first / kSplit + 1) * kSplit, num_keys);
      splits.push_back({s, first, last});
    }
    first_split.push_back(splits.size());
  }
  static thread_local Scratch scratch;
  const int64_t partial_size = call.num_heads * (call.head_dim + 2);
  float* partials = scratch.at_least(splits.size() * partial_size);
  const std::vector<Split>& work = splits;  // thread_local names mean other objects inside the threads' bodies
  const std::vector<int64_t>& starts = first_split;
  // All heads at once read a block in one run; a head at a time only where there are too few items to share.
  const bool by_head = int64_t(work.size()) < 4 * at::get_num_threads();
  const int64_t heads_per_item = by_head ? 1 : call.num_kv_heads, items_per_split = call.num_kv_heads / heads_per_item;
  for_each_item(work.size() * items_per_split, [&](int64_t item) {
    const int64_t split = item / items_per_split, head = item % items_per_split * heads_per_item;
    attend_split(call, work[split], head, head + heads_per_item, partials + split * partial_size);
  });
  constexpr int64_t kFloatsPerThread = 32768;
  const int64_t grain = std::max<int64_t>(1, kFloatsPerThread * call.num_single / (int64_t(work.size()) * call.head_dim));
  at::parallel_for(0, call.num_single * call.num_heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = i / call.num_heads;
      merge(call, s, i % call.num_heads, partials + starts[s] * partial_size, starts[s + 1] - starts[s]);
    }
  });
}

#define TWOSTROKE_INSTANTIATE(T, P) template void attend_singles(const Attention<T, P>&);
TWOSTROKE_FOR_EACH_POOL(TWOSTROKE_INSTANTIATE)

}  // namespace twostroke
