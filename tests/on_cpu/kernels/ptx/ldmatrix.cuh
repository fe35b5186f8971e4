// Four 8x16-byte matrices: lane l gives the address of row l % 8 of matrix l / 8 and receives 4 bytes of each.
#pragma once

#include "gpu.h"

namespace sage::ptx {

struct FourWords { uint32_t words[4]; };

// Lane l receives of row l / 4 the bytes from l % 4 * 4 on; transposed, of column l / 4 the rows l % 4 * 2 and the next.
template <bool Transposed>
void load_matrices(uint32_t (&r)[4], uint32_t address) {
  const FourWords mine = gpu::together<FourWords>(address, [](auto addresses, auto made) {
    uint16_t matrices[4][8][8];
    for (int row = 0; row < gpu::kLanes; ++row) std::memcpy(matrices[row / 8][row % 8], gpu::at(addresses[row], 16), 16);
    for (int lane = 0; lane < gpu::kLanes; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      FourWords x;
      for (int i = 0; i < 4; ++i) {
        const uint16_t low = Transposed ? matrices[i][column][row] : matrices[i][row][column];
        const uint16_t high = Transposed ? matrices[i][column + 1][row] : matrices[i][row][column + 1];
        x.words[i] = low | static_cast<uint32_t>(high) << 16;
      }
      made.put(lane, x);
    }
  });
  std::memcpy(r, mine.words, sizeof r);
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices<false>(r, address); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { load_matrices<true>(r, address); }

// The other way.
inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  struct Rows {
    uint32_t address;
    FourWords x;
  } mine{address, {r[0], r[1], r[2], r[3]}};
  gpu::together<char>(mine, [](auto all, auto) {
    for (int lane = 0; lane < gpu::kLanes; ++lane) {
      const FourWords x = all[lane].x;
      for (int i = 0; i < 4; ++i) std::memcpy(gpu::at(all[i * 8 + lane / 4].address, 16) + lane % 4 * 4, &x.words[i], 4);
    }
  });
}

}  // namespace sage::ptx
