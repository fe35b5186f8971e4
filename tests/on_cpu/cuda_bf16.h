// Of CUDA's header what kernels use.
#pragma once

#include "gpu.h"

struct __nv_bfloat16 { uint16_t bits; };
struct alignas(4) __nv_bfloat162 { uint16_t x, y; };

inline float from_bfloat16(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <typename Op>
__nv_bfloat162 each(__nv_bfloat162 a, __nv_bfloat162 b, const Op& op) {
  return {to_bfloat16(op(from_bfloat16(a.x), from_bfloat16(b.x))), to_bfloat16(op(from_bfloat16(a.y), from_bfloat16(b.y)))};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {to_bfloat16(x), to_bfloat16(y)}; }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {to_bfloat16(x), to_bfloat16(x)}; }
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return each(a, b, [](float x, float y) { return x + y; }); }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return each(a, b, [](float x, float y) { return x * y; }); }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {to_bfloat16(std::fma(from_bfloat16(a.x), from_bfloat16(b.x), from_bfloat16(c.x))),
          to_bfloat16(std::fma(from_bfloat16(a.y), from_bfloat16(b.y), from_bfloat16(c.y)))};
}
inline __nv_bfloat162 __habs2(__nv_bfloat162 x) { return each(x, x, [](float a, float) { return std::fabs(a); }); }
inline __nv_bfloat162 __hmax2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
  return each(a, b, [](float x, float y) { return x != x || y != y ? NAN : std::max(x, y); });
}
inline uint32_t __hle2_mask(__nv_bfloat162 a, __nv_bfloat162 b) {
  return (from_bfloat16(a.x) <= from_bfloat16(b.x) ? 0xffffu : 0u) | (from_bfloat16(a.y) <= from_bfloat16(b.y) ? 0xffff0000u : 0u);
}
