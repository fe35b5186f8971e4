// e4m3, by trying all numbers that there are.
#pragma once

#include <array>

#include "cuda_fp16.h"

namespace sage::ptx {

inline float e4m3_number(uint32_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = (code & 127) == 127 ? NAN
                          : exponent == 0     ? std::ldexp(float(mantissa), -9)
                                              : std::ldexp(float(8 + mantissa), exponent - 10);
  return code & 128 ? -magnitude : magnitude;
}
inline const std::array<float, 256> e4m3_numbers = [] {
  std::array<float, 256> numbers;
  for (int code = 0; code < 256; ++code) numbers[code] = e4m3_number(code);
  return numbers;
}();
inline float from_e4m3(uint32_t code) { return e4m3_numbers[code & 255]; }
inline uint32_t to_e4m3(float x) {
  if (x != x) return 127;
  const auto& numbers = e4m3_numbers;
  const float magnitude = std::min(std::fabs(x), 448.0f);
  uint32_t code = std::upper_bound(numbers.begin(), numbers.begin() + 127, magnitude) - numbers.begin() - 1;  // the largest that is no larger
  if (code < 126) {
    const float middle = (numbers[code] + numbers[code + 1]) / 2;
    if (magnitude > middle || (magnitude == middle && code % 2 == 1)) ++code;
  }
  return code | (std::signbit(x) ? 128 : 0);
}
inline uint32_t pack_e4m3x4(float x0, float x1, float x2, float x3) {
  return to_e4m3(x0) | to_e4m3(x1) << 8 | to_e4m3(x2) << 16 | to_e4m3(x3) << 24;
}
inline uint32_t pack_e4m3x2(float x0, float x1) { return to_e4m3(x0) | to_e4m3(x1) << 8; }
inline void unpack_e4m3x4(uint32_t& low, uint32_t& high, uint32_t bits) {
  low = same_bits<uint32_t>(__floats2half2_rn(from_e4m3(bits), from_e4m3(bits >> 8)));
  high = same_bits<uint32_t>(__floats2half2_rn(from_e4m3(bits >> 16), from_e4m3(bits >> 24)));
}

}  // namespace sage::ptx
