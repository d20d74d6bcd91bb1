// Rotary position embedding and the store into the paged pool, in one pass over q, k and v.
#include "ops.h"
#include "quantized.h"
#include "work.h"

namespace twostroke {
namespace {

// to may be from. cos, sin [half].
template <typename From, typename To>
void rotate(const From* from, To* to, const float* cos, const float* sin, int64_t half, int64_t dim) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float x1 = widen(from[i]), x2 = widen(from[i + half]);
    to[i] = narrow<To>(x1 * cos[i] - x2 * sin[i]);
    to[i + half] = narrow<To>(x2 * cos[i] + x1 * sin[i]);
  }
#pragma omp simd
  for (int64_t i = 2 * half; i < dim; ++i) to[i] = narrow<To>(widen(from[i]));
}

template <typename T, typename P>
void rope_store_of(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos_sin, const Tensor& kv, const std::optional<Tensor>& scales,
    const int64_t* positions, const int64_t* slots) {
  const int64_t num_heads = q.size(1), num_kv_heads = k.size(1), dim = q.size(2), half = cos_sin.size(2), block_size = kv.size(3);
  T* q_data = q.mutable_data_ptr<T>();
  const T *k_data = k.const_data_ptr<T>(), *v_data = v.const_data_ptr<T>();
  P* pool = kv.mutable_data_ptr<P>();
  float* scale_pool = scales ? scales->mutable_data_ptr<float>() : nullptr;
  const float* table = cos_sin.const_data_ptr<float>();
  const auto store = [&](int64_t t, int64_t h, const float* cos, const float* sin, float* wide) {
    const T *key = k_data + t * k.stride(0) + h * k.stride(1), *value = v_data + t * v.stride(0) + h * v.stride(1);
    const int64_t block = slots[t] / block_size, token = slots[t] % block_size;
    P* to = pool + block * kv.stride(0) + h * kv.stride(2) + token * dim;
    if constexpr (kIsScaled<P>) {
      float* scale = scale_pool + block * scales->stride(0) + h * scales->stride(2) + token;
      rotate(key, wide, cos, sin, half, dim);
      *scale = quantize(wide, dim, to);
      rotate(value, wide, cos, sin, 0, dim);
      scale[scales->stride(1)] = quantize(wide, dim, to + kv.stride(1));
    } else {
      rotate(key, to, cos, sin, half, dim);
      std::copy(value, value + dim, to + kv.stride(1));
    }
  };
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / ((num_heads + 2 * num_kv_heads) * dim));
  at::parallel_for(0, q.size(0), grain, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* wide = scratch.at_least(dim);
    for (int64_t t = begin; t < end; ++t) {
      const float *cos = table + positions[t] * 2 * half, *sin = cos + half;
      for (int64_t h = 0; h < num_heads; ++h) {
        T* head = q_data + t * q.stride(0) + h * q.stride(1);
        rotate(head, head, cos, sin, half, dim);
      }
      for (int64_t h = 0; h < num_kv_heads; ++h) store(t, h, cos, sin, wide);
    }
  });
}

}  // namespace

void rope_store(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos_sin, const Tensor& kv, const std::optional<Tensor>& scales,
    const Tensor& positions, const Tensor& slots) {
  for (const Tensor& heads : {q, k, v}) check_pool(kv, scales, heads);
  TORCH_CHECK(cos_sin.is_contiguous() && 2 * cos_sin.size(2) <= q.size(2), "cos_sin must be contiguous [positions, 2, <= D / 2]");
  dispatch(q, kv, [&](auto zero, auto stored_zero) {
    rope_store_of<decltype(zero), decltype(stored_zero)>(
        q, k, v, cos_sin, kv, scales, positions.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>());
  });
}

}  // namespace twostroke
