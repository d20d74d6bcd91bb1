// Linear layers of bfloat16 over panels of pairs (pairs.h), for any number of rows, on CPUs that multiply bfloat16 natively:
//
//   1  an item of work is a block of groups, so few that their rows stay in the second-level cache, times a few panels
//   2  inside it each panel passes all groups: the first one fetches the next panel while it computes
//
// Threads take items as they get free, so that one that loses its core for a moment holds up nobody. A row's bits depend on neither
// the groups nor the items.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "groups.h"
#include "ops.h"
#include "pairs.h"
#include "work.h"

namespace twostroke {
namespace {

constexpr int64_t kBlockBytes = 384 * 1024;  // of an item's rows, beside two panels in a second-level cache of 1 MiB
constexpr int64_t kAheadWords = 1024;        // for what comes from memory

struct PairProduct {
  const BFloat16* x;
  int64_t x_stride;
  const uint32_t* panels;
  const BFloat16* bias;
  BFloat16* out;
  int64_t num_pairs, num_outputs, num_panels;
  Groups groups;
  int64_t groups_per_item, panels_per_item;

  void multiply(int64_t first, int64_t last, int64_t begin, int64_t end) const {
    float sums[kMaxPairRows * kPairPanel];
    const int64_t stride = num_pairs * kPairPanel, next = last - first == 1 ? kAheadWords : stride;
    for (int64_t p = begin; p < end; ++p) {
      for (int64_t g = first; g < last; ++g) {
        const int64_t row = groups.start(g), rows = groups.size(g);
        kPairTiles[rows - 1](x + row * x_stride, x_stride, 2, panels + p * stride, num_pairs, g == first ? next : 0, false, sums);
        store(sums, row, rows, p * kPairPanel);
      }
    }
  }

  void store(const float* sums, int64_t row, int64_t rows, int64_t first) const {
    const int64_t count = std::min(kPairPanel, num_outputs - first);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = sums + r * kPairPanel;
      BFloat16* to = out + (row + r) * num_outputs + first;
      if (bias == nullptr) {
#pragma omp simd
        for (int64_t n = 0; n < count; ++n) to[n] = narrow<BFloat16>(from[n]);
      } else {
#pragma omp simd
        for (int64_t n = 0; n < count; ++n) to[n] = narrow<BFloat16>(from[n] + widen(bias[first + n]));
      }
    }
  }

  void run() const {
    const int64_t across = (num_panels + panels_per_item - 1) / panels_per_item;
    const int64_t down = (groups.count + groups_per_item - 1) / groups_per_item;
    for_each_item(down * across, [&](int64_t item) {
      const int64_t first = item / across * groups_per_item, begin = item % across * panels_per_item;
      multiply(first, std::min(first + groups_per_item, groups.count), begin, std::min(begin + panels_per_item, num_panels));
    });
  }
};

// As many as keep every thread busy to the end, but not so few that sharing them costs more than it saves.
int64_t panels_per_item(int64_t num_panels, int64_t num_pairs, int64_t num_groups) {
  const int64_t even = num_panels / (8 * at::get_num_threads());
  const int64_t least = kWeightsPerThread / (2 * num_pairs * kPairPanel * num_groups);
  return std::clamp<int64_t>(std::max(even, least), 1, 32);
}

// Rows whose last pair is filled with 0.
Tensor padded(const Tensor& x) {
  Tensor wide = at::zeros({x.size(0), x.size(1) + 1}, x.options());
  wide.narrow(1, 0, x.size(1)).copy_(x);
  return wide;
}

}  // namespace

Tensor linear_pairs(const Tensor& x, const Tensor& panels, int64_t num_outputs, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kBFloat16, "x must be contiguous bfloat16");
  TORCH_CHECK(panels.dim() == 4 && panels.is_contiguous() && panels.size(2) == kPairPanel, "panels of another build");
  const int64_t num_pairs = panels.size(1);
  TORCH_CHECK((x.size(1) + 1) / 2 == num_pairs && num_outputs <= panels.size(0) * kPairPanel, "x and panels must fit together");
  Tensor out = at::empty({x.size(0), num_outputs}, x.options());
  if (x.size(0) == 0) return out;
  const Tensor rows = x.size(1) % 2 == 0 ? x : padded(x);
  const Groups groups(x.size(0), kMaxPairRows);
  const int64_t row_bytes = 4 * num_pairs * kMaxPairRows;
  PairProduct{
      .x = rows.const_data_ptr<BFloat16>(),
      .x_stride = 2 * num_pairs,
      .panels = reinterpret_cast<const uint32_t*>(panels.const_data_ptr<BFloat16>()),
      .bias = bias ? bias->const_data_ptr<BFloat16>() : nullptr,
      .out = out.mutable_data_ptr<BFloat16>(),
      .num_pairs = num_pairs,
      .num_outputs = num_outputs,
      .num_panels = panels.size(0),
      .groups = groups,
      .groups_per_item = std::max<int64_t>(1, kBlockBytes / row_bytes),
      .panels_per_item = panels_per_item(panels.size(0), num_pairs, groups.count),
  }.run();
  return out;
}

Tensor pack_pairs(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.scalar_type() == at::kBFloat16, "weight [E_out, E_in] of bfloat16");
  const int64_t num_outputs = weight.size(0), size = weight.size(1), num_pairs = (size + 1) / 2;
  const int64_t num_panels = (num_outputs + kPairPanel - 1) / kPairPanel;
  Tensor panels = at::zeros({num_panels, num_pairs, kPairPanel, 2}, weight.options());
  const BFloat16* from = weight.const_data_ptr<BFloat16>();
  BFloat16* to = panels.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, num_panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t count = std::min(kPairPanel, num_outputs - p * kPairPanel);
      BFloat16* panel = to + p * num_pairs * kPairPanel * 2;
      for (int64_t k = 0; k < size; ++k)
        for (int64_t j = 0; j < count; ++j) panel[(k / 2 * kPairPanel + j) * 2 + k % 2] = from[(p * kPairPanel + j) * size + k];
    }
  });
  return panels;
}

Tensor pair_rows(const Tensor& panels, int64_t size, const Tensor& indices) {
  TORCH_CHECK(panels.dim() == 4 && panels.is_contiguous() && indices.scalar_type() == at::kLong, "panels and int64 indices");
  const int64_t num_pairs = panels.size(1), num_rows = indices.size(0), limit = panels.size(0) * kPairPanel;
  TORCH_CHECK((size + 1) / 2 == num_pairs, "panels of rows of another size");
  Tensor out = at::empty({num_rows, size}, panels.options());
  const Tensor list = indices.contiguous();
  const int64_t* index = list.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < num_rows; ++r) TORCH_CHECK(index[r] >= 0 && index[r] < limit, "no row ", index[r]);
  const BFloat16* from = panels.const_data_ptr<BFloat16>();
  BFloat16* to = out.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, num_rows, std::max<int64_t>(1, kElementsPerThread / size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const BFloat16* column = from + (index[r] / kPairPanel * num_pairs * kPairPanel + index[r] % kPairPanel) * 2;
      for (int64_t k = 0; k < size; ++k) to[r * size + k] = column[k / 2 * kPairPanel * 2 + k % 2];
    }
  });
  return out;
}

}  // namespace twostroke
