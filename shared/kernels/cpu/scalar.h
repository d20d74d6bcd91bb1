// Numbers: narrow types as pairs of conversions, and the exponential. All but float8 branch-free, so that `#pragma omp simd` loops
// over them become vector code on any CPU. Everything between a widen and a narrow is float32.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "lanes.h"

namespace twostroke {

using c10::BFloat16;
using c10::Float8_e4m3fn;

inline float widen(float x) { return x; }
inline float widen(int8_t x) { return float(x); }
inline float widen(Float8_e4m3fn x) { return float(x); }
inline float widen(BFloat16 x) { return std::bit_cast<float>(uint32_t(x.x) << 16); }

template <typename T>
inline T narrow(float x);

template <>
inline float narrow<float>(float x) {
  return x;
}

// To nearest, ties to even; a NaN stays one.
template <>
inline BFloat16 narrow<BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return BFloat16(uint16_t((x == x ? rounded : (bits | 0x400000)) >> 16), BFloat16::from_bits());
}

// To nearest, ties to even, for |x| <= 127. Adding 1.5 * 2^23 leaves the whole number in the low bits of the mantissa.
template <>
inline int8_t narrow<int8_t>(float x) {
  return int8_t(std::bit_cast<uint32_t>(x + 12582912.0f));
}

// To nearest, ties to even, for |x| <= 448.
template <>
inline Float8_e4m3fn narrow<Float8_e4m3fn>(float x) {
  return Float8_e4m3fn(x);
}

template <typename F>
using BitsOf = std::conditional_t<std::is_same_v<F, float>, uint32_t, Bits>;

// exp(x) for x <= 0 within 1 ulp, of a float or of lanes; anything below -87 counts as -87, where the result is 1.6e-38.
// x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite's two-part reduction), a polynomial for exp(r), n into the exponent.
// Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits of the mantissa.
template <typename F>
inline F exp_nonpositive(F x) {
  constexpr float log2_e = 1.44269504f, ln2_high = 0.693145752f, ln2_low = 1.42860677e-6f, rounder = 12582912.0f;
  const F least = F{} - 87.0f;
  x = x < least ? least : x;
  const F shifted = x * log2_e + rounder;
  const F n = shifted - rounder;
  const F r = (x - n * ln2_high) - n * ln2_low;
  F p = F{} + 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return std::bit_cast<F>((std::bit_cast<BitsOf<F>>(shifted) << 23) + 0x3f800000u) * p;
}

inline float sigmoid(float x) {
  const float e = exp_nonpositive(x < 0 ? x : -x);
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

inline float tanh_of(float x) {
  const float e = exp_nonpositive(x < 0 ? 2 * x : -2 * x);
  const float t = (1.0f - e) / (1.0f + e);
  return x < 0 ? -t : t;
}

}  // namespace twostroke
