// Attention with INT8 QK^T and FP16/BF16 PV, float32 sums (sm_80 on).
#include "kernels/attention/sm80_qk_int8_pv_f16.h"

#include "kernels/attention/mma_sync/attend.cuh"

namespace sage {

using Config = MmaSyncConfig<Sm80QkInt8PvF16, Sums::kFloat>;

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    sm80_qk_int8_pv_f16(const __grid_constant__ AttentionParams p) {
  attend<Config>(p);
}

}  // namespace sage
