// The two products of an item of chunk attention: queries with keys, and probabilities with values. Two ways, of one shape:
//
//   WideProducts   numbers are widened to float32 and go through the tiles of panels.h; any type of pool
//   PairProducts   bfloat16 goes through those of pairs.h, keys as they lie in the pool; on CPUs that multiply it natively
//
// `scores` is [kKeys][kWidth]: for each key of the tile a vector of rows. `mixed` is a panel [D][kWidth] of a row's mixed values.
#pragma once

#include <utility>

#include "attention.h"
#include "pairs.h"
#include "panels.h"
#include "work.h"

namespace twostroke {

constexpr int64_t kChunkRows = 192;  // loading keys is then a fiftieth of the work
constexpr int64_t kKeys = 96;        // of heads of 64, keys or values and a panel of scores fit into the first-level cache

#if defined(__AVX512BF16__) || defined(TWOSTROKE_PAIRS)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

// [rows][columns] to [columns][stride].
template <typename E>
inline void transpose(const E* from, int64_t rows, int64_t columns, E* to, int64_t stride) {
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) to[c * stride + r] = from[r * columns + c];
}

// A thread's memory for one item, handed out piece by piece.
class Pieces {
 public:
  Pieces(Scratch& scratch, int64_t num_floats) : next_(scratch.at_least(num_floats)) {}

  float* take(int64_t num_floats) { return std::exchange(next_, next_ + num_floats); }

 private:
  float* next_;
};

template <typename T, typename P>
class WideProducts {
 public:
  static constexpr int64_t kWidth = kPanel;

  // About 160 KB at D = 64.
  static int64_t num_floats(int64_t num_rows, int64_t dim) { return num_rows * dim + 2 * kKeys * dim + kWidth * dim; }

  WideProducts(const Attention<T, P>& call, Pieces& pieces, int64_t num_rows)
      : call_(call),
        dim_(call.head_dim),
        queries_(pieces.take(num_rows * dim_)),
        keys_(pieces.take(kKeys * dim_)),
        values_(pieces.take(kKeys * dim_)),
        widened_(pieces.take(kWidth * dim_)) {}

  // for_each_row(body): body(lane, token, head) for each row of the panel that is not padding.
  template <typename Rows>
  void load_queries(int64_t panel, const Rows& for_each_row) {
    std::fill_n(widened_, kWidth * dim_, 0.0f);
    for_each_row([&](int64_t lane, int64_t token, int64_t head) {
      call_.load_query(token, head, widened_ + lane * dim_);
    });
    transpose(widened_, kWidth, dim_, queries_ + panel * kWidth * dim_, kWidth);
  }

  // The keys and values of the tile at `first` that lie in begin .. end - 1. The rest becomes 0: those slots may hold anything, and
  // 0 * NaN would still be NaN.
  void load_keys(int64_t sequence, int64_t kv_head, int64_t first, int64_t begin, int64_t end) {
    for (int64_t strip = 0; strip < kKeys; strip += kWidth) {
      for (int64_t j = 0; j < kWidth; ++j) {
        const int64_t position = first + strip + j;
        float *key = widened_ + j * dim_, *value = values_ + (strip + j) * dim_;
        if (position >= begin && position < end) {
          load_key(sequence, kv_head, position, key, value);
        } else {
          std::fill_n(key, dim_, 0.0f);
          std::fill_n(value, dim_, 0.0f);
        }
      }
      transpose(widened_, kWidth, dim_, keys_ + strip, kKeys);
    }
  }

  void score(int64_t panel, int64_t count, float* scores) const {
    multiply(count, keys_, kKeys, queries_ + panel * kWidth * dim_, dim_, false, scores);
  }

  // mixed += the values, each weighted by its row's score.
  void mix(int64_t count, float* scores, float* mixed) const { multiply(dim_, values_, dim_, scores, count, true, mixed); }

 private:
  void load_key(int64_t sequence, int64_t kv_head, int64_t position, float* to_key, float* to_value) {
    const P* key = call_.keys(sequence, position, kv_head);
    float key_scale = 1.0f, value_scale = 1.0f;
    if constexpr (kIsScaled<P>) {  // here and not in the scores: each number is widened anyway
      const float* scale = call_.key_scales(sequence, position, kv_head);
      key_scale = *scale, value_scale = scale[call_.scales.value_offset];
    }
    widen_run(key, dim_, key_scale, to_key);
    widen_run(key + call_.kv.value_offset, dim_, value_scale, to_value);
  }

  // sums [rows, kWidth] = the products of left [depth, rows] with panel [depth][kWidth]; with `add` they go on.
  static void multiply(
      int64_t rows, const float* left, int64_t left_stride, const float* panel, int64_t depth, bool add, float* sums) {
    const Groups groups(rows, kMaxRows);
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t first = groups.start(g);
      kPanelTiles<float>[groups.size(g) - 1](
          left + first, left_stride, panel, 0, 1, depth, 0, add, sums + first * kWidth, kWidth);
    }
  }

  const Attention<T, P>& call_;
  const int64_t dim_;
  float* const queries_;  // panels [D][kWidth], scaled
  float* const keys_;     // [D][kKeys]
  float* const values_;   // [kKeys][D]
  float* const widened_;  // [kWidth][D]: on its way to be transposed
};

class PairProducts {
 public:
  static constexpr int64_t kWidth = kPairPanel;

  static int64_t num_floats(int64_t num_rows, int64_t dim) {
    return num_rows * num_pairs_of(dim) + kKeys / 2 * (dim + kWidth) + num_pairs_of(dim) * (kMaxPairRows + 1);
  }

