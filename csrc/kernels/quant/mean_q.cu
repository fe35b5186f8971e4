// The mean of each 128 rows of Q, or of as many out of a sequence. Attention subtracts it from Q and adds its product with K to the scores, so any
// estimate will do; tokens weigh less the further they lie from the others.
#include "kernels/quant/mean_q.h"

#include "kernels/ptx/grid.cuh"
#include "kernels/quant/kv_span.cuh"

namespace sage {

extern "C" __global__ void __launch_bounds__(MeanQ::kThreads) mean_q(const __grid_constant__ MeanQ::Params p) {
  using Element = SAGE_DTYPE;
  constexpr int kHeadDim = SAGE_HEAD_DIM;
  __shared__ Sample<kHeadDim, MeanQ::kThreads> sample;
  ptx::grid_dependency_launch();

  const int number = blockIdx.x % p.means, batch_head = blockIdx.x / p.means;
  const int sequence = batch_head / p.q_heads;
  KvSpan tokens;
  tokens.batch = p.cu_seqlens == nullptr ? sequence : 0;
  tokens.head = batch_head % p.q_heads;
  if (p.cu_seqlens != nullptr) {
    tokens.first_token = min(max(p.cu_seqlens[sequence], 0), p.qo_len);
    tokens.length = min(max(p.cu_seqlens[sequence + 1], static_cast<int>(tokens.first_token)), p.qo_len) - static_cast<int>(tokens.first_token);
    if (tokens.length == 0) return;
  } else if (p.means == 1) {
    tokens.first_token = 0;
    tokens.length = p.qo_len;
  } else {
    tokens.first_token = number * MeanQ::kRows;
    tokens.length = min(MeanQ::kRows, p.qo_len - number * MeanQ::kRows);
  }
  take_sample<MeanQ::kRows, false, Element>(p.q, tokens, p.head_dim, sample);
  if (threadIdx.x < kHeadDim) {
    // Rows that are no numbers shall not make others such.
    const float mean = fabsf(sample.mean[threadIdx.x]) < INFINITY ? sample.mean[threadIdx.x] : 0.0f;
    reinterpret_cast<uint16_t*>(p.q_mean)[int64_t{blockIdx.x} * kHeadDim + threadIdx.x] = Pair<Element>::pack(mean, 0.0f);
  }
}

}  // namespace sage
