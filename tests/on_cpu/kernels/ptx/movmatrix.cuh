// The transpose of an 8x8 matrix of 16-bit numbers: lane l gives two of row l / 4 and receives two of column l / 4.
#pragma once

#include "gpu.h"

namespace sage::ptx {

inline uint32_t movmatrix_trans(uint32_t x) {
  return gpu::together<uint32_t>(x, [](auto given, auto made) {
    uint32_t matrix[8][8];
    for (int lane = 0; lane < gpu::kLanes; ++lane) {
      for (int i = 0; i < 2; ++i) matrix[lane / 4][lane % 4 * 2 + i] = given[lane] >> 16 * i & 0xffff;
    }
    for (int lane = 0; lane < gpu::kLanes; ++lane) {
      made.put(lane, matrix[lane % 4 * 2][lane / 4] | matrix[lane % 4 * 2 + 1][lane / 4] << 16);
    }
  });
}

}  // namespace sage::ptx
