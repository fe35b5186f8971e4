// What is subtracted before quant_kv_fp4 and attention quantise: the mean of each 128 rows of Q, or of as many out of a sequence, and of a sample of
// K. Attention adds the product of Q's mean with K to the scores, and softmax does not see K's, so any estimates will do; tokens weigh less the
// further they lie from the others. A block of threads finds one mean.
#include "kernels/quant/means.h"

#include "kernels/ptx/grid.cuh"
#include "kernels/quant/kv_span.cuh"

namespace sage {

struct Config : Means {
  using Element = SAGE_DTYPE;
  static constexpr int kHeadDim = SAGE_HEAD_DIM;
  using Sample = sage::Sample<kHeadDim, kThreads>;
};

// All tokens of a head, number `index` of those of all batch elements or packed sequences.
__device__ __forceinline__ KvSpan all_tokens(const int32_t* cu_seqlens, int index, int heads, int tokens) {
  KvSpan all;
  const int sequence = index / heads;
  all.batch = cu_seqlens == nullptr ? sequence : 0;
  all.head = index % heads;
  all.first_token = 0;
  all.length = tokens;
  if (cu_seqlens != nullptr) {
    const int first = min(max(cu_seqlens[sequence], 0), tokens);
    all.first_token = first;
    all.length = min(max(cu_seqlens[sequence + 1], first), tokens) - first;
  }
  return all;
}

__device__ __forceinline__ void mean_of_q(const Config::Params& p, int index, Config::Sample& sample) {
  using Element = Config::Element;
  KvSpan tokens = all_tokens(p.cu_seqlens_q, index / p.means, p.q_heads, p.qo_len);
  if (p.means > 1) {
    tokens.first_token = index % p.means * Config::kRows;
    tokens.length = min(Config::kRows, p.qo_len - index % p.means * Config::kRows);
  }
  if (tokens.length == 0) return;
  take_sample<Config::kRows, false, Element>(p.q, tokens, p.head_dim, SeenByQueries(), sample);
  if (threadIdx.x < Config::kHeadDim) {
    // Rows that are no numbers shall not make others such.
    const float mean = fabsf(sample.mean[threadIdx.x]) < INFINITY ? sample.mean[threadIdx.x] : 0.0f;
    reinterpret_cast<uint16_t*>(p.q_mean)[int64_t{index} * Config::kHeadDim + threadIdx.x] = Pair<Element>::pack(mean, 0.0f);
  }
}

__device__ __forceinline__ void mean_of_k(const Config::Params& p, int index, Config::Sample& sample) {
  using Element = Config::Element;
  KvSpan tokens = all_tokens(p.cu_seqlens_k, index, p.kv_heads, p.kv_len);
  if (p.causal) tokens.length = min(tokens.length, all_tokens(p.cu_seqlens_q, index, p.kv_heads, p.qo_len).length);
  if (tokens.length == 0) return;
  take_sample<Config::kSampledKeys, false, Element>(p.k, tokens, p.head_dim, SeenByQueries(p.seen, tokens.batch), sample);
  if (threadIdx.x < Config::kHeadDim) {
    const uint32_t rounded = Pair<Element>::pack(sample.mean[threadIdx.x], 0.0f);
    p.k_mean[int64_t{index} * Config::kHeadDim + threadIdx.x] = Pair<Element>::unpack(rounded).x;
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) means(const __grid_constant__ Config::Params p) {
  __shared__ Config::Sample sample;
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int block = blockIdx.x;
  if (block < p.q_blocks) {
    mean_of_q(p, block, sample);
  } else {
    mean_of_k(p, block - p.q_blocks, sample);
  }
}

}  // namespace sage
