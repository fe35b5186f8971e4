// The same under an attention mask, bool or of Q's dtype.
#include "kernels/attention/sm90_qk_int8_pv_f16_masked.h"

#include "kernels/attention/wgmma/attend.cuh"

namespace sage {

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    sm90_qk_int8_pv_f16_masked(const __grid_constant__ Config::Params p) {
  attend<true, false>(p);
}

}  // namespace sage
