// V -> FP16.
#include "kernels/quant/quant_v_f16.h"

#include "kernels/quant/quant_v.cuh"

namespace sage {

using Config = QuantVConfig<QuantVF16>;

extern "C" __global__ void __launch_bounds__(Config::kThreads, 768 / Config::kThreads) quant_v_f16(const __grid_constant__ Config::Params p) {
  quantise_v<Config>(p, [](const float(&x)[4][8], const VPart<Config>& part, uint8_t* out) {
#pragma unroll
    for (int key = 0; key < 4; ++key) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = Pair<__half>::pack(x[key][2 * i], x[key][2 * i + 1]);
      *reinterpret_cast<uint4*>(out + swizzled<Config::kHeadDim * 2>(part.key(key), part.channel / 8)) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  });
}

}  // namespace sage
