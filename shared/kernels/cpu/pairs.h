// Products of bfloat16 rows with bfloat16 weights, two inputs at a time: the instruction of AVX512_BF16, and the same in plain lanes.
//
//   pair           a row's numbers 2k and 2k + 1, in one 32-bit word as they lie in memory
//   panel          kPairPanel outputs' weights for all inputs: [pairs][kPairPanel] words, so that one pass reads memory in one run and
//                  each weight is loaded once for all rows of a group; the last pair of an odd size and the last panel end with 0
//   group          up to kMaxPairRows rows of x, wherever their pairs lie in memory
//
// A tile keeps a group's sums for one panel in registers over all inputs. Each sum adds its pairs in order, whatever the group: a row
// gets the same bits with any number of others.
#pragma once

#include <array>
#include <utility>

#include "loads.h"

namespace twostroke {

constexpr int kPairVectors = 3;  // of sums per row: 8 rows of 3, their weights and a pair of x fill 28 of 32 registers
constexpr int64_t kPairPanel = kPairVectors * kLanes;
constexpr int kMaxPairRows = 8;

typedef Bits BitsAt __attribute__((aligned(4), may_alias));

// sums + the two products of each lane. The instruction adds the odd products, then the even ones, and so does the other branch; the
// instruction also takes subnormal numbers as 0.
inline Lanes add_pairs(Lanes sums, Bits left, Bits right) {
#ifdef __AVX512BF16__
  return (Lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)left, (__m512bh)right);
#else
  sums += std::bit_cast<Lanes>(left & 0xffff0000u) * std::bit_cast<Lanes>(right & 0xffff0000u);
  sums += std::bit_cast<Lanes>(left << 16) * std::bit_cast<Lanes>(right << 16);
  return sums;
#endif
}

// Pairs of two numbers of each lane, rounded as narrow<BFloat16> does.
inline Bits narrow_to_pairs(Lanes even, Lanes odd) {
  const auto rounded = [](Lanes x) {
    const Bits bits = std::bit_cast<Bits>(x);
    return x == x ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
  };
  return (rounded(even) >> 16) | (rounded(odd) & 0xffff0000u);
}

inline uint32_t pair_at(const BFloat16* p) {
  uint32_t pair;
  std::memcpy(&pair, p, sizeof(pair));
  return pair;
}

// sums [ROWS, kPairPanel] = the products of ROWS rows of x with one panel; with `add` they go on. Meanwhile the weights that lie
// `ahead` words after those used come nearer; 0 where nothing is to come.
template <int ROWS>
void pair_tile(
    const BFloat16* x, int64_t row_stride, int64_t pair_stride, const uint32_t* panel, int64_t num_pairs, int64_t ahead, bool add,
    float* sums) {
  Lanes total[ROWS][kPairVectors];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kPairVectors; ++v) total[i][v] = add ? at(sums + i * kPairPanel + v * kLanes) : Lanes{};
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    const uint32_t* weights = panel + k * kPairPanel;
    Bits right[kPairVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPairVectors; ++v) right[v] = *reinterpret_cast<const BitsAt*>(weights + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Bits left = Bits{} + pair_at(x + i * row_stride + k * pair_stride);
#pragma GCC unroll 4
      for (int v = 0; v < kPairVectors; ++v) total[i][v] = add_pairs(total[i][v], left, right[v]);
    }
  };
  if (ahead == 0) {
    for (int64_t k = 0; k < num_pairs; ++k) step(k);
  } else {
    for (int64_t k = 0; k < num_pairs; ++k) {
#pragma GCC unroll 4
      for (int v = 0; v < kPairVectors; ++v) __builtin_prefetch(panel + k * kPairPanel + ahead + v * kLanes, 0, 2);
      step(k);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < kPairVectors; ++v) at(sums + i * kPairPanel + v * kLanes) = total[i][v];
}

using PairTile = void (*)(const BFloat16*, int64_t, int64_t, const uint32_t*, int64_t, int64_t, bool, float*);

template <int... R>
constexpr std::array<PairTile, sizeof...(R)> pair_tiles_for(std::integer_sequence<int, R...>) {
  return {&pair_tile<R + 1>...};
}

// pair_tile by the number of rows less one.
constexpr auto kPairTiles = pair_tiles_for(std::make_integer_sequence<int, kMaxPairRows>());

}  // namespace twostroke
