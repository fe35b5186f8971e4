// e4m3, by trying all numbers that there are.
#pragma once

#include "cuda_fp16.h"

namespace sage::ptx {

inline float from_e4m3(uint32_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = (code & 127) == 127 ? NAN
                          : exponent == 0     ? std::ldexp(float(mantissa), -9)
                                              : std::ldexp(float(8 + mantissa), exponent - 10);
  return code & 128 ? -magnitude : magnitude;
}
inline uint32_t to_e4m3(float x) {
  if (x != x) return 127;
  uint32_t nearest = 126;
  for (uint32_t code = 0; code < 126; ++code) {
    const float middle = (from_e4m3(code) + from_e4m3(code + 1)) / 2;
    if (std::fabs(x) < middle || (std::fabs(x) == middle && code % 2 == 0)) {
      nearest = code;
      break;
    }
  }
  return nearest | (std::signbit(x) ? 128 : 0);
}
inline uint32_t pack_e4m3x4(float x0, float x1, float x2, float x3) {
  return to_e4m3(x0) | to_e4m3(x1) << 8 | to_e4m3(x2) << 16 | to_e4m3(x3) << 24;
}
inline void unpack_e4m3x4(uint32_t& low, uint32_t& high, uint32_t bits) {
  low = same_bits<uint32_t>(__floats2half2_rn(from_e4m3(bits & 255), from_e4m3(bits >> 8 & 255)));
  high = same_bits<uint32_t>(__floats2half2_rn(from_e4m3(bits >> 16 & 255), from_e4m3(bits >> 24)));
}

}  // namespace sage::ptx
