// V -> e4m3, transposed.
#include "kernels/quant/quant_v_f8.h"

#include "kernels/ptx/float8.cuh"
#include "kernels/quant/quant_v.cuh"

namespace sage {

using Config = QuantVConfig<QuantVF8>;

extern "C" __global__ void __launch_bounds__(Config::kThreads, 768 / Config::kThreads) quant_v_f8(const __grid_constant__ Config::Params p) {
  quantise_v<Config>(p, [](const float(&x)[4][8], const VPart<Config>& part, uint8_t* out) {
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = ptx::pack_e4m3x4(x[0][half + i], x[1][half + i], x[2][half + i], x[3][half + i]);
      const uint4 row = transpose<8>(words, part.j);
      *reinterpret_cast<uint4*>(out + swizzled<Config::kBlockN>(part.channel + half + part.j, part.chunk)) = row;
    }
  });
}

}  // namespace sage
