// V -> e2m1, transposed, with a scale for each 16 keys of a channel beside that for 64.
#pragma once

#include "kernels/quant/fp4.cuh"
#include "kernels/quant/quant_v.cuh"
#include "kernels/quant/quant_v_fp4.h"

namespace sage {

template <typename Config>
__device__ __forceinline__ void quantise_v_fp4(const typename Config::Params& p) {
  quantise_v<Config>(p, [](const float(&x)[4][8], const VPart<Config>& part, uint8_t* out) {
    uint8_t* const scales = out + Fp4::code_bytes(Config::kHeadDim);
    // Of two channels each: four keys of the one, four of the other.
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float eight[8], scale[2];
#pragma unroll
      for (int key = 0; key < 8; ++key) eight[key] = x[key % 4][2 * i + key / 4];
      words[i] = quantise_fp4(eight, OfChunk{}, scale);
      if (part.j == i) {
        const uint32_t bits = ptx::pack_e4m3x2(scale[0], scale[1]);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int channel = part.channel + 2 * i + odd;
          scales[(channel / 16 * 16 + channel % 8 * 2 + channel / 8 % 2) * 4 + part.chunk] = bits >> 8 * odd;
        }
      }
    }
    // Of the word of number j the four lanes' parts: a byte for each half of a channel's eight.
    const uint4 parts = transpose<8>(words, part.j);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      uint32_t row[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t byte = 2 * odd + i, both = byte | (byte + 4) << 4;
        row[i] = __byte_perm(__byte_perm(parts.x, parts.y, both), __byte_perm(parts.z, parts.w, both), 0x5410);
      }
      const int channel = part.channel + 2 * part.j + odd;
      *reinterpret_cast<uint2*>(out + swizzled<32>(channel, part.chunk / 2) + part.chunk % 2 * 8) = make_uint2(row[0], row[1]);
    }
  });
}

}  // namespace sage
