// sm80_qk_f16_pv_f16_split_kv where warps read much: by way of shared memory, at the speed that memory has.
#include "kernels/attention/sm80_qk_f16_pv_f16_split_kv_staged.h"

#include "kernels/attention/mma_sync_in_16_bits/split_kv.cuh"

namespace sage {

static_assert(Sm80QkF16PvF16SplitKvStaged::stage_bytes(SAGE_HEAD_DIM) == 2 * Config::kBlockBytes);

extern "C" __global__ void __launch_bounds__(32 * Split::kMostWarps, Config::warps_per_sm(SAGE_HEAD_DIM) / Split::kMostWarps)
    sm80_qk_f16_pv_f16_split_kv_staged(const __grid_constant__ Split::Params p) {
  attend_split_kv</*kStaged=*/true>(p);
}

}  // namespace sage
