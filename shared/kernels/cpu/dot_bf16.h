// dot_rows for bfloat16 on both sides, with AVX512_BF16's instruction: 32 products of pairs at a time, summed in float32.
#pragma once

#include "loads.h"

namespace twostroke {

#ifdef __AVX512BF16__

constexpr bool kHasDotBf16 = true;

inline __m512bh load_pairs(const BFloat16* p) { return (__m512bh)_mm512_loadu_si512(p); }

inline __m512bh load_first_pairs(const BFloat16* p, int64_t count) {
  return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((uint32_t(1) << count) - 1), p);
}

template <int ROWS, int COLS>
inline void dot_tile_bf16(const BFloat16* x, const BFloat16* w, int64_t size, float* out, int64_t out_stride) {
  __m512 sums[ROWS][COLS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < COLS; ++j) sums[i][j] = _mm512_setzero_ps();
  const auto step = [&](const auto& load_at) {
    __m512bh left[ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) left[i] = load_at(x + i * size);
#pragma GCC unroll 8
    for (int j = 0; j < COLS; ++j) {
      const __m512bh right = load_at(w + j * size);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], left[i], right);
    }
  };
  constexpr int64_t lanes = 32;
  const int64_t whole = size / lanes * lanes;
  for (int64_t e = 0; e < whole; e += lanes) step([&](const BFloat16* p) { return load_pairs(p + e); });
  if (whole < size) step([&](const BFloat16* p) { return load_first_pairs(p + whole, size - whole); });
  for (int i = 0; i < ROWS; ++i) {
    const Lanes row[4] = {(Lanes)sums[i][0], (Lanes)sums[i][1 % COLS], (Lanes)sums[i][2 % COLS], (Lanes)sums[i][3 % COLS]};
    if constexpr (COLS == 4) {
      sum_lanes4(row, out + i * out_stride);
    } else {
      for (int j = 0; j < COLS; ++j) out[i * out_stride + j] = sum_lanes(row[j]);
    }
  }
}

template <int COLS>
inline void dot_cols_bf16(const BFloat16* x, int64_t rows, const BFloat16* w, int64_t size, float* out, int64_t out_stride) {
  int64_t i = 0;
  for (; rows - i >= 4; i += 4) dot_tile_bf16<4, COLS>(x + i * size, w, size, out + i * out_stride, out_stride);
  for (; i < rows; ++i) dot_tile_bf16<1, COLS>(x + i * size, w, size, out + i * out_stride, out_stride);
}

// x [rows, size], w [cols, size], both without gaps: out[i, j] = x_i . w_j
inline void dot_rows_bf16(
    const BFloat16* x, int64_t rows, const BFloat16* w, int64_t cols, int64_t size, float* out, int64_t out_stride) {
  int64_t j = 0;
  for (; cols - j >= 4; j += 4) dot_cols_bf16<4>(x, rows, w + j * size, size, out + j, out_stride);
  for (; j < cols; ++j) dot_cols_bf16<1>(x, rows, w + j * size, size, out + j, out_stride);
}

#else

constexpr bool kHasDotBf16 = false;

inline void dot_rows_bf16(const BFloat16*, int64_t, const BFloat16*, int64_t, int64_t, float*, int64_t) {}

#endif

}  // namespace twostroke
