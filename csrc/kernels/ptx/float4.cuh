// e2m1: 4-bit floating point, 0 0.5 1 1.5 2 3 4 6 and their negatives; and its product with a scale for each 16 numbers (sm_120a, sm_121a).
//
// With SAGE_EMULATE_FP4 the same functions are made of ordinary instructions, after the PTX ISA's tables of who holds what: so kernels
// run, slowly, on a GPU that has neither, to be compared with the reference. tests/test_emulated_fp4.py compares these tables.
#pragma once

#include <cuda_fp16.h>

#include "kernels/tensor_view.h"

namespace sage::ptx {

#ifndef SAGE_EMULATE_FP4

// Eight numbers, the first in the lowest bits, rounded to nearest even; what is larger becomes 6, and so does NaN.
__device__ __forceinline__ uint32_t pack_e2m1x8(const float (&x)[8]) {
  uint32_t bits;
  asm("{\n.reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d};\n}\n"
      : "=r"(bits)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return bits;
}

// As four pairs in fp16.
__device__ __forceinline__ void unpack_e2m1x8(uint32_t (&pairs)[4], uint32_t bits) {
  asm("{\n.reg .b8 a, b, c, d;\n"
      "mov.b32 {a, b, c, d}, %4;\n"
      "cvt.rn.f16x2.e2m1x2 %0, a;\n"
      "cvt.rn.f16x2.e2m1x2 %1, b;\n"
      "cvt.rn.f16x2.e2m1x2 %2, c;\n"
      "cvt.rn.f16x2.e2m1x2 %3, d;\n}\n"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
      : "r"(bits));
}

// D = A(16x64) * B(64x8) + C in float32. In A and B a lane has eight numbers in a register; scales are four e4m3 without sign, for 16
// numbers each along the 64: A's of row l/4 with the lanes l % 4 == 0, of row l/4 + 8 with the lanes l % 4 == 1; B's of column l/4 with
// the lanes l % 4 == 0. What the others give is not looked at.
__device__ __forceinline__ void mma_m16n8k64_e2m1(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4],
                                                  uint32_t scale_a, uint32_t scale_b) {
  asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13}, {%14}, {%16,%16}, {%15}, {%16,%16};\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]), "r"(scale_a),
        "r"(scale_b), "n"(0));
}

#else

namespace emulated {

// Twice the number that a code stands for.
__device__ __forceinline__ int twice(uint32_t code) {
  const int magnitude = code & 7;
  const int exponent = magnitude >> 1;
  const int value = exponent == 0 ? magnitude : (2 | (magnitude & 1)) << (exponent - 1);
  return code & 8 ? -value : value;
}

__device__ __forceinline__ uint32_t code(float x) {
  const float magnitude = fabsf(x);
  uint32_t nearest = 7;  // NaN's too
  // Up to the middle between a code's number and the next one's; the middle itself goes to the even code.
  for (int i = 6; i >= 0; --i) {
    const float middle = 0.25f * static_cast<float>(twice(i) + twice(i + 1));
    if (i % 2 == 0 ? magnitude <= middle : magnitude < middle) nearest = i;
  }
  return nearest | (x < 0.0f || __float_as_uint(x) == 0x80000000u ? 8u : 0u);
}

__device__ __forceinline__ float scale(uint32_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 127) == 127) return __int_as_float(0x7fffffff);
  return exponent == 0 ? ldexpf(static_cast<float>(mantissa), -9) : ldexpf(static_cast<float>(8 + mantissa), exponent - 10);
}

// Twice twice the sum of products of eight numbers.
__device__ __forceinline__ int dot(uint32_t a, uint32_t b) {
  int sum = 0;
  for (int i = 0; i < 8; ++i) sum += twice(a >> 4 * i & 15) * twice(b >> 4 * i & 15);
  return sum;
}

}  // namespace emulated

__device__ __forceinline__ uint32_t pack_e2m1x8(const float (&x)[8]) {
  uint32_t bits = 0;
  for (int i = 0; i < 8; ++i) bits |= emulated::code(x[i]) << 4 * i;
  return bits;
}

__device__ __forceinline__ void unpack_e2m1x8(uint32_t (&pairs)[4], uint32_t bits) {
  for (int i = 0; i < 4; ++i) {
    const __half2 pair = __floats2half2_rn(0.5f * static_cast<float>(emulated::twice(bits >> 8 * i & 15)),
                                           0.5f * static_cast<float>(emulated::twice(bits >> 8 * i + 4 & 15)));
    pairs[i] = reinterpret_cast<const uint32_t&>(pair);
  }
}

// A: registers 0 and 1 are rows l/4 and l/4 + 8, columns 8 * (l % 4) and the seven after it; 2 and 3 the same of the upper 32 columns.
// B: register 0 is column l/4, rows 8 * (l % 4) and the seven after it; 1 the same of the upper 32 rows. The sum of a group of 16 is exact;
// those of the four groups and C are added exactly, or all but so, and rounded once.
__device__ __noinline__ float4 emulated_mma(uint4 a, uint2 b, float4 c, uint32_t scale_a, uint32_t scale_b) {
  const int lane = threadIdx.x % 32;
  double sums[2][2] = {{c.x, c.y}, {c.z, c.w}};  // row l/4 or l/4 + 8, columns 2 * (l % 4) and the next
  for (int half = 0; half < 2; ++half) {
    for (int pair = 0; pair < 2; ++pair) {  // of lanes that hold a group
      int products[2][2] = {};
      for (int holder = 2 * pair; holder < 2 * pair + 2; ++holder) {
        const uint32_t rows[2] = {__shfl_sync(0xffffffffu, half ? a.z : a.x, lane / 4 * 4 + holder),
                                  __shfl_sync(0xffffffffu, half ? a.w : a.y, lane / 4 * 4 + holder)};
        for (int column = 0; column < 2; ++column) {
          const uint32_t numbers = __shfl_sync(0xffffffffu, half ? b.y : b.x, (lane % 4 * 2 + column) * 4 + holder);
          for (int row = 0; row < 2; ++row) products[row][column] += emulated::dot(rows[row], numbers);
        }
      }
      const int byte = 8 * (2 * half + pair);
      for (int row = 0; row < 2; ++row) {
        const float of_a = emulated::scale(__shfl_sync(0xffffffffu, scale_a, lane / 4 * 4 + row) >> byte & 255);
        for (int column = 0; column < 2; ++column) {
          const float of_b = emulated::scale(__shfl_sync(0xffffffffu, scale_b, (lane % 4 * 2 + column) * 4) >> byte & 255);
          sums[row][column] += 0.25 * products[row][column] * (static_cast<double>(of_a) * of_b);
        }
      }
    }
  }
  return make_float4(sums[0][0], sums[0][1], sums[1][0], sums[1][1]);
}

__device__ __forceinline__ void mma_m16n8k64_e2m1(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4],
                                                  uint32_t scale_a, uint32_t scale_b) {
  const float4 sum = emulated_mma(make_uint4(a[0], a[1], a[2], a[3]), make_uint2(b0, b1), make_float4(c[0], c[1], c[2], c[3]), scale_a, scale_b);
  d[0] = sum.x;
  d[1] = sum.y;
  d[2] = sum.z;
  d[3] = sum.w;
}

#endif

}  // namespace sage::ptx
