// Rotary position embedding and the store into the paged pool, in one pass over q, k and v.
#include "ops.h"
#include "scalar.h"
#include "work.h"

namespace twostroke {
namespace {

// to may be from. cos, sin [half].
template <typename T>
void rotate(const T* from, T* to, const float* cos, const float* sin, int64_t half, int64_t dim) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float x1 = widen(from[i]), x2 = widen(from[i + half]);
    to[i] = narrow<T>(x1 * cos[i] - x2 * sin[i]);
    to[i + half] = narrow<T>(x2 * cos[i] + x1 * sin[i]);
  }
  if (to != from) std::copy(from + 2 * half, from + dim, to + 2 * half);
}

template <typename T>
void rope_store_of(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos_sin, const Tensor& kv_layer, const int64_t* positions,
    const int64_t* slots) {
  const int64_t num_heads = q.size(1), num_kv_heads = k.size(1), dim = q.size(2), half = cos_sin.size(2);
  const int64_t block_size = kv_layer.size(3), block_stride = kv_layer.stride(0), value_offset = kv_layer.stride(1);
  const int64_t q_token = q.stride(0), q_head = q.stride(1), k_token = k.stride(0), k_head = k.stride(1), v_token = v.stride(0),
                v_head = v.stride(1);
  T *q_data = q.mutable_data_ptr<T>(), *pool = kv_layer.mutable_data_ptr<T>();
  const T *k_data = k.const_data_ptr<T>(), *v_data = v.const_data_ptr<T>();
  const float* table = cos_sin.const_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / ((num_heads + 2 * num_kv_heads) * dim));
  at::parallel_for(0, q.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *cos = table + positions[t] * 2 * half, *sin = cos + half;
      for (int64_t h = 0; h < num_heads; ++h) {
        T* head = q_data + t * q_token + h * q_head;
        rotate(head, head, cos, sin, half, dim);
      }
      T* slot = pool + slots[t] / block_size * block_stride + slots[t] % block_size * dim;
      for (int64_t h = 0; h < num_kv_heads; ++h, slot += block_size * dim) {
        const T* value = v_data + t * v_token + h * v_head;
        rotate(k_data + t * k_token + h * k_head, slot, cos, sin, half, dim);
        std::copy(value, value + dim, slot + value_offset);
      }
    }
  });
}

}  // namespace

void rope_store(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos_sin, const Tensor& kv_layer, const Tensor& positions,
    const Tensor& slots) {
  check_heads(q, kv_layer);
  check_heads(k, kv_layer);
  check_heads(v, kv_layer);
  TORCH_CHECK(cos_sin.is_contiguous() && 2 * cos_sin.size(2) <= q.size(2), "cos_sin must be contiguous [positions, 2, <= D / 2]");
  dispatch(q, [&](auto zero) {
    using T = decltype(zero);
    rope_store_of<T>(q, k, v, cos_sin, kv_layer, positions.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>());
  });
}

}  // namespace twostroke
