// Register-blocked products of a few float32 rows with numbers of any type as they lie in memory, which are read once:
//
//   dot_rows       out[i, j]  = a[i, :] . b[j, :]           both contiguous along the sum (queries x keys)
//   add_products   c[i, :]   += sum_j a[i, j] * b[j, :]     b contiguous along the result (probabilities x values)
//
// What runs along a row of b is in slots of pairs (loads.h): `a` of dot_rows, `c` of add_products. Meanwhile `ahead`, of b's shape,
// is fetched, to the second-level cache: its queue of outstanding reads is longer than the first one's.
#pragma once

#include <type_traits>

#include "groups.h"
#include "loads.h"

namespace twostroke {

// A tile needs all registers: inlined, it would share them with its surroundings and keep sums in memory. For the same reason every
// loop over sums is unrolled, also the first and the last.
#define TWOSTROKE_OWN_REGISTERS static __attribute__((noinline))

constexpr int kTileRows = 4;

// About eight sums are under way, so that none waits for the one before it.
constexpr int dot_cols(int rows) { return rows == 1 ? 8 : rows == 4 ? 2 : 4; }
constexpr int product_pairs(int rows) { return rows == 1 ? 4 : rows == 4 ? 1 : 2; }

template <typename B>
inline void fetch(const B* p) {
  __builtin_prefetch(p, 0, 2);
}

template <int ROWS, int COLS, typename B>
TWOSTROKE_OWN_REGISTERS void dot_tile(
    const float* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t size, const B* ahead, float* out, int64_t out_stride) {
  Lanes sums[ROWS * COLS] = {};
  const auto half_step = [&](auto half, int64_t e, const auto& load_b) __attribute__((always_inline)) {
    Lanes left[ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) left[i] = at(a + i * a_stride + e + half() * kLanes);
#pragma GCC unroll 8
    for (int j = 0; j < COLS; ++j) {
      const Lanes right = load_b(half, b + j * b_stride + e);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) sums[i * COLS + j] += left[i] * right;
    }
  };
  const auto step = [&](int64_t e, const auto& load_b) __attribute__((always_inline)) {
    half_step(std::integral_constant<int, 0>(), e, load_b);
    half_step(std::integral_constant<int, 1>(), e, load_b);
  };
  const int64_t whole = size / kPair * kPair;
  for (int64_t e = 0; e < whole; e += kPair) {
#pragma GCC unroll 8
    for (int j = 0; j < COLS; ++j) fetch(ahead + j * b_stride + e);
    step(e, [](auto half, const B* p) __attribute__((always_inline)) { return load_half<half()>(p); });
  }
  if (whole < size)
    step(whole, [&](auto half, const B* p) { return load_half<half()>(FirstOfPair<B>(p, size - whole).numbers); });
  if constexpr (COLS > 1) {
    float totals[ROWS * COLS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS * COLS; i += 4) sum_lanes4(sums + i, totals + i);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) std::memcpy(out + i * out_stride, totals + i * COLS, COLS * sizeof(float));
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) out[i * out_stride] = sum_lanes(sums[i]);
  }
}

template <int ROWS, typename B>
inline void dot_some_rows(
    const float* a, int64_t a_stride, const B* b, int64_t cols, int64_t b_stride, int64_t size, const B* ahead, float* out,
    int64_t out_stride) {
  constexpr int at_once = dot_cols(ROWS);
  int64_t j = 0;
  for (; cols - j >= at_once; j += at_once)
    dot_tile<ROWS, at_once>(a, a_stride, b + j * b_stride, b_stride, size, ahead + j * b_stride, out + j, out_stride);
  for (; j < cols; ++j) dot_tile<ROWS, 1>(a, a_stride, b + j * b_stride, b_stride, size, ahead + j * b_stride, out + j, out_stride);
}

template <int ROWS, int PAIRS, typename B>
TWOSTROKE_OWN_REGISTERS void product_tile(
    const float* a, int64_t a_stride, int64_t depth, const B* b, int64_t b_stride, const B* ahead, float* c, int64_t c_stride) {
  Lanes sums[ROWS][2 * PAIRS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * PAIRS; ++v) sums[i][v] = at(c + i * c_stride + v * kLanes);
  for (int64_t j = 0; j < depth; ++j) {
    Lanes left[ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) left[i] = Lanes{} + a[i * a_stride + j];
#pragma GCC unroll 8
    for (int v = 0; v < 2 * PAIRS; ++v) {
      const B* from = b + j * b_stride + v / 2 * kPair;
      if (v % 2 == 0) fetch(ahead + j * b_stride + v / 2 * kPair);
      const Lanes right = v % 2 == 0 ? load_half<0>(from) : load_half<1>(from);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) sums[i][v] += left[i] * right;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * PAIRS; ++v) at(c + i * c_stride + v * kLanes) = sums[i][v];
}

template <int ROWS, typename B>
inline void product_some_rows(
    const float* a, int64_t a_stride, int64_t depth, const B* b, int64_t b_stride, int64_t width, const B* ahead, float* c,
    int64_t c_stride) {
  constexpr int at_once = product_pairs(ROWS);
  int64_t d = 0;
  for (; width - d >= at_once * kPair; d += at_once * kPair)
    product_tile<ROWS, at_once>(a, a_stride, depth, b + d, b_stride, ahead + d, c + d, c_stride);
  for (; width - d >= kPair; d += kPair) product_tile<ROWS, 1>(a, a_stride, depth, b + d, b_stride, ahead + d, c + d, c_stride);
  for (int64_t j = 0; d < width && j < depth; ++j) {
    const FirstOfPair<B> last(b + j * b_stride + d, width - d);
    for (int i = 0; i < ROWS; ++i)
      product_tile<1, 1>(a + i * a_stride + j, a_stride, 1, last.numbers, 0, last.numbers, c + i * c_stride + d, c_stride);
  }
}

// body(rows as a constant, first row) for each group of rows.
template <typename Body>
inline void for_each_tile_row(int64_t rows, const Body& body) {
  const Groups groups(rows, kTileRows);
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t first = groups.start(g);
    switch (groups.size(g)) {
      case 1: body(std::integral_constant<int, 1>(), first); break;
      case 2: body(std::integral_constant<int, 2>(), first); break;
      case 3: body(std::integral_constant<int, 3>(), first); break;
      default: body(std::integral_constant<int, 4>(), first);
    }
  }
}

template <typename B>
inline void dot_rows(
    const float* a, int64_t rows, int64_t a_stride, const B* b, int64_t cols, int64_t b_stride, int64_t size, const B* ahead,
    float* out, int64_t out_stride) {
  for_each_tile_row(rows, [&](auto few, int64_t first) {
    dot_some_rows<few()>(a + first * a_stride, a_stride, b, cols, b_stride, size, ahead, out + first * out_stride, out_stride);
  });
}

template <typename B>
inline void add_products(
    const float* a, int64_t rows, int64_t a_stride, int64_t depth, const B* b, int64_t b_stride, int64_t width, const B* ahead,
    float* c, int64_t c_stride) {
  for_each_tile_row(rows, [&](auto few, int64_t first) {
    product_some_rows<few()>(
        a + first * a_stride, a_stride, depth, b, b_stride, width, ahead, c + first * c_stride, c_stride);
  });
}

}  // namespace twostroke
