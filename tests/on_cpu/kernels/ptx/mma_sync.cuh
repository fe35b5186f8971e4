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
template <>
struct Numbers<uint8_t> {
  using Type = int32_t;
  static constexpr int kCount = 4;
  static int32_t get(uint32_t word, int i) { return static_cast<uint8_t>(word >> 8 * i); }
};
struct E4m3;
template <>
struct Numbers<E4m3> {
  using Type = float;
  static constexpr int kCount = 4;
  static float get(uint32_t word, int i) { return from_e4m3(word >> 8 * i); }
};

// A row of A, [k], times B, [k][8 columns], added to a row of D. What a warp needs most by far, and so compiled as well as can be.
#define VECTORS template <typename Type, size_t kInner> __attribute__((noinline, optimize("O3")))

VECTORS void add_integers(int32_t (&sums)[8], const Type (&left)[kInner], const Type (&right)[kInner][8]) {
  for (size_t k = 0; k < kInner; ++k) {
    for (int column = 0; column < 8; ++column) sums[column] += left[k] * right[k][column];
  }
}

VECTORS void add_exactly(double (&sums)[8], const Type (&left)[kInner], const Type (&right)[kInner][8]) {
  for (size_t k = 0; k < kInner; ++k) {
    for (int column = 0; column < 8; ++column) sums[column] += double(left[k]) * double(right[k][column]);
  }
}

// Of each number only the bits that are no less than 2^-13 of the largest one's highest. Products of e4m3 are exact in float32, and so are
// the sums of what is left of them.
VECTORS void add_cut(float (&sums)[8], const Type (&left)[kInner], const Type (&right)[kInner][8]) {
  float largest[8], unit[8], inverse[8], all[8];
  for (int column = 0; column < 8; ++column) {
    largest[column] = std::fabs(sums[column]);
    all[column] = sums[column];
  }
  for (size_t k = 0; k < kInner; ++k) {
    for (int column = 0; column < 8; ++column) {
      const float product = left[k] * right[k][column];
      all[column] += product;
      largest[column] = std::fabs(product) > largest[column] ? std::fabs(product) : largest[column];
    }
  }
  for (int column = 0; column < 8; ++column) {
    const int exponent = largest[column] > 0.0f && std::isfinite(all[column]) ? std::ilogb(largest[column]) - 13 : 0;
    unit[column] = std::ldexp(1.0f, exponent);
    inverse[column] = std::ldexp(1.0f, -exponent);
    sums[column] = std::trunc(sums[column] * inverse[column]);
  }
  for (size_t k = 0; k < kInner; ++k) {
    for (int column = 0; column < 8; ++column) sums[column] += std::trunc(left[k] * right[k][column] * inverse[column]);
  }
  for (int column = 0; column < 8; ++column) sums[column] = std::isfinite(all[column]) ? sums[column] * unit[column] : all[column];
}

template <typename Sum>
struct Operands {
  uint32_t a[4], b[2];
  Sum d[4];
};
template <typename Sum>
struct Sums { Sum d[4]; };

// Calls add(sums, row of A, B) for each row of D. A lane holds of D rows lane / 4 and that + 8, columns lane % 4 * 2 and the next; of A and B, of row or
// column lane / 4, words lane % 4 and that + 4; of A besides of the row 8 further on.
template <typename Element, typename Sum, typename Add>
void multiply(Sum (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Add& add) {
  using In = Numbers<Element>;
  using Type = typename In::Type;
  constexpr int kHalf = 4 * In::kCount;
  const auto mine = gpu::together<Sums<Sum>>(Operands<Sum>{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}}, [&](auto given, auto made) {
    Type left[16][2 * kHalf], right[2 * kHalf][8];
    Sum sums[16][8];
    for (int lane = 0; lane < gpu::kLanes; ++lane) {
      const auto x = given[lane];
      for (int i = 0; i < In::kCount; ++i) {
        const int number = lane % 4 * In::kCount + i;
        for (int part = 0; part < 4; ++part) left[lane / 4 + part % 2 * 8][number + part / 2 * kHalf] = In::get(x.a[part], i);
        for (int part = 0; part < 2; ++part) right[number + part * kHalf][lane / 4] = In::get(x.b[part], i);
      }
      for (int i = 0; i < 4; ++i) sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = x.d[i];
    }
    for (int row = 0; row < 16; ++row) add(sums[row], left[row], right);
    for (int lane = 0; lane < gpu::kLanes; ++lane) {
      Sums<Sum> x;
      for (int i = 0; i < 4; ++i) x.d[i] = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
      made.put(lane, x);
    }
  });
  std::memcpy(d, mine.d, sizeof d);
}

// All of an instruction exactly, then rounded to Rounded.
template <typename Element, typename Rounded>
void multiply_exactly(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<Element>(d, a, b0, b1, [](float(&sums)[8], const auto& left, const auto& right) {
    double exact[8];
    for (int column = 0; column < 8; ++column) exact[column] = sums[column];
    add_exactly(exact, left, right);
    for (int column = 0; column < 8; ++column) sums[column] = static_cast<float>(static_cast<Rounded>(exact[column]));
  });
}

template <typename Element>
void multiply_in_halves(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = Numbers<__half>::get(d[i / 2], i % 2);
  multiply_exactly<Element, _Float16>(sums, a, b0, b1);
  for (int i = 0; i < 2; ++i) d[i] = same_bits<uint32_t>(__floats2half2_rn(sums[2 * i], sums[2 * i + 1]));
}

inline void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<int8_t>(d, a, b0, b1, [](int32_t(&sums)[8], const auto& left, const auto& right) { add_integers(sums, left, right); });
}
template <typename Element>
void mma_m16n8k16_f32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { multiply_exactly<Element, float>(d, a, b0, b1); }
inline void mma_m16n8k16_f16(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { multiply_in_halves<__half>(d, a, b0, b1); }
inline void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply<E4m3>(d, a, b0, b1, [](float(&sums)[8], const auto& left, const auto& right) { add_cut(sums, left, right); });
}
inline void mma_m16n8k32_e4m3(uint32_t (&d)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { multiply_in_halves<E4m3>(d, a, b0, b1); }

}  // namespace sage::ptx
