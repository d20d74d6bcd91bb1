// One-byte types of the KV pool: a scale per token and head (shared/kernels/kv_layout.py), and how a token is stored.
#pragma once

#include <limits>

#include "scalar.h"

namespace twostroke {

// 0: not a one-byte type, and without scales.
template <typename P>
constexpr float kLargestStored = 0.0f;
template <>
inline constexpr float kLargestStored<int8_t> = 127.0f;
template <>
inline constexpr float kLargestStored<Float8_e4m3fn> = 448.0f;

template <typename P>
constexpr bool kIsScaled = kLargestStored<P> > 0.0f;

// The bits of the largest magnitude: as whole numbers, magnitudes are in order, infinity is above all of them and NaN above that.
inline uint32_t largest_bits(const float* x, int64_t size) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Stores one head of one token; returns its scale.
template <typename P>
inline float quantize(const float* x, int64_t size, P* to) {
  constexpr uint32_t infinity = 0x7f800000;
  const uint32_t largest = largest_bits(x, size);
  if (largest >= infinity) {
    for (int64_t i = 0; i < size; ++i) to[i] = narrow<P>(0.0f);
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float needed = std::bit_cast<float>(largest) / kLargestStored<P>, smallest = std::numeric_limits<float>::min();
  const float scale = needed > smallest ? needed : smallest;
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) to[i] = narrow<P>(x[i] / scale);
  return scale;
}

}  // namespace twostroke
