// Weights in the order in which a product reads them, and the innermost loop over them.
//
//   panel      kPanel outputs' weights for all inputs: [E_in][kPanel], so that one pass reads memory in one run and each weight is
//              loaded once for all rows of a group. A weight [E_out, E_in] is ceil(E_out / kPanel) panels, the last filled with 0
//              (bfloat16 so that it is loaded in order: output j of a panel lies at pair_index(j), see loads.h)
//   group      up to kMaxRows rows of x, input by input
//
// A tile keeps a group's sums for one or a few panels in registers. Each sum adds its products in the order of the inputs, whatever
// the group: a row gets the same bits with any number of others.
#pragma once

#include <array>
#include <utility>

#include "groups.h"
#include "loads.h"

namespace twostroke {

constexpr int64_t kPanel = kPair;

// Sums of a group and two vectors of weights fill the registers: 16 of AVX2, 32 of AVX-512 and NEON.
#if defined(CPU_CAPABILITY_AVX2)
constexpr int kMaxRows = 6;
#else
constexpr int kMaxRows = 12;
#endif

// Few rows take several panels at once: a sum waits for the one before it, so about eight must be under way.
constexpr int panels_at_once(int rows) { return rows < 4 ? 4 / rows : 1; }

// sums [ROWS, PANELS * kPanel] = the products of x [depth, ROWS] with `depth` inputs of PANELS panels; with `add` they go on.
// Meanwhile the weights that lie `ahead` of those used come nearer: alone, the hardware does not keep enough reads under way.
template <int ROWS, int PANELS, typename T>
void panel_tile(
    const float* x, int64_t x_stride, const T* panels, int64_t panel_stride, int64_t depth, int64_t ahead, bool add, float* sums,
    int64_t sums_stride) {
  Lanes total[ROWS][PANELS][2];
  const auto sum_at = [&](int i, int p, int half) -> LanesAt& {
    return at(sums + i * sums_stride + p * kPanel + half * kLanes);
  };
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) total[i][p][half] = add ? sum_at(i, p, half) : Lanes{};
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p) {
      const T* weights = panels + p * panel_stride + k * kPanel;
      __builtin_prefetch(weights + ahead, 0, 2);
      const Lanes low = load_half<0>(weights), high = load_half<1>(weights);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) {
        const float left = x[k * x_stride + i];
        total[i][p][0] += left * low;
        total[i][p][1] += left * high;
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) sum_at(i, p, half) = total[i][p][half];
}

// The same for any number of panels, as many at once as the registers like.
template <int ROWS, typename T>
void panel_tiles(
    const float* x, int64_t x_stride, const T* panels, int64_t panel_stride, int64_t num_panels, int64_t depth, int64_t ahead,
    bool add, float* sums, int64_t sums_stride) {
  constexpr int at_once = panels_at_once(ROWS);
  int64_t p = 0;
  for (; num_panels - p >= at_once; p += at_once)
    panel_tile<ROWS, at_once>(
        x, x_stride, panels + p * panel_stride, panel_stride, depth, ahead, add, sums + p * kPanel, sums_stride);
  for (; p < num_panels; ++p)
    panel_tile<ROWS, 1>(x, x_stride, panels + p * panel_stride, panel_stride, depth, ahead, add, sums + p * kPanel, sums_stride);
}

template <typename T>
using PanelTiles = void (*)(const float*, int64_t, const T*, int64_t, int64_t, int64_t, int64_t, bool, float*, int64_t);

template <typename T, int... R>
constexpr std::array<PanelTiles<T>, sizeof...(R)> panel_tiles_for(std::integer_sequence<int, R...>) {
  return {&panel_tiles<R + 1, T>...};
}

// panel_tiles by the number of rows less one.
template <typename T>
constexpr auto kPanelTiles = panel_tiles_for<T>(std::make_integer_sequence<int, kMaxRows>());

}  // namespace twostroke
