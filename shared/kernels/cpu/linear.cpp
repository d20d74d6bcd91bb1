// Linear layers over packed weights (panels.h), for any number of rows:
//
//   1  x is cut into groups of rows and laid out as the tiles read it, widened to float32
//   2  an item of work is a block of groups, so small that it stays in the second-level cache, times a few panels
//   3  inside it, depth by depth: each panel passes all groups while it is in the first-level cache
//
// Threads take items as they get free. A row's bits depend on neither the groups nor the items (panels.h).
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "ops.h"
#include "panels.h"
#include "work.h"

namespace twostroke {
namespace {

constexpr int64_t kDepth = 1024;  // inputs per pass: a panel of it is 32 or 64 KiB, an item's rows of x about 240
constexpr int64_t kGroupsPerItem = 60 / kMaxRows;
constexpr int64_t kAheadBytes = 2048;  // for what comes from memory

// T is the type of rows, W that of weights.
template <typename T, typename W>
struct Product {
  const T* x;
  const W* panels;
  const T* bias;
  T* out;
  int64_t size, num_outputs;
  Groups groups;
  int64_t panels_per_item;

  int64_t num_panels() const { return (num_outputs + kPanel - 1) / kPanel; }

  void lay_out(int64_t group, float* wide) const {
    const int64_t first = groups.start(group), rows = groups.size(group);
    const T* from = x + first * size;
    float* to = wide + first * size;
    constexpr int64_t few = 8;  // so that the innermost loop is none
    int64_t k = 0;
    for (; size - k >= few; k += few)
      for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int64_t j = k; j < k + few; ++j) to[j * rows + r] = widen(from[r * size + j]);
    for (; k < size; ++k)
      for (int64_t r = 0; r < rows; ++r) to[k * rows + r] = widen(from[r * size + k]);
  }

  // Groups first .. last - 1 times panels begin .. end - 1.
  void multiply(const float* wide, int64_t first, int64_t last, int64_t begin, int64_t end) const {
    static thread_local Scratch scratch;
    const int64_t top = groups.start(first), width = (end - begin) * kPanel, stride = size * kPanel;
    float* sums = scratch.at_least((groups.start(last) - top) * width);
    // A lone group reads each panel once, whatever the order: several at a time, and from memory. With more groups a panel is
    // in the cache after the first, and while they compute, the next one comes.
    const bool is_lone = last - first == 1;
    const int64_t at_once = is_lone ? end - begin : 1, ahead = is_lone ? kAheadBytes / int64_t(sizeof(W)) : stride;
    for (int64_t k = 0; k < size; k += kDepth) {
      for (int64_t p = begin; p < end; p += at_once) {
        for (int64_t g = first; g < last; ++g) {
          const int64_t row = groups.start(g), rows = groups.size(g);
          kPanelTiles<W>[rows - 1](
              wide + row * size + k * rows, rows, panels + p * stride + k * kPanel, stride, at_once, std::min(kDepth, size - k),
              ahead, k > 0, sums + (row - top) * width + (p - begin) * kPanel, width);
        }
      }
    }
    store(sums, top, groups.start(last), begin * kPanel, std::min(end * kPanel, num_outputs), width);
  }

  void store(const float* sums, int64_t top, int64_t bottom, int64_t begin, int64_t end, int64_t width) const {
    for (int64_t r = top; r < bottom; ++r) {
      const float* from = sums + (r - top) * width - begin;
      T* to = out + r * num_outputs;
      if (bias == nullptr) {
#pragma omp simd
        for (int64_t n = begin; n < end; ++n) to[n] = narrow<T>(from[n]);
      } else {
#pragma omp simd
        for (int64_t n = begin; n < end; ++n) to[n] = narrow<T>(from[n] + widen(bias[n]));
      }
    }
  }

