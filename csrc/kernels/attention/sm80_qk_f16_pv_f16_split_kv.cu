// Attention of few queries over many keys in 16 bits, float32 sums (sm_80 on): reading K and V once is what it takes. Straight from memory, which is
// quickest where a warp reads little.
#include "kernels/attention/sm80_qk_f16_pv_f16_split_kv.h"

#include "kernels/attention/mma_sync_in_16_bits/split_kv.cuh"

namespace sage {

extern "C" __global__ void __launch_bounds__(32 * Split::kMostWarps, Config::warps_per_sm(SAGE_HEAD_DIM) / Split::kMostWarps)
    sm80_qk_f16_pv_f16_split_kv(const __grid_constant__ Split::Params p) {
  attend_split_kv</*kStaged=*/false>(p);
}

}  // namespace sage
