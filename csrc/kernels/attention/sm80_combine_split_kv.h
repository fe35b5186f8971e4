// Adding up parts of rows' keys: what host and device agree on.
#pragma once

#include "kernels/attention/sm80_qk_f16_pv_f16_split_kv.h"

namespace sage {

struct Sm80CombineSplitKv {
  static constexpr int kThreads = 128;
  static constexpr int kChannels = 4;  // a lane's, of a row
  static constexpr int kSharers = 4;   // lanes that have the same channels, of some of the parts each
  static constexpr int kChannelsOfWarp = 32 / kSharers * kChannels;

  using Params = Sm80QkF16PvF16SplitKv::Params;
};

}  // namespace sage
