// Single instructions, by the C library.
#pragma once

#include "gpu.h"

namespace sage::ptx {

inline float ex2(float x) { return std::exp2(x); }
inline float lg2(float x) { return std::log2(x); }
inline float sqrt(float x) { return std::sqrt(x); }
inline float max_nan(float x, float y) { return x != x || y != y ? NAN : std::max(x, y); }
inline float min_nan(float x, float y) { return x != x || y != y ? NAN : std::min(x, y); }
inline float divide(float x, float y) { return x / y; }
template <typename T>
void keep(T&) {}

}  // namespace sage::ptx
