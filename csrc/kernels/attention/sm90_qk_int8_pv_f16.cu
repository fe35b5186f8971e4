// Attention with INT8 QK^T and FP16/BF16 PV, float32 accumulation, on Hopper's wgmma.
#include "kernels/attention/sm90_qk_int8_pv_f16.h"

#include "kernels/attention/wgmma/attend.cuh"

namespace sage {

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    sm90_qk_int8_pv_f16(const __grid_constant__ Config::Params p) {
  attend<false, false>(p);
}

}  // namespace sage
