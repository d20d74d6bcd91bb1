// Attention of sequences with several queries each: chunks of prompts. The work is arithmetic, so it is cut into tiles that stay
// in the caches, and goes through the products of linear layers (chunk_products.h):
//
//   an item of work    up to kChunkRows rows (queries x heads of one KV head) of one sequence, in panels
//   its inner loop     kKeys keys at a time; then panel by panel: scores, online softmax (FlashAttention's: rescale what
//                      was summed whenever the maximum grows), mixed values
//
// The lanes of a vector are rows. So softmax needs no maxima and sums across lanes, and of keys and values one number or pair at a
// time meets a whole vector of rows.
//
// Key tiles begin at multiples of kKeys positions and skipped keys change nothing, so a row's result depends on neither the chunk
// it came in nor on the rest of the batch.
#include <limits>
#include <vector>

#include "chunk_products.h"

namespace twostroke {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();

// Row r of a sequence is head r % G of its query r / G.
struct Item {
  int64_t sequence, kv_head, first_row, num_rows;
};

// What softmax knows of a panel's rows.
template <int64_t WIDTH>
struct PanelRows {
  int32_t first_key[WIDTH], last_key[WIDTH];  // that the row sees
  float largest[WIDTH], sum[WIDTH];
};

template <typename T, typename P>
class ChunkItem {
  using Products = ChunkProducts<T, P>;
  static constexpr int64_t kWidth = Products::kWidth;
  static_assert(kChunkRows % kWidth == 0 && kKeys % kPanel == 0 && kKeys % 2 == 0);

 public:
  ChunkItem(const Attention<T, P>& call, const Item& item)
      : call_(call),
        item_(item),
        dim_(call.head_dim),
        num_panels_((item.num_rows + kWidth - 1) / kWidth),
        begin_(call.first_key(position_of(0))),
        end_(position_of(item.num_rows - 1) + 1),
        pieces_(scratch(), num_floats()),
        mixed_(pieces_.take(num_panels_ * kWidth * dim_)),
        scores_(pieces_.take(kKeys * kWidth)),
        transposed_(pieces_.take(kWidth * dim_)),
        products_(call, pieces_, num_panels_ * kWidth) {}

  void run() {
    for (int64_t p = 0; p < num_panels_; ++p) load_queries(p);
    std::fill_n(mixed_, num_panels_ * kWidth * dim_, 0.0f);
    for (int64_t first = begin_ / kKeys * kKeys; first < end_; first += kKeys) {
      products_.load_keys(item_.sequence, item_.kv_head, first, begin_, end_);
      for (int64_t p = 0; p < num_panels_; ++p) attend(p, first);
    }
    for (int64_t p = 0; p < num_panels_; ++p) store(p);
  }

 private:
  static Scratch& scratch() {
    static thread_local Scratch scratch;
    return scratch;
  }

  int64_t num_floats() const {
    const int64_t num_rows = num_panels_ * kWidth;
    return num_rows * dim_ + kKeys * kWidth + kWidth * dim_ + Products::num_floats(num_rows, dim_);
  }

  // Of a row of the item; padding counts as its last row.
  int64_t position_of(int64_t row) const {
    const int64_t query = (item_.first_row + std::min(row, item_.num_rows - 1)) / call_.group();
    return call_.context_lens[item_.sequence] - call_.num_queries(item_.sequence) + query;
  }

  // body(lane, token, head) for each row of a panel that is not padding.
  template <typename Body>
  void for_each_row(int64_t panel, const Body& body) const {
    const int64_t group = call_.group(), end = std::min(kWidth, item_.num_rows - panel * kWidth);
    for (int64_t lane = 0; lane < end; ++lane) {
      const int64_t row = item_.first_row + panel * kWidth + lane;
      body(lane, call_.query_starts[item_.sequence] + row / group, item_.kv_head * group + row % group);
    }
  }

  void load_queries(int64_t panel) {
    products_.load_queries(panel, [&](const auto& body) { for_each_row(panel, body); });
    PanelRows<kWidth>& rows = rows_[panel];
    for (int64_t lane = 0; lane < kWidth; ++lane) {
      const int64_t position = position_of(panel * kWidth + lane);
      rows.first_key[lane] = call_.first_key(position), rows.last_key[lane] = position;
      rows.largest[lane] = kLowest, rows.sum[lane] = 0.0f;
    }
  }

