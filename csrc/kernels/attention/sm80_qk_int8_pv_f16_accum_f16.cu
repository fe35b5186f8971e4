// Attention with INT8 QK^T and FP16 PV, FP16 sums of 64 keys added up in float32 (sm_86 to sm_89 and sm_12x).
#include "kernels/attention/sm80_qk_int8_pv_f16_accum_f16.h"

#include "kernels/attention/mma_sync/attend.cuh"

namespace sage {

using Config = MmaSyncConfig<Sm80QkInt8PvF16AccumF16, Sums::kHalf>;

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    sm80_qk_int8_pv_f16_accum_f16(const __grid_constant__ AttentionParams p) {
  attend<Config>(p);
}

}  // namespace sage
