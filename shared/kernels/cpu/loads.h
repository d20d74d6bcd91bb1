// From memory to lanes of float32, and sums across lanes.
//
// A pair of vectors is loaded half by half. Of a pair of bfloat16 the halves are the even and the odd numbers, since then one load
// serves both and they widen in place: slot j of a pair is the number at pair_index(j). Of other types the halves are in order.
#pragma once

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#include <immintrin.h>
#endif

#include <cstring>

#include "lanes.h"
#include "scalar.h"

namespace twostroke {

// Vectors in order

inline Lanes load(const float* p) { return at(p); }

// For CPUs that no branch below is for.
template <typename B>
inline Lanes load_each(const B* p) {
  float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = widen(p[i]);
  return at(lanes);
}

inline Lanes load(const BFloat16* p) {
#if defined(CPU_CAPABILITY_AVX512)
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#elif defined(CPU_CAPABILITY_AVX2)
  return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  return load_each(p);
#endif
}

inline Lanes load(const int8_t* p) {
#if defined(CPU_CAPABILITY_AVX512)
  return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(CPU_CAPABILITY_AVX2)
  return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return load_each(p);
#endif
}

// float8_e4m3fn has float16's layout with one exponent bit less: moved there it is too small by 2^8, subnormals included. Its NaN
// would become 480, but no pool holds one (see quantized.h).
inline Lanes load(const Float8_e4m3fn* p) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8);
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(wide, 1), _mm256_set1_epi16(int16_t(0xbfff)));
  return (Lanes)_mm512_cvtph_ps(half) * 256.0f;
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i wide = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i half = _mm_and_si128(_mm_srai_epi16(wide, 1), _mm_set1_epi16(int16_t(0xbfff)));
  return (Lanes)_mm256_cvtph_ps(half) * 256.0f;
#else
  return load_each(p);
#endif
}

// to[i] = from[i] * factor.
template <typename B>
inline void widen_run(const B* from, int64_t count, float factor, float* to) {
  int64_t i = 0;
  for (; count - i >= kLanes; i += kLanes) at(to + i) = load(from + i) * factor;
  for (; i < count; ++i) to[i] = widen(from[i]) * factor;
}

// Pairs

template <int HALF, typename B>
inline Lanes load_half(const B* p) {
  return load(p + HALF * kLanes);
}

template <int HALF>
inline Lanes load_half(const BFloat16* p) {
  typedef Bits BitsAt __attribute__((aligned(2), may_alias));
  const Bits pairs = *reinterpret_cast<const BitsAt*>(p);
  return std::bit_cast<Lanes>(HALF == 0 ? pairs << 16 : pairs & 0xffff0000u);
}

template <typename B>
constexpr int64_t pair_index(int64_t slot) {
  return std::is_same_v<B, BFloat16> ? slot % kLanes * 2 + slot / kLanes : slot;
}

constexpr int64_t padded_to_pairs(int64_t count) { return (count + kPair - 1) / kPair * kPair; }

// Numbers in order, to the slots that they have when pairs of B are loaded; the last pair is filled with 0.
template <typename B>
inline void to_slots(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kPair)
    for (int64_t slot = 0; slot < kPair; ++slot) {
      const int64_t index = i + pair_index<B>(slot);
      to[i + slot] = index < count ? from[index] : 0.0f;
    }
}

template <typename B>
inline void from_slots(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kPair)
    for (int64_t slot = 0; slot < kPair; ++slot) {
      const int64_t index = i + pair_index<B>(slot);
      if (index < count) to[index] = from[i + slot];
    }
}

// The first `count` numbers of a pair, the others 0: for where reading more would read past the end.
template <typename B>
struct FirstOfPair {
  B numbers[kPair];

  FirstOfPair(const B* p, int64_t count) {
    std::memset(static_cast<void*>(numbers), 0, sizeof(numbers));
    std::memcpy(static_cast<void*>(numbers), p, count * sizeof(B));
  }
};

// Sums across lanes

inline float sum_lanes(Lanes v) {
  float sum = 0.0f;
  for (int64_t i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// Of four vectors.
inline void sum_lanes4(const Lanes* v, float* out) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  __m256 h[4];
  for (int i = 0; i < 4; ++i) {
#if defined(CPU_CAPABILITY_AVX512)
    h[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[i]), _mm512_extractf32x8_ps((__m512)v[i], 1));
#else
    h[i] = (__m256)v[i];
#endif
  }
  const __m256 quads = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum_lanes(v[i]);
#endif
}

}  // namespace twostroke
