// Of CUDA's header what kernels use.
#pragma once

#include "gpu.h"

struct __half { _Float16 x; };
struct alignas(4) __half2 { _Float16 x, y; };

template <typename Op>
__half2 each(__half2 a, __half2 b, const Op& op) {
  return {static_cast<_Float16>(op(double(a.x), double(b.x))), static_cast<_Float16>(op(double(a.y), double(b.y)))};
}
inline float2 __half22float2(__half2 x) { return {float(x.x), float(x.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {_Float16(x), _Float16(y)}; }
inline __half2 __float2half2_rn(float x) { return {_Float16(x), _Float16(x)}; }
inline __half2 __hadd2(__half2 a, __half2 b) { return each(a, b, [](double x, double y) { return x + y; }); }
inline __half2 __hmul2(__half2 a, __half2 b) { return each(a, b, [](double x, double y) { return x * y; }); }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {static_cast<_Float16>(double(a.x) * double(b.x) + double(c.x)), static_cast<_Float16>(double(a.y) * double(b.y) + double(c.y))};
}
inline __half2 __habs2(__half2 x) { return each(x, x, [](double a, double) { return std::fabs(a); }); }
inline __half2 __hmax2_nan(__half2 a, __half2 b) {
  return each(a, b, [](double x, double y) { return x != x || y != y ? NAN : std::max(x, y); });
}
inline float __half2float(__half x) { return float(x.x); }
inline __half __ushort_as_half(uint16_t bits) { return same_bits<__half>(bits); }
inline uint32_t __hle2_mask(__half2 a, __half2 b) {
  return (float(a.x) <= float(b.x) ? 0xffffu : 0u) | (float(a.y) <= float(b.y) ? 0xffff0000u : 0u);
}
