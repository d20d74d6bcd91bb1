// The compiler's own vectors, as wide as the CPU's registers. They work on any CPU, and unlike arrays of a class around one, arrays
// of them stay in registers.
#pragma once

#include <cstdint>

namespace twostroke {

#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t kLanes = 16;
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int64_t kPair = 2 * kLanes;

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef Lanes LanesAt __attribute__((aligned(4), may_alias));
typedef Ints IntsAt __attribute__((aligned(4), may_alias));

inline const LanesAt& at(const float* p) { return *reinterpret_cast<const LanesAt*>(p); }
inline LanesAt& at(float* p) { return *reinterpret_cast<LanesAt*>(p); }
inline const IntsAt& at(const int32_t* p) { return *reinterpret_cast<const IntsAt*>(p); }

}  // namespace twostroke
