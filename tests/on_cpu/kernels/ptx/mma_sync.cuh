// Products of a 16-row and an 8-column fragment. Each is exact. What tensor cores do in adding them up the PTX ISA leaves open; here
//   s8               exact
//   16 bit           all of an instruction and what they are added to exactly, then rounded once, to float32 or FP16. (Tensor cores cut off what
//                    lies some bits below the largest, of float32 sums beyond float32's own last bit.)
//   e4m3 in float32  of each number only what is no less than 2^-13 of the largest's power of two, cut off: the 14 bits that
//                    measurements by others found on 8.9 and 9.0
//   e4m3 in FP16     as 16 bit
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "kernels/ptx/float8.cuh"

namespace sage::ptx {

// Numbers in a word, the first in the lowest bits.
template <typename Element>
struct Numbers;
template <>
struct Numbers<__half> {
  using Type = float;
  static constexpr int kCount = 2;
  static float get(uint32_t word, int i) { return __half2float(__ushort_as_half(word >> 16 * i)); }
};
template <>
struct Numbers<__nv_bfloat16> {
  using Type = float;
  static constexpr int kCount = 2;
  static float get(uint32_t word, int i) { return from_bfloat16(word >> 16 * i); }
};
template <>
struct Numbers<int8_t> {
  using Type = int32_t;
  static constexpr int kCount = 4;
  static int32_t get(uint32_t word, int i) { return static_cast<int8_t>(word >> 8 * i); }
};
struct E4m3;
template <>
struct Numbers<E4m3> {
  using Type = float;
  static constexpr int kCount = 4;
  static float get(uint32_t word, int i) { return from_e4m3(word >> 8 * i); }
};

template <typename Sums>
struct Operands {
  uint32_t a[4], b[2];
  Sums d;
};
struct FourFloats { float x[4]; };
struct FourIntegers { int32_t x[4]; };

// Calls add(sum, row of A, column of B), each 8 words' numbers, for what each lane holds of D: rows lane / 4 and that + 8, columns lane % 4 * 2
// and the next. Of A and B a lane has, of row or column lane / 4, word lane % 4 and that + 4; of A besides of the row 8 further on.
template <typename Element, typename Sums, typename Add>
Sums multiply(const Sums& d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Add& add) {
  using In = Numbers<Element>;
  using Row = typename In::Type[8 * In::kCount];
  return gpu::together<Sums>(Operands<Sums>{{a[0], a[1], a[2], a[3]}, {b0, b1}, d}, [&](auto given, auto made) {
    Row left[16], right[8];
    for (int lane = 0; lane < gpu::kLanes; ++lane) {
      const auto mine = given[lane];
      for (int i = 0; i < In::kCount; ++i) {
        const int number = lane % 4 * In::kCount + i;
        for (int part = 0; part < 4; ++part) left[lane / 4 + part % 2 * 8][number + part / 2 * 4 * In::kCount] = In::get(mine.a[part], i);
        for (int part = 0; part < 2; ++part) right[lane / 4][number + part * 4 * In::kCount] = In::get(mine.b[part], i);
      }
    }
    for (int lane = 0; lane < gpu::kLanes; ++lane) {
      Sums sums = given[lane].d;
      for (int i = 0; i < 4; ++i) add(sums.x[i], left[lane / 4 + i / 2 * 8], right[lane % 4 * 2 + i % 2]);
      made.put(lane, sums);
    }
  });
}

template <typename Row>
double exact_sum(double sum, const Row& left, const Row& right) {
  for (size_t k = 0; k < std::size(left); ++k) sum += double(left[k]) * double(right[k]);
  return sum;
}

// Of each number only the bits that are no less than 2^-13 of the largest one's highest.
template <typename Row>
float cut_sum(float sum, const Row& left, const Row& right) {
  double largest = std::fabs(sum);
  for (size_t k = 0; k < std::size(left); ++k) largest = std::max(largest, std::fabs(double(left[k]) * right[k]));
  const double all = exact_sum(sum, left, right);
  if (largest == 0.0 || !std::isfinite(all)) return all;
  const double unit = std::ldexp(1.0, std::ilogb(largest) - 13);
  double cut = std::trunc(sum / unit);
  for (size_t k = 0; k < std::size(left); ++k) cut += std::trunc(double(left[k]) * right[k] / unit);
  return cut * unit;
}

inline void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto made = multiply<int8_t>(FourIntegers{{d[0], d[1], d[2], d[3]}}, a, b0, b1, [](int32_t& sum, const auto& left, const auto& right) {
    for (size_t k = 0; k < std::size(left); ++k) sum += left[k] * right[k];
  });
  std::memcpy(d, made.x, sizeof d);
}

template <typename Element, typename Sum>
void add_in_floats(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Sum& sum_of) {
  const auto made = multiply<Element>(FourFloats{{d[0], d[1], d[2], d[3]}}, a, b0, b1,
                                      [&](float& sum, const auto& left, const auto& right) { sum = sum_of(sum, left, right); });
  std::memcpy(d, made.x, sizeof d);
}

template <typename Element>
void add_in_halves(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = Numbers<__half>::get(d[i / 2], i % 2);
  add_in_floats<Element>(sums, a, b0, b1, [](float sum, const auto& left, const auto& right) {
    return static_cast<float>(static_cast<_Float16>(exact_sum(sum, left, right)));
  });
  for (int i = 0; i < 2; ++i) d[i] = same_bits<uint32_t>(__floats2half2_rn(sums[2 * i], sums[2 * i + 1]));
}

template <typename Element>
void mma_m16n8k16_f32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  add_in_floats<Element>(d, a, b0, b1, [](float sum, const auto& left, const auto& right) { return exact_sum(sum, left, right); });
}
inline void mma_m16n8k16_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { add_in_halves<__half>(d, a, b0, b1); }
inline void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  add_in_floats<E4m3>(d, a, b0, b1, [](float sum, const auto& left, const auto& right) { return cut_sum(sum, left, right); });
}
inline void mma_m16n8k32_e4m3(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { add_in_halves<E4m3>(d, a, b0, b1); }

}  // namespace sage::ptx
