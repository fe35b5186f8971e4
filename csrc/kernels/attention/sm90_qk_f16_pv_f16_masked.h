// The same under a mask: what host and device agree on.
#pragma once

#include "kernels/attention/sm90_qk_f16_pv_f16.h"

namespace sage {

struct Sm90QkF16PvF16Masked : Sm90QkF16PvF16 {
  static constexpr int kMaskBytes = kWarpRows * kBlockN * 2;  // numbers; of bools half of them
  static constexpr int shared_bytes(int head_dim) { return Sm90QkF16PvF16::shared_bytes(head_dim, kMaskBytes); }
};

}  // namespace sage
