// Attention of 16 rows by a warp, in 16 bits: what it is compiled for.
#pragma once

#include "kernels/attention/sm80_qk_f16_pv_f16.h"
#include "kernels/element.cuh"
#include "kernels/ptx/shared.cuh"

namespace sage {

struct Config : Sm80QkF16PvF16 {
  using Element = SAGE_DTYPE;
  static constexpr int kPieces = SAGE_HEAD_DIM / 32;  // of eight channels: a lane's of a row, which four lanes share
  static constexpr int kTiles = 2;                    // of eight keys: what a block holds
  static constexpr int kRun = 2 * kTiles;             // neighbouring keys of a block whose scores a lane has
  static constexpr int kBlockN = 8 * kTiles;
  static constexpr int kBlockBytes = kBlockN * SAGE_HEAD_DIM * 2;  // of K or V
  // Whether registers hold Q, and K and V that are on their way; else Q lies in shared memory.
  static constexpr bool kAhead = SAGE_HEAD_DIM <= 128;
  static constexpr int kQBytes = q_bytes_of_warp(SAGE_HEAD_DIM);  // of a warp's there: [piece][row][lane], eight channels each
  static_assert(kAhead == (kQBytes == 0));

  static __device__ __forceinline__ uint4* q_of_lane() {
    return reinterpret_cast<uint4*>(ptx::dynamic_shared() + threadIdx.x / 32 * kQBytes) + threadIdx.x % 32;
  }
};

// Eight channels of a row of a head; zeros where there is no such row, or channel.
__device__ __forceinline__ void load_piece(uint32_t (&words)[4], const TensorView& tensor, const Config::Element* head, int row, int rows,
                                           int piece, int head_dim) {
  load_channels<8>(words, head + row * tensor.token_stride, piece * 32 + threadIdx.x % 4 * 8, row < rows ? head_dim : 0, true);
}

}  // namespace sage
