// The attention kernel for Hopper under a mask: what host and device agree on.
#pragma once

#include "kernels/attention/sm90_qk_int8_pv_f16.h"
#include "kernels/mask/mask_tiles.h"

namespace sage {

struct Sm90QkInt8PvF16Masked : Sm90QkInt8PvF16 {
  // Of what a mask adds to the scores of a warpgroup.
  static constexpr int kAddedBytes = MaskTiles::kWgmmaRows * kBlockN * 2;
  static constexpr int shared_bytes(int head_dim) {
    return bytes_of_all_kernels(head_dim) + consumers(head_dim) * (kAddedBytes + 2 * 8);
  }
};

}  // namespace sage
