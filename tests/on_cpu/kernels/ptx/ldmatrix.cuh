// Four 8x16-byte matrices: lane l gives the address of row l % 8 of matrix l / 8 and receives 4 bytes of each.
#pragma once

#include "gpu.h"

namespace sage::ptx {

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  const auto rows = gpu::exchange(address);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) std::memcpy(&r[i], gpu::at(rows[i * 8 + lane / 4], 16) + lane % 4 * 4, 4);
}

}  // namespace sage::ptx
