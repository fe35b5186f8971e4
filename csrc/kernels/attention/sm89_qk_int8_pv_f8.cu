// Attention with INT8 QK^T and e4m3 PV, float32 sums (sm_89 and sm_12x; sm_90 to prove it there).
#include "kernels/attention/sm89_qk_int8_pv_f8.h"

#include "kernels/attention/mma_sync/attend.cuh"

namespace sage {

using Config = MmaSyncConfig<Sm89QkInt8PvF8, Sums::kFloat>;

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    sm89_qk_int8_pv_f8(const __grid_constant__ AttentionParams p) {
  attend<Config>(p);
}

}  // namespace sage
