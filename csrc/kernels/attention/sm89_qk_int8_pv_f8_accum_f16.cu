// Attention with INT8 QK^T and e4m3 PV, FP16 sums of 64 keys added up in float32 (sm_89 and sm_12x, whose mma.sync has e4m3).
#include "kernels/attention/sm89_qk_int8_pv_f8_accum_f16.h"

#include "kernels/attention/mma_sync/attend.cuh"

namespace sage {

using Config = MmaSyncConfig<Sm89QkInt8PvF8AccumF16, Sums::kHalf>;

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    sm89_qk_int8_pv_f8_accum_f16(const __grid_constant__ AttentionParams p) {
  attend<Config>(p);
}

}  // namespace sage
