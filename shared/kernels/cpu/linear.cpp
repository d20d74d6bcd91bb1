// Linear layers for few rows, where the time goes into reading the weights once: row-major weights, several outputs and several
// inputs per pass (tiles.h). bfloat16 is widened as it is loaded, or multiplied in pairs where the CPU has AVX512_BF16.
// For many rows of bfloat16 on a CPU without such instructions: float32 products of panels of widened weights.
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "dot_bf16.h"
#include "ops.h"
#include "tiles.h"
#include "work.h"

namespace twostroke {
namespace {

constexpr int64_t kWeightsPerThread = 65536;  // fewer are read sooner than another thread wakes up

// x [rows, size] as the tiles want it: float32 stays where it is, other types are widened once.
const float* widened(const float* x, int64_t, Scratch&) { return x; }

const float* widened(const BFloat16* x, int64_t count, Scratch& scratch) {
  float* to = scratch.at_least(count);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = widen(x[i]);
  return to;
}

// sums [rows, num_outputs] = x . weightᵀ for outputs begin .. end - 1.
template <typename T>
void multiply(
    const T* x, const float* wide_x, const T* weight, int64_t rows, int64_t size, int64_t begin, int64_t end, float* sums,
    int64_t num_outputs) {
  if constexpr (kHasDotBf16 && std::is_same_v<T, BFloat16>) {
    dot_rows_bf16(x, rows, weight + begin * size, end - begin, size, sums + begin, num_outputs);
  } else {
    dot_rows(wide_x, rows, size, weight + begin * size, end - begin, size, size, sums + begin, num_outputs);
  }
}

template <typename T>
void linear_of(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t size, int64_t num_outputs) {
  static thread_local Scratch x_scratch, sum_scratch;
  constexpr bool in_place = std::is_same_v<T, float>;
  const float* wide_x = widened(x, rows * size, x_scratch);
  float* sums;
  if constexpr (in_place) {
    sums = out;
  } else {
    sums = sum_scratch.at_least(rows * num_outputs);
  }
  at::parallel_for(0, num_outputs, std::max<int64_t>(4, kWeightsPerThread / size), [&](int64_t begin, int64_t end) {
    multiply(x, wide_x, weight, rows, size, begin, end, sums, num_outputs);
    if (in_place && bias == nullptr) return;
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = sums + r * num_outputs;
      T* to = out + r * num_outputs;
      for (int64_t n = begin; n < end; ++n) to[n] = narrow<T>(from[n] + (bias == nullptr ? 0.0f : widen(bias[n])));
    }
  });
}

constexpr int64_t kPanelSize = 1 << 18;  // weights widened at a time: 1 MiB of float32

// out[:, begin..] = narrow(sums + bias), sums [rows, width].
void narrow_panel(const float* sums, const BFloat16* bias, BFloat16* out, int64_t rows, int64_t width, int64_t num_outputs) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kElementsPerThread / width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
#pragma omp simd
      for (int64_t n = 0; n < width; ++n)
        out[r * num_outputs + n] = narrow<BFloat16>(sums[r * width + n] + (bias == nullptr ? 0.0f : widen(bias[n])));
  });
}

}  // namespace

Tensor linear_widened(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && weight.is_contiguous() && x.size(1) == weight.size(1), "x [T, E_in] and weight must fit together");
  const int64_t rows = x.size(0), size = x.size(1), num_outputs = weight.size(0);
  Tensor out = at::empty({rows, num_outputs}, x.options());
  const Tensor wide_x = x.to(at::kFloat);
  const int64_t panel_width = std::clamp<int64_t>(kPanelSize / size, 1, num_outputs);
  const Tensor panel = at::empty({panel_width, size}, wide_x.options());
  const BFloat16* bias_data = bias ? bias->const_data_ptr<BFloat16>() : nullptr;
  for (int64_t begin = 0; begin < num_outputs; begin += panel_width) {
    const int64_t width = std::min(panel_width, num_outputs - begin);
    const Tensor wide = panel.narrow(0, 0, width);
    wide.copy_(weight.narrow(0, begin, width));
    const Tensor sums = at::mm(wide_x, wide.t());
    narrow_panel(
        sums.const_data_ptr<float>(), bias_data == nullptr ? nullptr : bias_data + begin, out.mutable_data_ptr<BFloat16>() + begin,
        rows, width, num_outputs);
  }
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && weight.is_contiguous(), "x [T, E_in] and weight must be contiguous");
  TORCH_CHECK(x.size(1) == weight.size(1) && x.scalar_type() == weight.scalar_type(), "x and weight must fit together");
  Tensor out = at::empty({x.size(0), weight.size(0)}, x.options());
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    linear_of(
        x.const_data_ptr<T>(), weight.const_data_ptr<T>(), bias ? bias->const_data_ptr<T>() : nullptr, out.mutable_data_ptr<T>(),
        x.size(0), x.size(1), weight.size(0));
  });
  return out;
}

}  // namespace twostroke
