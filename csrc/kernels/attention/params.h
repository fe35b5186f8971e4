// What every attention kernel is told.
#pragma once

#include "kernels/tensor_view.h"

namespace sage {

struct AttentionParams {
  TensorView q;
  TensorView v;
  TensorView out;
  const int8_t* k_int8;  // as QuantKInt8 leaves them
  const float* k_scale;
  const float* k_mean;   // null: K was not smoothed
  float* lse;            // [batch, q_heads, qo_len], natural logarithm; null: not wanted
  int32_t batch;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t qo_len;
  int32_t kv_len;
  int32_t head_dim;      // of Q and K; the kernel's own may be larger
  int32_t v_head_dim;    // of V and the output
  int32_t causal;        // query i sees keys 0..i
  float scale_log2;      // sm_scale * log2(e)
};

}  // namespace sage
