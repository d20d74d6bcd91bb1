// Register-blocked products of small row-major matrices, from at::vec: eight floats at a time on AVX2, sixteen on AVX-512, four
// on NEON. The left side is float32, the right side any type that `load` widens.
//
//   dot_rows       out[i, j]  = a[i, :] . b[j, :]           both contiguous along the sum (queries x keys, inputs x weights)
//   add_products   c[i, :]   += sum_j a[i, j] * b[j, :]     b contiguous along the result (probabilities x values)
//
// A tile keeps ROWS x COLS sums in registers (12 of AVX2's 16), so that each value loaded is used several times.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include "scalar.h"

namespace twostroke {

// A tile needs all registers: inlined, it would share them with its surroundings and keep sums in memory. For the same reason every
// loop over sums is unrolled, also the first and the last.
#define TWOSTROKE_OWN_REGISTERS static __attribute__((noinline))

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

inline Vec load(const float* p) { return Vec::loadu(p); }

// For CPUs that no branch below is for.
template <typename B>
inline Vec load_each(const B* p) {
  float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = widen(p[i]);
  return Vec::loadu(lanes);
}

inline Vec load(const BFloat16* p) {
  Vec v;
  at::vec::load_fp32_from_bf16(p, v);
  return v;
}

inline Vec load(const int8_t* p) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return load_each(p);
#endif
}

// float8_e4m3fn has float16's layout with one exponent bit less: moved there it is too small by 2^8, subnormals included. Its NaN
// would become 480, but no pool holds one (see quantized.h).
inline Vec load(const Float8_e4m3fn* p) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8);
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(wide, 1), _mm256_set1_epi16(int16_t(0xbfff)));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i wide = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i half = _mm_and_si128(_mm_srai_epi16(wide, 1), _mm_set1_epi16(int16_t(0xbfff)));
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
#else
  return load_each(p);
#endif
}

// to[i] = from[i] * factor.
template <typename B>
inline void widen_run(const B* from, int64_t count, float factor, float* to) {
  int64_t i = 0;
  for (; count - i >= kLanes; i += kLanes) (load(from + i) * Vec(factor)).store(to + i);
  for (; i < count; ++i) to[i] = widen(from[i]) * factor;
}

// The first n lanes, the others 0: never reads past the end.
template <typename T>
inline Vec load_first(const T* p, int64_t n) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = widen(p[i]);
  return Vec::loadu(lanes);
}

inline float sum_lanes(Vec v) {
  return at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, v);
}

// The lane sums of four vectors.
inline void sum_lanes4(const Vec* v, float* out) {
#if defined(CPU_CAPABILITY_AVX512)
  __m256 h[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 x = v[i];
    h[i] = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256 h[4] = {v[0], v[1], v[2], v[3]};
#endif
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  const __m256 quads = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum_lanes(v[i]);
#endif
}

template <int ROWS, int COLS, typename B>
TWOSTROKE_OWN_REGISTERS void dot_tile(
    const float* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t size, float* out, int64_t out_stride) {
  Vec sums[ROWS][COLS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < COLS; ++j) sums[i][j] = Vec(0.0f);
  const auto step = [&](const auto& load_at) __attribute__((always_inline)) {
    Vec left[ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) left[i] = load_at(a + i * a_stride);
#pragma GCC unroll 8
    for (int j = 0; j < COLS; ++j) {
      const Vec right = load_at(b + j * b_stride);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) sums[i][j] = at::vec::fmadd(left[i], right, sums[i][j]);
    }
  };
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t e = 0; e < whole; e += kLanes) step([&](const auto* p) { return load(p + e); });
  if (whole < size) step([&](const auto* p) { return load_first(p + whole, size - whole); });
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) {
    if constexpr (COLS == 4) {
      sum_lanes4(sums[i], out + i * out_stride);
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < COLS; ++j) out[i * out_stride + j] = sum_lanes(sums[i][j]);
    }
  }
}

