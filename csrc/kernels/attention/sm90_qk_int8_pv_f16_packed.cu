// The same of packed sequences.
#include "kernels/attention/sm90_qk_int8_pv_f16_packed.h"

#include "kernels/attention/wgmma/attend.cuh"

namespace sage {

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1)
    sm90_qk_int8_pv_f16_packed(const __grid_constant__ Config::Params p) {
  attend<false, true>(p);
}

}  // namespace sage
