// What both attention kernels share: the call as raw pointers, and the walk over a sequence's paged keys.
//
// A KV head's G = Hq / Hkv query heads read the same keys, so each key and value is loaded once for all of them: "rows" below
// are pairs of query and head that share a KV head.
#pragma once

#include <algorithm>
#include <cstdint>

#include "quantized.h"

namespace twostroke {

// [NB, 2, Hkv, BS, ...] of a layer's view of the pool.
template <typename E>
struct Paged {
  const E* data;
  int64_t block_stride, value_offset, head_stride, token_stride;

  const E* at(int64_t block, int64_t kv_head, int64_t token) const {
    return data + block * block_stride + kv_head * head_stride + token * token_stride;
  }
};

// T is what queries and results are of, P what the pool holds.
template <typename T, typename P>
struct Attention {
  const T* q;  // [T, Hq, D]
  int64_t q_token_stride, q_head_stride;
  Paged<P> kv;
  Paged<float> scales;  // without data unless kIsScaled<P>
  T* out;  // [T, Hq, D]
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  int64_t table_stride;
  int64_t num_sequences, num_single;
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t window;  // 0: all keys
  float scale, softcap;  // softcap 0: none

  int64_t group() const { return num_heads / num_kv_heads; }

  int64_t num_queries(int64_t sequence) const { return query_starts[sequence + 1] - query_starts[sequence]; }

  // The first key that the query at `position` sees.
  int64_t first_key(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }

  // One head's keys from `position` on, as many as lie in its block. Its values are `kv.value_offset` further.
  const P* keys(int64_t sequence, int64_t position, int64_t kv_head) const {
    return kv.at(block_of(sequence, position), kv_head, position % block_size);
  }

  // Likewise what each key is to be multiplied by; for values, `scales.value_offset` further.
  const float* key_scales(int64_t sequence, int64_t position, int64_t kv_head) const {
    return scales.at(block_of(sequence, position), kv_head, position % block_size);
  }

  int64_t block_of(int64_t sequence, int64_t position) const {
    return block_tables[sequence * table_stride + position / block_size];
  }

  // The scaled query, in float32.
  void load_query(int64_t token, int64_t head, float* to) const {
    const T* from = q + token * q_token_stride + head * q_head_stride;
#pragma omp simd
    for (int64_t d = 0; d < head_dim; ++d) to[d] = widen(from[d]) * scale;
  }

  void store_output(int64_t token, int64_t head, const float* mixed, float factor) const {
    T* to = out + (token * num_heads + head) * head_dim;
#pragma omp simd
    for (int64_t d = 0; d < head_dim; ++d) to[d] = narrow<T>(mixed[d] * factor);
  }

  void cap(float* scores, int64_t count) const {
    if (softcap == 0.0f) return;
    const float inverse = 1.0f / softcap, cap = softcap;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) scores[i] = cap * tanh_of(scores[i] * inverse);
  }
};

template <typename T, typename P>
void attend_singles(const Attention<T, P>& call);

template <typename T, typename P>
void attend_chunks(const Attention<T, P>& call);

#define TWOSTROKE_FOR_EACH_POOL(INSTANTIATE) \
  INSTANTIATE(float, float)                  \
  INSTANTIATE(float, int8_t)                 \
  INSTANTIATE(float, Float8_e4m3fn)          \
  INSTANTIATE(BFloat16, BFloat16)            \
  INSTANTIATE(BFloat16, int8_t)              \
  INSTANTIATE(BFloat16, Float8_e4m3fn)

}  // namespace twostroke
