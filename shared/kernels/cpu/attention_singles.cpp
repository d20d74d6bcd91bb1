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
constexpr int64_t kValueBytes = 2048;  // values go through several passes over few columns each: as many as stay near
constexpr int64_t kAheadBytes = 4096;  // what memory delivers in the time of one read, twice

struct Split {
  int64_t sequence, first, last;  // keys first .. last - 1
};

// Keys, or values, of one head of a split that lie in one block.
template <typename P>
struct Run {
  int64_t kv_head;
  int64_t index, count;  // keys index .. index + count - 1 of the split
  const P* data;
  const float* scales;  // only if kIsScaled<P>
};

// The walk over a split's runs: all keys, block by block and head by head, then all values. No divisions on the way: a run takes a
// few hundred cycles.
template <typename T, typename P>
class Runs {
 public:
  Runs(const Attention<T, P>& call, const Split& split, int64_t kv_head_begin, int64_t kv_head_end)
      : call_(call),
        split_(split),
        head_begin_(kv_head_begin),
        head_end_(kv_head_end),
        first_block_(call.block_tables + split.sequence * call.table_stride + split.first / call.block_size),
        first_token_(split.first % call.block_size) {
    rewind();
  }

  bool in_keys() const { return !is_value_; }
  bool has_ended() const { return position_ == split_.last; }

  Run<P> run() const {
    Run<P> run{head_, position_ - split_.first, count(), data(), nullptr};
    if constexpr (kIsScaled<P>) run.scales = call_.scales.at(*block_, head_, token_) + (is_value_ ? call_.scales.value_offset : 0);
    return run;
  }

  const P* data() const { return call_.kv.at(*block_, head_, token_) + (is_value_ ? call_.kv.value_offset : 0); }

  void advance() {
    if (++head_ < head_end_) return;
    head_ = head_begin_;
    position_ += count();
    ++block_;
    token_ = 0;
    if (has_ended() && !is_value_) {
      is_value_ = true;
      rewind();
    }
  }

 private:
  int64_t count() const { return std::min(call_.block_size - token_, split_.last - position_); }

  void rewind() { head_ = head_begin_, position_ = split_.first, block_ = first_block_, token_ = first_token_; }

  const Attention<T, P>& call_;
  const Split& split_;
  const int64_t head_begin_, head_end_;
  const int32_t* const first_block_;
  const int64_t first_token_;
  int64_t head_, position_, token_;
  const int32_t* block_;
  bool is_value_ = false;
};

// Two walks: one uses runs, the other goes ahead of it and fetches them. Blocks lie anywhere, and no hardware prefetcher follows a
// block table.
template <typename T, typename P>
class Fetched {
 public:
  Fetched(const Runs<T, P>& runs, int64_t run_bytes) : here_(runs), ahead_(runs) {
    for (int64_t bytes = 0; bytes < kAheadBytes && !ahead_.has_ended(); bytes += run_bytes) ahead_.advance();
  }

  bool in_keys() const { return here_.in_keys(); }
  bool has_ended() const { return here_.has_ended(); }
  Run<P> run() const { return here_.run(); }

  // What to fetch while this run is used; after the last run, itself.
  const P* ahead() const { return ahead_.has_ended() ? here_.data() : ahead_.data(); }

  void advance() {
    here_.advance();
    if (!ahead_.has_ended()) ahead_.advance();
  }

 private:
  Runs<T, P> here_, ahead_;
};

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

float max_of(const float* x, int64_t count) {
  float largest = x[0];
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

// x[i] = exp(x[i] - largest); returns their sum.
float exp_all(float* x, int64_t count, float largest) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const float e = exp_nonpositive(x[i] - largest);
    x[i] = e;
    sum += e;
  }
  return sum;
}

// partial [Hq, padded D + 2]: the unnormalized output in slots of P, the largest score, the sum of exponentials.
template <typename T, typename P>
void attend_split(const Attention<T, P>& call, const Split& split, int64_t kv_head_begin, int64_t kv_head_end, float* partial) {
  const int64_t group = call.group(), dim = call.head_dim, width = padded_to_pairs(dim), size = width + 2;
  const int64_t head_begin = kv_head_begin * group, num_rows = (kv_head_end - kv_head_begin) * group;
  static thread_local Scratch scratch;
  float* queries = scratch.at_least(num_rows * (width + kSplit) + dim);
  float* scores = queries + num_rows * width;
  float* query = scores + num_rows * kSplit;
  for (int64_t r = 0; r < num_rows; ++r) {
    call.load_query(split.sequence, head_begin + r, query);
    to_slots<P>(query, dim, queries + r * width);
  }
  Fetched<T, P> runs({call, split, kv_head_begin, kv_head_end}, call.block_size * dim * sizeof(P));
  while (runs.in_keys()) {
    const Run<P> run = runs.run();
    const int64_t r = (run.kv_head - kv_head_begin) * group;
    dot_rows(
        queries + r * width, group, width, run.data, run.count, dim, dim, runs.ahead(), scores + r * kSplit + run.index, kSplit);
    fold_scales(run, scores + r * kSplit, group);
    runs.advance();
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t count = split.last - split.first;
    float *row = scores + r * kSplit, *mixed = partial + (head_begin + r) * size;
    call.cap(row, count);
    std::fill_n(mixed, width, 0.0f);
    mixed[width] = max_of(row, count);
    mixed[width + 1] = exp_all(row, count, mixed[width]);
  }
  const int64_t values_at_once = std::max<int64_t>(1, kValueBytes / (dim * sizeof(P)));
  while (!runs.has_ended()) {
    const Run<P> run = runs.run();
    const int64_t r = (run.kv_head - kv_head_begin) * group;
    fold_scales(run, scores + r * kSplit, group);
    for (int64_t j = 0; j < run.count; j += values_at_once)
      add_products(
          scores + r * kSplit + run.index + j, group, kSplit, std::min(values_at_once, run.count - j), run.data + j * dim, dim, dim,
          runs.ahead() + j * dim, partial + (head_begin + r) * size, size);
    runs.advance();
  }
}

// partials [num_splits, Hq, padded D + 2]; the result replaces the first of them.
template <typename T, typename P>
void merge(const Attention<T, P>& call, int64_t sequence, int64_t head, float* partials, int64_t num_splits) {
  const int64_t width = padded_to_pairs(call.head_dim), size = width + 2, stride = call.num_heads * size;
  float* total = partials + head * size;
  float largest = total[width];
  for (int64_t i = 1; i < num_splits; ++i) largest = std::max(largest, total[i * stride + width]);
  float sum = 0.0f;
  for (int64_t i = 0; i < num_splits; ++i) {
    const float* part = total + i * stride;
    const float factor = exp_nonpositive(part[width] - largest);
    sum += factor * part[width + 1];
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) total[d] = (i == 0 ? 0.0f : total[d]) + factor * part[d];
  }
  static thread_local Scratch scratch;
  float* output = scratch.at_least(call.head_dim);
  from_slots<P>(total, call.head_dim, output);
  call.store_output(sequence, head, output, 1.0f / sum);
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
  const int64_t partial_size = call.num_heads * (padded_to_pairs(call.head_dim) + 2);
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
