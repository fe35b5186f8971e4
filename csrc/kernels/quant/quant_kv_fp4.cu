// V and K to e2m1, and Q's means times K. V's blocks of threads need nothing of the kernel before, `means`, and come first: they run while it ends.
#include "kernels/quant/quant_kv_fp4.h"

#include "kernels/quant/quant_k_fp4.cuh"
#include "kernels/quant/quant_v_fp4.cuh"

namespace sage {

using ConfigV = QuantVConfig<QuantVFp4>;

extern "C" __global__ void __launch_bounds__(ConfigV::kThreads, 512 / ConfigV::kThreads)
    quant_kv_fp4(const __grid_constant__ QuantKvFp4::Params p) {
  if (blockIdx.x < p.v_blocks) {
    quantise_v_fp4<ConfigV>(p.v);
  } else {
    const int part = (blockIdx.x - p.v_blocks) / p.k_blocks;
    quantise_k_fp4<QuantKFp4Config>(p.k, p.v_blocks + part * p.k_blocks, part);
  }
}

}  // namespace sage