  PairProducts(const Attention<BFloat16, BFloat16>& call, Pieces& pieces, int64_t num_rows)
      : call_(call),
        dim_(call.head_dim),
        num_pairs_(num_pairs_of(dim_)),
        queries_(reinterpret_cast<BFloat16*>(pieces.take(num_rows * num_pairs_))),
        values_(reinterpret_cast<uint32_t*>(pieces.take(kKeys / 2 * dim_))),
        weights_(reinterpret_cast<uint32_t*>(pieces.take(kKeys / 2 * kWidth))),
        padded_(reinterpret_cast<BFloat16*>(pieces.take(kMaxPairRows * num_pairs_))),
        zeros_(reinterpret_cast<BFloat16*>(pieces.take(num_pairs_))) {
    std::fill_n(zeros_, dim_, BFloat16(0, BFloat16::from_bits()));
  }

  template <typename Rows>
  void load_queries(int64_t panel, const Rows& for_each_row) {
    BFloat16* queries = queries_ + panel * kWidth * 2 * num_pairs_;
    std::fill_n(queries, kWidth * 2 * num_pairs_, BFloat16(0, BFloat16::from_bits()));
    for_each_row([&](int64_t lane, int64_t token, int64_t head) {
      const BFloat16* from = call_.q + token * call_.q_token_stride + head * call_.q_head_stride;
      for (int64_t d = 0; d < dim_; ++d) queries[(d / 2 * kWidth + lane) * 2 + d % 2] = from[d];
    });
  }

  // As above. A key that nobody sees gets some score, which softmax replaces; a value must be 0.
  void load_keys(int64_t sequence, int64_t kv_head, int64_t first, int64_t begin, int64_t end) {
    sequence_ = sequence, kv_head_ = kv_head, first_ = first;
    const auto value_at = [&](int64_t position) {
      const bool is_seen = position >= begin && position < end;
      return is_seen ? call_.keys(sequence, position, kv_head) + call_.kv.value_offset : zeros_;
    };
    for (int64_t j = 0; j < kKeys; j += 2) {
      const BFloat16 *even = value_at(first + j), *odd = value_at(first + j + 1);
      uint32_t* to = values_ + j / 2 * dim_;
#pragma omp simd
      for (int64_t d = 0; d < dim_; ++d) to[d] = uint32_t(even[d].x) | uint32_t(odd[d].x) << 16;
    }
  }

  void score(int64_t panel, int64_t count, float* scores) const {
    const uint32_t* queries = reinterpret_cast<const uint32_t*>(queries_ + panel * kWidth * 2 * num_pairs_);
    for (int64_t j = 0, some; j < count; j += some) {
      const int64_t position = first_ + j, left = call_.block_size - position % call_.block_size;
      some = std::min({left, count - j, int64_t(kMaxPairRows)});
      const BFloat16* keys = call_.keys(sequence_, position, kv_head_);
      int64_t stride = call_.kv.token_stride;
      if (dim_ % 2 != 0) keys = padded(keys, some), stride = 2 * num_pairs_;
      kPairTiles[some - 1](keys, stride, 2, queries, num_pairs_, 0, false, scores + j * kWidth);
    }
    const float scale = call_.scale;
#pragma omp simd
    for (int64_t i = 0; i < count * kWidth; ++i) scores[i] *= scale;
  }

  void mix(int64_t count, float* scores, float* mixed) const {
    if (count % 2 != 0) std::fill_n(scores + count * kWidth, kWidth, 0.0f);
    const int64_t num_pairs = (count + 1) / 2;
    for (int64_t k = 0; k < num_pairs; ++k)
      for (int64_t part = 0; part < kWidth; part += kLanes) {
        const float* from = scores + 2 * k * kWidth + part;
        *reinterpret_cast<BitsAt*>(weights_ + k * kWidth + part) = narrow_to_pairs(at(from), at(from + kWidth));
      }
    const BFloat16* values = reinterpret_cast<const BFloat16*>(values_);
    const Groups groups(dim_, kMaxPairRows);
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t d = groups.start(g);
      kPairTiles[groups.size(g) - 1](values + 2 * d, 2, 2 * dim_, weights_, num_pairs, 0, true, mixed + d * kWidth);
    }
  }

 private:
  static int64_t num_pairs_of(int64_t dim) { return (dim + 1) / 2; }

  // Keys whose last pair is filled with 0.
  const BFloat16* padded(const BFloat16* keys, int64_t count) const {
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t d = 0; d < dim_; ++d) padded_[j * 2 * num_pairs_ + d] = keys[j * call_.kv.token_stride + d];
      padded_[j * 2 * num_pairs_ + dim_] = BFloat16(0, BFloat16::from_bits());
    }
    return padded_;
  }

  const Attention<BFloat16, BFloat16>& call_;
  const int64_t dim_, num_pairs_;
  BFloat16* const queries_;  // panels [D / 2][kWidth] of pairs, as they come: scores are scaled
  uint32_t* const values_;   // [kKeys / 2][D]: pairs of two keys' values
  uint32_t* const weights_;  // [kKeys / 2][kWidth]: pairs of two keys' probabilities
  BFloat16* const padded_;   // [kMaxPairRows][D]: keys of an odd size
  BFloat16* const zeros_;    // [D]: the values of a key that no query sees
  int64_t sequence_ = 0, kv_head_ = 0, first_ = 0;
};

template <typename T, typename P>
using ChunkProducts =
    std::conditional_t<kHasPairs && std::is_same_v<T, BFloat16> && std::is_same_v<P, BFloat16>, PairProducts, WideProducts<T, P>>;

}  // namespace twostroke