template <int COLS, typename B>
inline void dot_cols(
    const float* a, int64_t rows, int64_t a_stride, const B* b, int64_t b_stride, int64_t size, float* out, int64_t out_stride) {
  int64_t i = 0;
  // Four rows as 2 + 2: 3 + 1 would load the right side as often, for less work in between.
  for (; rows - i >= 3 && rows - i != 4; i += 3)
    dot_tile<3, COLS>(a + i * a_stride, a_stride, b, b_stride, size, out + i * out_stride, out_stride);
  for (; rows - i >= 2; i += 2)
    dot_tile<2, COLS>(a + i * a_stride, a_stride, b, b_stride, size, out + i * out_stride, out_stride);
  for (; i < rows; ++i)
    dot_tile<1, COLS>(a + i * a_stride, a_stride, b, b_stride, size, out + i * out_stride, out_stride);
}

template <typename B>
inline void dot_rows(
    const float* a, int64_t rows, int64_t a_stride, const B* b, int64_t cols, int64_t b_stride, int64_t size, float* out,
    int64_t out_stride) {
  int64_t j = 0;
  for (; cols - j >= 4; j += 4) dot_cols<4>(a, rows, a_stride, b + j * b_stride, b_stride, size, out + j, out_stride);
  for (; j < cols; ++j) dot_cols<1>(a, rows, a_stride, b + j * b_stride, b_stride, size, out + j, out_stride);
}

template <int ROWS, int VECS, typename B>
TWOSTROKE_OWN_REGISTERS void product_tile(
    const float* a, int64_t a_stride, int64_t depth, const B* b, int64_t b_stride, float* c, int64_t c_stride) {
  Vec sums[ROWS][VECS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) sums[i][v] = Vec::loadu(c + i * c_stride + v * kLanes);
  // The shorter side stays in registers while the longer one passes by: both together would not fit beside the sums.
  for (int64_t j = 0; j < depth; ++j) {
    const B* from = b + j * b_stride;
    if constexpr (ROWS < VECS) {
      Vec left[ROWS];
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) left[i] = Vec(a[i * a_stride + j]);
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) {
        const Vec right = load(from + v * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) sums[i][v] = at::vec::fmadd(left[i], right, sums[i][v]);
      }
    } else {
      Vec right[VECS];
#pragma GCC unroll 8
      for (int v = 0; v < VECS; ++v) right[v] = load(from + v * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const Vec left(a[i * a_stride + j]);
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) sums[i][v] = at::vec::fmadd(left, right[v], sums[i][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < VECS; ++v) sums[i][v].store(c + i * c_stride + v * kLanes);
}

template <int ROWS, int VECS, typename B>
inline void product_rows(
    const float* a, int64_t a_stride, int64_t depth, const B* b, int64_t b_stride, int64_t width, float* c, int64_t c_stride) {
  int64_t d = 0;
  for (; width - d >= VECS * kLanes; d += VECS * kLanes)
    product_tile<ROWS, VECS>(a, a_stride, depth, b + d, b_stride, c + d, c_stride);
  for (; width - d >= kLanes; d += kLanes) product_tile<ROWS, 1>(a, a_stride, depth, b + d, b_stride, c + d, c_stride);
  for (int64_t last = width; d < last; ++d)
    for (int i = 0; i < ROWS; ++i) {
      float sum = c[i * c_stride + d];
      for (int64_t j = 0; j < depth; ++j) sum += a[i * a_stride + j] * widen(b[j * b_stride + d]);
      c[i * c_stride + d] = sum;
    }
}

template <typename B>
inline void add_products(
    const float* a, int64_t rows, int64_t a_stride, int64_t depth, const B* b, int64_t b_stride, int64_t width, float* c,
    int64_t c_stride) {
  int64_t i = 0;
  for (; rows - i >= 6; i += 6)
    product_rows<6, 2>(a + i * a_stride, a_stride, depth, b, b_stride, width, c + i * c_stride, c_stride);
  if (rows - i == 4) {
    product_rows<4, 2>(a + i * a_stride, a_stride, depth, b, b_stride, width, c + i * c_stride, c_stride);
    return;
  }
  for (; rows - i >= 3; i += 3)
    product_rows<3, 4>(a + i * a_stride, a_stride, depth, b, b_stride, width, c + i * c_stride, c_stride);
  for (; rows - i >= 2; i += 2)
    product_rows<2, 4>(a + i * a_stride, a_stride, depth, b, b_stride, width, c + i * c_stride, c_stride);
  for (; i < rows; ++i)
    product_rows<1, 8>(a + i * a_stride, a_stride, depth, b, b_stride, width, c + i * c_stride, c_stride);
}

}  // namespace twostroke
