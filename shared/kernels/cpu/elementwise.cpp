// RMS norm, with and without the residual addition, and the gated activation: one pass over memory each.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cmath>

#include "ops.h"
#include "scalar.h"
#include "work.h"

namespace twostroke {
namespace {

template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t size, float eps) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; ++i) squares += widen(x[i]) * widen(x[i]);
  const float scale = 1.0f / std::sqrt(squares / size + eps);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) out[i] = narrow<T>(widen(x[i]) * scale * widen(weight[i]));
}

template <typename T>
void add_row(const T* x, T* residual, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) residual[i] = narrow<T>(widen(residual[i]) + widen(x[i]));
}

template <typename T>
void silu_mul_row(const T* gate, const T* up, T* out, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const float g = widen(gate[i]);
    out[i] = narrow<T>(g * sigmoid(g) * widen(up[i]));
  }
}

template <typename Body>
void for_each_row(int64_t num_rows, int64_t size, const Body& body) {
  at::parallel_for(0, num_rows, std::max<int64_t>(1, kElementsPerThread / size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

void check_rows(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous(), "x and weight must be contiguous");
  TORCH_CHECK(x.size(-1) == weight.size(0) && x.scalar_type() == weight.scalar_type(), "x and weight must fit together");
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_rows(x, weight);
  Tensor out = at::empty_like(x);
  const int64_t size = weight.size(0);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const T *from = x.const_data_ptr<T>(), *scales = weight.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_each_row(
        x.numel() / size, size, [&](int64_t row) { norm_row(from + row * size, scales, to + row * size, size, float(eps)); });
  });
  return out;
}

Tensor add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  check_rows(x, weight);
  check_rows(residual, weight);
  TORCH_CHECK(x.sizes() == residual.sizes(), "x and residual must have one shape");
  Tensor out = at::empty_like(x);
  const int64_t size = weight.size(0);
  dispatch(x, [&](auto zero) {
    using T = decltype(zero);
    const T *from = x.const_data_ptr<T>(), *scales = weight.const_data_ptr<T>();
    T *sum = residual.mutable_data_ptr<T>(), *to = out.mutable_data_ptr<T>();
    for_each_row(x.numel() / size, size, [&](int64_t row) {
      add_row(from + row * size, sum + row * size, size);
      norm_row(sum + row * size, scales, to + row * size, size, float(eps));
    });
  });
  return out;
}

Tensor silu_mul(const Tensor& gate_up) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.stride(1) == 1 && gate_up.size(1) % 2 == 0, "gate_up must be [T, 2E], rows contiguous");
  const int64_t size = gate_up.size(1) / 2, stride = gate_up.stride(0);
  Tensor out = at::empty({gate_up.size(0), size}, gate_up.options());
  dispatch(gate_up, [&](auto zero) {
    using T = decltype(zero);
    const T* gate = gate_up.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_each_row(gate_up.size(0), size, [&](int64_t row) {
      silu_mul_row(gate + row * stride, gate + row * stride + size, to + row * size, size);
    });
  });
  return out;
}

}  // namespace twostroke
