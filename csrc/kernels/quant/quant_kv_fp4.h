// K and V in e2m1, in one launch: what host and device agree on.
#pragma once

#include "kernels/quant/quant_k_fp4.h"
#include "kernels/quant/quant_v_fp4.h"

namespace sage {

struct QuantKvFp4 {
  static constexpr int threads(int head_dim) { return QuantVFp4::threads(head_dim); }
  struct Params {
    QuantVFp4::Params v;
    QuantKFp4::Params k;
    int32_t v_blocks;  // of threads, which come before K's
    int32_t k_blocks;  // for each of k.parts
  };
};

}  // namespace sage