  void run() const {
    static thread_local Scratch scratch;
    float* wide = scratch.at_least(groups.num_rows * size);
    const int64_t grain = std::max<int64_t>(1, kElementsPerThread / (size * kMaxRows));
    at::parallel_for(0, groups.count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) lay_out(g, wide);
    });
    const int64_t across = (num_panels() + panels_per_item - 1) / panels_per_item;
    const int64_t down = (groups.count + kGroupsPerItem - 1) / kGroupsPerItem;
    for_each_item(down * across, [&](int64_t item) {
      const int64_t first = item / across * kGroupsPerItem, begin = item % across * panels_per_item;
      multiply(
          wide, first, std::min(first + kGroupsPerItem, groups.count), begin, std::min(begin + panels_per_item, num_panels()));
    });
  }
};

// As many as keep every thread busy to the end, but not so few that sharing them costs more than it saves.
int64_t panels_per_item(int64_t num_panels, int64_t size, const Groups& groups) {
  const int64_t even = num_panels / (8 * at::get_num_threads()), least = kWeightsPerThread / (size * kPanel * groups.count);
  const int64_t at_once = groups.count == 1 ? panels_at_once(1) : 1;
  return std::clamp<int64_t>(std::max(even, least) / at_once * at_once, at_once, 32);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& panels, int64_t num_outputs, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && panels.dim() == 3 && panels.is_contiguous(), "x and panels, contiguous");
  TORCH_CHECK(x.size(1) == panels.size(1) && num_outputs <= panels.size(0) * kPanel, "x and panels must fit together");
  Tensor out = at::empty({x.size(0), num_outputs}, x.options());
  if (x.size(0) == 0) return out;
  const Groups groups(x.size(0), kMaxRows);
  dispatch(x, [&](auto x_zero) {
    dispatch(panels, [&](auto panels_zero) {
      using T = decltype(x_zero);
      using W = decltype(panels_zero);
      Product<T, W>{
          .x = x.const_data_ptr<T>(),
          .panels = panels.const_data_ptr<W>(),
          .bias = bias ? bias->const_data_ptr<T>() : nullptr,
          .out = out.mutable_data_ptr<T>(),
          .size = x.size(1),
          .num_outputs = num_outputs,
          .groups = groups,
          .panels_per_item = panels_per_item(panels.size(0), x.size(1), groups),
      }.run();
    });
  });
  return out;
}

Tensor pack_panels(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight [E_out, E_in] must be contiguous");
  const int64_t num_outputs = weight.size(0), size = weight.size(1), num_panels = (num_outputs + kPanel - 1) / kPanel;
  Tensor panels = at::zeros({num_panels, size, kPanel}, weight.options());
  dispatch(weight, [&](auto zero) {
    using T = decltype(zero);
    const T* from = weight.const_data_ptr<T>();
    T* to = panels.mutable_data_ptr<T>();
    at::parallel_for(0, num_panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const T* rows = from + p * kPanel * size;
        T* panel = to + p * size * kPanel;
        const int64_t count = std::min(kPanel, num_outputs - p * kPanel);
        for (int64_t k = 0; k < size; ++k)
          for (int64_t j = 0; j < count; ++j) panel[k * kPanel + pair_index<T>(j)] = rows[j * size + k];
      }
    });
  });
  return panels;
}

Tensor panel_rows(const Tensor& panels, const Tensor& indices) {
  TORCH_CHECK(panels.dim() == 3 && panels.is_contiguous() && indices.scalar_type() == at::kLong, "panels and int64 indices");
  const int64_t size = panels.size(1), num_rows = indices.size(0), limit = panels.size(0) * kPanel;
  Tensor out = at::empty({num_rows, size}, panels.options());
  const Tensor list = indices.contiguous();
  const int64_t* index = list.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < num_rows; ++r) TORCH_CHECK(index[r] >= 0 && index[r] < limit, "no row ", index[r]);
  dispatch(panels, [&](auto zero) {
    using T = decltype(zero);
    const T* from = panels.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, num_rows, std::max<int64_t>(1, kElementsPerThread / size), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* column = from + index[r] / kPanel * size * kPanel + pair_index<T>(index[r] % kPanel);
        for (int64_t k = 0; k < size; ++k) to[r * size + k] = column[k * kPanel];
      }
    });
  });
  return out;
}

}  // namespace twostroke
