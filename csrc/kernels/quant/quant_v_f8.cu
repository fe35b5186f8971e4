// V -> e4m3, transposed.
#include "kernels/quant/quant_v_f8.h"

#include "kernels/ptx/float8.cuh"
#include "kernels/quant/quant_v.cuh"

namespace sage {

using Config = QuantVConfig<QuantVF8>;

// Four lanes, 8 apart, hold words j = 0 to 3 of the same rows: hands each of them all four words of the row of its number.
__device__ __forceinline__ uint4 transpose(const uint32_t (&words)[4], int j) {
  const bool odd = j % 2, high = j / 2;
  const auto exchange = [](uint32_t word, int lane) { return __shfl_xor_sync(0xffffffffu, word, lane); };
  // First between neighbours, then between pairs.
  const uint32_t first = exchange(odd ? words[0] : words[1], 8), second = exchange(odd ? words[2] : words[3], 8);
  const uint32_t low[2] = {odd ? first : words[0], odd ? words[1] : first};     // rows 0 or 1: words of this pair
  const uint32_t up[2] = {odd ? second : words[2], odd ? words[3] : second};    // rows 2 or 3
  const uint32_t third = exchange(high ? low[0] : up[0], 16), fourth = exchange(high ? low[1] : up[1], 16);
  return high ? make_uint4(third, fourth, up[0], up[1]) : make_uint4(low[0], low[1], third, fourth);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 768 / Config::kThreads) quant_v_f8(const __grid_constant__ Config::Params p) {
  quantise_v<Config>(p, [](const float(&x)[4][8], const VPart& part, uint8_t* out) {
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = ptx::pack_e4m3x4(x[0][half + i], x[1][half + i], x[2][half + i], x[3][half + i]);
      const uint4 row = transpose(words, part.j);
      *reinterpret_cast<uint4*>(out + swizzled<Config::kBlockN>(part.channel + half + part.j, part.chunk)) = row;
    }
  });
}

}  // namespace sage
