// movmatrix: transposes an 8x8 matrix of 16-bit numbers that a warp's registers hold. Lane l gives row l/4, columns 2*(l%4) and
// 2*(l%4)+1, and receives column l/4, rows 2*(l%4) and 2*(l%4)+1.
#pragma once

#include "kernels/tensor_view.h"

namespace sage::ptx {

__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

}  // namespace sage::ptx
