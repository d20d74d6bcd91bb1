// Attention of sequences with several queries each: chunks of prompts. The work is arithmetic, so it is cut into tiles that stay
// in the caches, and goes through the product of linear layers (panels.h):
//
//   an item of work    up to kRows rows (queries x heads of one KV head) of one sequence, in panels
//   its inner loop     kKeys keys at a time, widened; then panel by panel: scores, online softmax (FlashAttention's: rescale what
//                      was summed whenever the maximum grows), mixed values
//
// The lanes of a vector are rows. So softmax needs no maxima and sums across lanes, and of keys and values one number at a time
// meets a whole vector of rows.
//
// Key tiles begin at multiples of kKeys positions and skipped keys change nothing, so a row's result depends on neither the chunk
// it came in nor on the rest of the batch.
#include <limits>
#include <utility>
#include <vector>

#include "attention.h"
#include "panels.h"
#include "work.h"

namespace twostroke {
namespace {

constexpr int64_t kRows = 192;  // loading keys is then a fiftieth of the work
constexpr int64_t kKeys = 96;   // of heads of 64, keys or values and a panel of scores fit into the first-level cache
static_assert(kRows % kPanel == 0 && kKeys % kPanel == 0);
constexpr float kLowest = std::numeric_limits<float>::lowest();

// Row r of a sequence is head r % G of its query r / G.
struct Item {
  int64_t sequence, kv_head, first_row, num_rows;
};

// What softmax knows of a panel's rows.
struct PanelRows {
  int32_t first_key[kPanel], last_key[kPanel];  // that the row sees
  float largest[kPanel], sum[kPanel];
};

// A thread's working set, about 160 KB at D = 64.
struct Tile {
  float* queries;  // panels [D][kPanel]
  float* mixed;    // panels [D][kPanel]
  float* keys;     // [D][kKeys]
  float* values;   // [kKeys][D]
  float* scores;   // [kKeys][kPanel]
  float* widened;  // [kPanel][D]: keys on their way to be transposed

  Tile(Scratch& scratch, int64_t num_rows, int64_t dim) {
    float* next = scratch.at_least(2 * num_rows * dim + 2 * kKeys * dim + kKeys * kPanel + kPanel * dim);
    const auto take = [&](int64_t size) { return std::exchange(next, next + size); };
    queries = take(num_rows * dim);
    mixed = take(num_rows * dim);
    keys = take(kKeys * dim);
    values = take(kKeys * dim);
    scores = take(kKeys * kPanel);
    widened = take(kPanel * dim);
  }
};

// [rows][columns] to [columns][stride].
inline void transpose(const float* from, int64_t rows, int64_t columns, float* to, int64_t stride) {
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) to[c * stride + r] = from[r * columns + c];
}

template <typename T, typename P>
class ChunkItem {
 public:
  ChunkItem(const Attention<T, P>& call, const Item& item)
      : call_(call),
        item_(item),
        dim_(call.head_dim),
        num_panels_((item.num_rows + kPanel - 1) / kPanel),
        begin_(call.first_key(position_of(0))),
        end_(position_of(item.num_rows - 1) + 1),
        tile_(scratch(), num_panels_ * kPanel, dim_) {}

  void run() {
    for (int64_t p = 0; p < num_panels_; ++p) load_queries(p);
    std::fill_n(tile_.mixed, num_panels_ * kPanel * dim_, 0.0f);
    for (int64_t first = begin_ / kKeys * kKeys; first < end_; first += kKeys) {
      load_keys(first);
      for (int64_t p = 0; p < num_panels_; ++p) attend(p, first);
    }
    for (int64_t p = 0; p < num_panels_; ++p) store(p);
  }

 private:
  static Scratch& scratch() {
    static thread_local Scratch scratch;
    return scratch;
  }

  // Of a row of the item; padding counts as its last row.
  int64_t position_of(int64_t row) const {
    const int64_t query = (item_.first_row + std::min(row, item_.num_rows - 1)) / call_.group();
    return call_.context_lens[item_.sequence] - call_.num_queries(item_.sequence) + query;
  }

  // body(lane, token, head) for each row of a panel that is not padding.
  template <typename Body>
  void for_each_row(int64_t panel, const Body& body) const {
    const int64_t group = call_.group(), end = std::min(kPanel, item_.num_rows - panel * kPanel);
    for (int64_t lane = 0; lane < end; ++lane) {
      const int64_t row = item_.first_row + panel * kPanel + lane;
      body(lane, call_.query_starts[item_.sequence] + row / group, item_.kv_head * group + row % group);
    }
  }

  void load_queries(int64_t panel) {
    std::fill_n(tile_.widened, kPanel * dim_, 0.0f);
    for_each_row(panel, [&](int64_t lane, int64_t token, int64_t head) {
      call_.load_query(token, head, tile_.widened + lane * dim_);
    });
    transpose(tile_.widened, kPanel, dim_, tile_.queries + panel * kPanel * dim_, kPanel);
    PanelRows& rows = rows_[panel];
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      const int64_t position = position_of(panel * kPanel + lane);
      rows.first_key[lane] = call_.first_key(position), rows.last_key[lane] = position;
      rows.largest[lane] = kLowest, rows.sum[lane] = 0.0f;
    }
  }

  // The keys and values of the tile at `first` that some query of the item sees. The rest becomes 0: those slots may hold anything,
  // and 0 * NaN would still be NaN.
  void load_keys(int64_t first) {
    for (int64_t strip = 0; strip < kKeys; strip += kPanel) {
      for (int64_t j = 0; j < kPanel; ++j) load_key(first + strip + j, tile_.widened + j * dim_, tile_.values + (strip + j) * dim_);
      transpose(tile_.widened, kPanel, dim_, tile_.keys + strip, kKeys);
    }
  }

