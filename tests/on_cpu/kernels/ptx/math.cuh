// Single instructions, by the C library. Those that flush subnormal numbers to zero do so.
#pragma once

#include "gpu.h"

namespace sage::ptx {

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float ex2(float x) { return flushed(std::exp2(flushed(x))); }
inline float lg2(float x) { return std::log2(flushed(x)); }
inline float sqrt(float x) { return std::sqrt(flushed(x)); }
inline float rcp(float x) { return flushed(1.0f / flushed(x)); }
inline float max_nan(float x, float y) { return x != x || y != y ? NAN : std::max(x, y); }
inline float min_nan(float x, float y) { return x != x || y != y ? NAN : std::min(x, y); }
inline float divide(float x, float y) { return __fdividef(x * 0.25f, y * 0.25f); }
template <typename T>
void keep(T&) {}
inline int lane_here() { return threadIdx.x % 32; }

}  // namespace sage::ptx
