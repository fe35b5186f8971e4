// Attention of few tokens in 16 bits, float32 sums (sm_80 on): what quantising would save there is less than it takes.
//
// A warp computes 16 rows of the output.
#include "kernels/attention/sm80_qk_f16_pv_f16.h"

#include "kernels/attention/mma_sync_in_16_bits/warp.cuh"
#include "kernels/ptx/grid.cuh"

namespace sage {

// What a warp computes. Strips are numbered through the rows of a head, then the heads, which may lie next to each other, then the batch.
struct Strip {
  int batch, head, kv_head, first_row;
  int64_t lse;  // where its head's begins

  __device__ __forceinline__ Strip(const Config::Params& p, int none) {
    const int index = static_cast<int>(blockIdx.x) * Config::kWarps + threadIdx.x / 32 + none;
    const int of_head = (p.qo_len + Config::kWarpM - 1) / Config::kWarpM;
    const int batch_head = index / of_head;
    batch = batch_head / p.q_heads;
    head = batch_head % p.q_heads;
    kv_head = head / (p.q_heads / p.kv_heads);
    first_row = index % of_head * Config::kWarpM;
    lse = int64_t{batch_head} * p.qo_len;
  }
};

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::warps_per_sm(SAGE_HEAD_DIM) / Config::kWarps)
    sm80_qk_f16_pv_f16(const __grid_constant__ Config::Params p) {
  using Element = Config::Element;
  const int lane = threadIdx.x % 32;
  const Strip strip(p, 0);
  ptx::grid_dependency_wait();
  const int batch = strip.batch, head = strip.head, kv_head = strip.kv_head, first_row = strip.first_row;
  if (batch >= p.batch) return;
  const auto* k_head = row_pointer<Element>(p.k, batch, kv_head, 0);
  const auto* v_head = row_pointer<Element>(p.v, batch, kv_head, 0);

  const struct {
    const Config::Params& p;
    const Element* q_head;
    int batch, head, first_row;

    __device__ __forceinline__ void load_q(uint32_t (&words)[2][4], int piece) const {
#pragma unroll
      for (int row = 0; row < 2; ++row) load_piece(words[row], p.q, q_head, first_row + row * 8, p.qo_len, piece, p.head_dim);
    }
    __device__ __forceinline__ const uint8_t* mask(int row) const {
      return mask_row(p.mask, batch, head, 0) + min(first_row + row * 8, p.qo_len - 1) * p.mask.row_stride;
    }
    __device__ __forceinline__ int last_key(int row) const { return first_row + row * 8; }
  } rows{p, row_pointer<Element>(p.q, batch, head, 0), batch, head, first_row + lane / 4};
  const int keys = p.causal ? min(p.kv_len, first_row + Config::kWarpM) : p.kv_len;
  Sums sums;
  attend(sums, p, rows, AllKeys{keys}, FromMemory(KeysOfHead{p, k_head, v_head}));

  int none = 0;
  ptx::keep(none);  // so that it is found anew, and takes no registers meanwhile
  const Strip last(p, none);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    sums.sum[row] = sum_of_quad(sums.sum[row]);
    const int token = last.first_row + lane / 4 + row * 8;
    if (token >= p.qo_len) continue;
    store_row(sums, row, row_pointer<Element>(p.out, last.batch, last.head, token), p.v_head_dim);
    if (p.lse != nullptr && lane % 4 == 0) p.lse[last.lse + token] = log_sum_exp(sums.largest[row], sums.sum[row], p.level);
  }
}

}  // namespace sage
