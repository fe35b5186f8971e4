// Attention in 16 bits on Hopper's wgmma, in one launch.
#include "kernels/attention/sm90_qk_f16_pv_f16.h"

#include "kernels/attention/wgmma_in_16_bits/attend.cuh"

namespace sage {

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    sm90_qk_f16_pv_f16(const __grid_constant__ Config::Params p) {
  attend<false>(p);
}

}  // namespace sage
