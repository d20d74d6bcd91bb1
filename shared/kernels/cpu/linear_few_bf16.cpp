// Linear layers for few rows of bfloat16 on CPUs with matrix tiles for it, where torch serves the larger ones: row-major weights,
// which both read, several outputs and several inputs per pass.
#include <ATen/ops/empty.h>

#include "dot_bf16.h"
#include "ops.h"
#include "tiles.h"
#include "work.h"

namespace twostroke {
namespace {

// sums [rows, num_outputs] = x . weightᵀ for outputs begin .. end - 1.
void multiply(
    const BFloat16* x, const float* wide_x, const BFloat16* weight, int64_t rows, int64_t size, int64_t begin, int64_t end,
    float* sums, int64_t num_outputs) {
  if constexpr (kHasDotBf16) {
    dot_rows_bf16(x, rows, weight + begin * size, end - begin, size, sums + begin, num_outputs);
  } else {
    const BFloat16* weights = weight + begin * size;
    dot_rows(wide_x, rows, padded_to_pairs(size), weights, end - begin, size, size, weights, sums + begin, num_outputs);
  }
}

}  // namespace

Tensor linear_few_bf16(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && weight.is_contiguous(), "x [T, E_in] and weight must be contiguous");
  TORCH_CHECK(x.size(1) == weight.size(1) && x.scalar_type() == at::kBFloat16, "x and weight must fit together");
  const int64_t rows = x.size(0), size = x.size(1), num_outputs = weight.size(0);
  Tensor out = at::empty({rows, num_outputs}, x.options());
  const BFloat16* from = x.const_data_ptr<BFloat16>();
  const BFloat16* weights = weight.const_data_ptr<BFloat16>();
  const BFloat16* biases = bias ? bias->const_data_ptr<BFloat16>() : nullptr;
  BFloat16* to = out.mutable_data_ptr<BFloat16>();
  static thread_local Scratch x_scratch, sum_scratch;
  float* wide_x = nullptr;
  float* sums = sum_scratch.at_least(rows * num_outputs);
  if constexpr (!kHasDotBf16) {
    const int64_t width = padded_to_pairs(size);
    wide_x = x_scratch.at_least((rows + 1) * width);
    float* row = wide_x + rows * width;
    for (int64_t r = 0; r < rows; ++r) {
      widen_run(from + r * size, size, 1.0f, row);
      to_slots<BFloat16>(row, size, wide_x + r * width);
    }
  }
  at::parallel_for(0, num_outputs, std::max<int64_t>(4, kWeightsPerThread / size), [&](int64_t begin, int64_t end) {
    multiply(from, wide_x, weights, rows, size, begin, end, sums, num_outputs);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t n = begin; n < end; ++n)
        to[r * num_outputs + n] = narrow<BFloat16>(sums[r * num_outputs + n] + (biases == nullptr ? 0.0f : widen(biases[n])));
  });
  return out;
}

}  // namespace twostroke
