// Attention with INT8 QK^T and e4m3 PV, FP16 sums of 64 keys added up in float32 (sm_89 on).
#include "kernels/attention/sm89_qk_int8_pv_f8_accum_f16.h"

#include "kernels/attention/mma_sync/attend.cuh"

namespace sage {

// Where mma.sync has no e4m3 of its own (9.0, 10.x: it is converted to FP16) sums in FP16 are no faster: float32 there.
#if __CUDA_ARCH__ / 100 == 9 || __CUDA_ARCH__ / 100 == 10
constexpr Sums kSums = Sums::kFloat;
#else
constexpr Sums kSums = Sums::kHalf;
#endif
using Config = MmaSyncConfig<Sm89QkInt8PvF8AccumF16, SAGE_HEAD_DIM, SAGE_DTYPE, Values::kE4m3, kSums>;

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    sm89_qk_int8_pv_f8_accum_f16(const __grid_constant__ AttentionParams p) {
  attend<Config>(p);
}

}  // namespace sage
