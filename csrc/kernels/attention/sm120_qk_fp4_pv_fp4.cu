// Attention with QK^T and PV in e2m1 and scales in e4m3 for each 16 numbers (sm_120a, sm_121a).
#include "kernels/attention/sm120_qk_fp4_pv_fp4.h"

#include "kernels/attention/fp4/attend.cuh"

namespace sage {

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    sm120_qk_fp4_pv_fp4(const __grid_constant__ Config::Params p) {
  attend_fp4(p);
}

}  // namespace sage
