// m16n8k16 of 16-bit numbers, summed exactly.
#pragma once

#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace sage::ptx {

template <typename Element>
float number(uint32_t word, int i) {
  if constexpr (std::is_same_v<Element, __half>) return __half2float(__ushort_as_half(word >> 16 * i));
  return from_bfloat16(word >> 16 * i);
}

struct Operands { uint32_t a[4], b[2]; };

template <typename Element>
void mma_m16n8k16_f32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto lanes = gpu::exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; ++k) {
      const Operands left = lanes[row % 8 * 4 + k % 8 / 2], right = lanes[column * 4 + k % 8 / 2];
      sum += double(number<Element>(left.a[row / 8 + k / 8 * 2], k % 2)) * number<Element>(right.b[k / 8], k % 2);
    }
    d[i] = sum;
  }
}

// Kernels that run here have none: they need not compile to something that works.
template <typename... Any>
void mma_m16n8k32_s8(Any&&...) { gpu::fail("an integer product"); }

}  // namespace sage::ptx