  void attend(int64_t panel, int64_t first) {
    const int64_t top = panel * kWidth, bottom = top + kWidth - 1;
    const int64_t count = std::min(position_of(bottom) + 1 - first, kKeys);  // the others come after all rows of the panel
    if (count <= 0 || first + kKeys <= call_.first_key(position_of(top))) return;
    products_.score(panel, count, scores_);
    call_.cap(scores_, count * kWidth);
    const bool all_see_all = position_of(top) >= first + count - 1 && call_.first_key(position_of(bottom)) <= first;
    float* mixed = mixed_ + top * dim_;
    all_see_all ? soften<false>(rows_[panel], first, count, mixed) : soften<true>(rows_[panel], first, count, mixed);
    products_.mix(count, scores_, mixed);
  }

  // Turns scores into probabilities relative to each row's largest score so far.
  template <bool MASKED>
  void soften(PanelRows<kWidth>& rows, int64_t first, int64_t count, float* mixed) {
    for (int64_t part = 0; part < kWidth; part += kLanes) {
      const Ints first_key = at(rows.first_key + part) - int32_t(first), last_key = at(rows.last_key + part) - int32_t(first);
      const auto is_seen = [&](int64_t j) { return (first_key <= int32_t(j)) & (last_key >= int32_t(j)); };
      const Lanes before = at(rows.largest + part), nothing = {};
      Lanes largest = before, sum = nothing;
      for (int64_t j = 0; j < count; ++j) {
        const Lanes score = at(scores_ + j * kWidth + part);
        const Lanes seen = MASKED ? (is_seen(j) ? score : nothing + kLowest) : score;
        largest = seen > largest ? seen : largest;
      }
      for (int64_t j = 0; j < count; ++j) {
        LanesAt& score = at(scores_ + j * kWidth + part);
        const Lanes e = exp_nonpositive<Lanes>(score - largest);
        score = MASKED ? (is_seen(j) ? e : nothing) : e;
        sum += score;
      }
      const Lanes factor = exp_nonpositive<Lanes>(before - largest);
      at(rows.largest + part) = largest;
      at(rows.sum + part) = at(rows.sum + part) * factor + sum;
      for (int64_t d = 0; d < dim_; ++d) at(mixed + d * kWidth + part) *= factor;
    }
  }

  void store(int64_t panel) {
    transpose(mixed_ + panel * kWidth * dim_, dim_, kWidth, transposed_, dim_);
    for_each_row(panel, [&](int64_t lane, int64_t token, int64_t head) {
      call_.store_output(token, head, transposed_ + lane * dim_, 1.0f / rows_[panel].sum[lane]);
    });
  }

  const Attention<T, P>& call_;
  const Item& item_;
  const int64_t dim_, num_panels_, begin_, end_;
  Pieces pieces_;
  float* const mixed_;       // panels [D][kWidth]
  float* const scores_;      // [kKeys][kWidth]
  float* const transposed_;  // [kWidth][D]
  Products products_;
  PanelRows<kWidth> rows_[kChunkRows / kWidth];
};

}  // namespace

template <typename T, typename P>
void attend_chunks(const Attention<T, P>& call) {
  static thread_local std::vector<Item> items;
  items.clear();
  for (int64_t s = call.num_single; s < call.num_sequences; ++s) {
    const int64_t num_rows = call.num_queries(s) * call.group();
    for (int64_t row = 0; row < num_rows; row += kChunkRows)
      for (int64_t h = 0; h < call.num_kv_heads; ++h) items.push_back({s, h, row, std::min(kChunkRows, num_rows - row)});
  }
  const std::vector<Item>& work = items;  // a thread_local name means another object inside the threads' bodies
  // From the back: a sequence's last queries see the most keys, and the longest items should not start last.
  for_each_item(work.size(), [&](int64_t i) { ChunkItem<T, P>(call, work[work.size() - 1 - i]).run(); });
}

#define TWOSTROKE_INSTANTIATE(T, P) template void attend_chunks(const Attention<T, P>&);
TWOSTROKE_FOR_EACH_POOL(TWOSTROKE_INSTANTIATE)

}  // namespace twostroke
