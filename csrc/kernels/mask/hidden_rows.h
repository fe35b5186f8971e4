// Rows of another attention's output that see no key: what host and device agree on.
#pragma once

#include "kernels/attention/params.h"

namespace sage {

struct HiddenRows {
  static constexpr int kThreads = 128;  // a row each

  struct Params {
    AttentionMask mask;  // of 16-bit numbers, without tiles; its keys lie one after the other
    TensorView out;      // rows start on 16 bytes and hold a multiple of that
    float* lse;          // [batch, heads, qo_len], natural logarithm
    int32_t batch;
    int32_t heads;
    int32_t qo_len;
    int32_t kv_len;
    int32_t v_head_dim;
  };
};

}  // namespace sage