  void load_key(int64_t position, float* to_key, float* to_value) {
    if (position < begin_ || position >= end_) {
      std::fill_n(to_key, dim_, 0.0f);
      std::fill_n(to_value, dim_, 0.0f);
      return;
    }
    const P* key = call_.keys(item_.sequence, position, item_.kv_head);
    float key_scale = 1.0f, value_scale = 1.0f;
    if constexpr (kIsScaled<P>) {  // here and not in the scores: each number is widened anyway
      const float* scale = call_.key_scales(item_.sequence, position, item_.kv_head);
      key_scale = *scale, value_scale = scale[call_.scales.value_offset];
    }
    widen_run(key, dim_, key_scale, to_key);
    widen_run(key + call_.kv.value_offset, dim_, value_scale, to_value);
  }

  void attend(int64_t panel, int64_t first) {
    const int64_t top = panel * kPanel, bottom = top + kPanel - 1;
    const int64_t count = std::min(position_of(bottom) + 1 - first, kKeys);  // the others come after all rows of the panel
    if (count <= 0 || first + kKeys <= call_.first_key(position_of(top))) return;
    multiply(count, tile_.keys, kKeys, tile_.queries + top * dim_, dim_, false, tile_.scores);
    call_.cap(tile_.scores, count * kPanel);
    const bool all_see_all = position_of(top) >= first + count - 1 && call_.first_key(position_of(bottom)) <= first;
    float* mixed = tile_.mixed + top * dim_;
    all_see_all ? soften<false>(rows_[panel], first, count, mixed) : soften<true>(rows_[panel], first, count, mixed);
    multiply(dim_, tile_.values, dim_, tile_.scores, count, true, mixed);
  }

  // sums [rows, kPanel] = the products of left [depth, rows] with panel [depth][kPanel]; with `add` they go on.
  static void multiply(
      int64_t rows, const float* left, int64_t left_stride, const float* panel, int64_t depth, bool add, float* sums) {
    const Groups groups(rows, kMaxRows);
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t first = groups.start(g);
      kPanelTiles<float>[groups.size(g) - 1](
          left + first, left_stride, panel, 0, 1, depth, 0, add, sums + first * kPanel, kPanel);
    }
  }

  // Turns scores into probabilities relative to each row's largest score so far.
  template <bool MASKED>
  void soften(PanelRows& rows, int64_t first, int64_t count, float* mixed) {
    for (int64_t half = 0; half < kPanel; half += kLanes) {
      const Ints first_key = at(rows.first_key + half) - int32_t(first), last_key = at(rows.last_key + half) - int32_t(first);
      const auto is_seen = [&](int64_t j) { return (first_key <= int32_t(j)) & (last_key >= int32_t(j)); };
      const Lanes before = at(rows.largest + half), nothing = {};
      Lanes largest = before, sum = nothing;
      for (int64_t j = 0; j < count; ++j) {
        const Lanes score = at(tile_.scores + j * kPanel + half);
        const Lanes seen = MASKED ? (is_seen(j) ? score : nothing + kLowest) : score;
        largest = seen > largest ? seen : largest;
      }
      for (int64_t j = 0; j < count; ++j) {
        LanesAt& score = at(tile_.scores + j * kPanel + half);
        const Lanes e = exp_nonpositive<Lanes>(score - largest);
        score = MASKED ? (is_seen(j) ? e : nothing) : e;
        sum += score;
      }
      const Lanes factor = exp_nonpositive<Lanes>(before - largest);
      at(rows.largest + half) = largest;
      at(rows.sum + half) = at(rows.sum + half) * factor + sum;
      for (int64_t d = 0; d < dim_; ++d) at(mixed + d * kPanel + half) *= factor;
    }
  }

  void store(int64_t panel) {
    transpose(tile_.mixed + panel * kPanel * dim_, dim_, kPanel, tile_.widened, dim_);
    for_each_row(panel, [&](int64_t lane, int64_t token, int64_t head) {
      call_.store_output(token, head, tile_.widened + lane * dim_, 1.0f / rows_[panel].sum[lane]);
    });
  }

  const Attention<T, P>& call_;
  const Item& item_;
  const int64_t dim_, num_panels_, begin_, end_;
  const Tile tile_;
  PanelRows rows_[kRows / kPanel];
};

}  // namespace

template <typename T, typename P>
void attend_chunks(const Attention<T, P>& call) {
  static thread_local std::vector<Item> items;
  items.clear();
  for (int64_t s = call.num_single; s < call.num_sequences; ++s) {
    const int64_t num_rows = call.num_queries(s) * call.group();
    for (int64_t row = 0; row < num_rows; row += kRows)
      for (int64_t h = 0; h < call.num_kv_heads; ++h) items.push_back({s, h, row, std::min(kRows, num_rows - row)});
  }
  const std::vector<Item>& work = items;  // a thread_local name means another object inside the threads' bodies
  // From the back: a sequence's last queries see the most keys, and the longest items should not start last.
  for_each_item(work.size(), [&](int64_t i) { ChunkItem<T, P>(call, work[work.size() - 1 - i]).run(); });
}

#define TWOSTROKE_INSTANTIATE(T, P) template void attend_chunks(const Attention<T, P>&);
TWOSTROKE_FOR_EACH_POOL(TWOSTROKE_INSTANTIATE)

}  // namespace twostroke
