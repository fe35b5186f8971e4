#include "torch/quantise.h"

#include "kernels/quant/means.h"
#include "kernels/quant/quant_k_int8.h"
#include "kernels/quant/quant_kv_fp4.h"
#include "kernels/quant/quant_v.h"

namespace sage {

namespace {

// `together` spans a block of threads.
template <typename Params>
Params quantisation(const Call& call, const SeenKeys::Words& seen, int32_t head_dim, int32_t together) {
  Params params{};
  params.kv_heads = call.shape.kv_heads;
  params.kv_len = call.shape.kv_len;
  params.head_dim = head_dim;
  params.sequences = call.shape.batch;
  params.together = together;
  params.lots = call.lots(together);
  params.cu_seqlens = data_or_null<int32_t>(call.cu_seqlens_k);
  if (call.options.is_causal) params.cu_seqlens_q = data_or_null<int32_t>(call.cu_seqlens_q);
  params.seen = seen;
  return params;
}

QuantV::Params quantisation_of_v(const Call& call, const Workspace& workspace, const SeenKeys::Words& seen) {
  auto params = quantisation<QuantV::Params>(call, seen, call.shape.v_head_dim, call.spans_together());
  params.v = call.view(call.v);
  params.v_quantised = workspace.v;
  params.v_scale = workspace.v_scale;
  params.v_mean = workspace.v_mean;
  return params;
}

}  // namespace

void quantise_k(const Call& call, const Workspace& workspace, const SeenKeys::Words& seen, const Tiling& tiling) {
  auto params = quantisation<QuantKInt8::Params>(call, seen, call.shape.head_dim, call.spans_together());
  params.k = call.view(call.k);
  params.k_int8 = workspace.k_int8;
  params.k_scale = workspace.k_scale;
  params.k_mean = workspace.k_mean;
  params.q = call.view(call.q);
  params.q_factor = workspace.q_factor;
  params.rotated = workspace.rotated;
  params.group = call.shape.q_heads / call.shape.kv_heads;
  params.qo_len = call.shape.qo_len;
  params.cu_seqlens_of_q = data_or_null<int32_t>(call.cu_seqlens_q);
  params.next_tile = workspace.next_tile;
  params.first_tile = static_cast<int32_t>(tiling.blocks) / tiling.cluster;
  params.zeros = workspace.arrivals;
  launch(call, "quant_k_int8", call.kv_blocks(), QuantKInt8::kThreads, &params);
}

void quantise_v(const Call& call, const Workspace& workspace, const SeenKeys::Words& seen) {
  auto params = quantisation_of_v(call, workspace, seen);
  launch(call, call.kernel.quant_v, call.kv_blocks(), QuantV::threads(call.head_dim()), &params);
}

void find_means(const Call& call, const Workspace& workspace, const SeenKeys::Words& seen) {
  const AttentionShape& shape = call.shape;
  Means::Params params{};
  params.q = call.view(call.q);
  params.k = call.view(call.k);
  params.q_mean = workspace.q_mean;
  params.k_mean = workspace.k_mean;
  params.q_heads = shape.q_heads;
  params.kv_heads = shape.kv_heads;
  params.qo_len = shape.qo_len;
  params.kv_len = shape.kv_len;
  params.head_dim = shape.head_dim;
  params.means = call.means();
  params.cu_seqlens_q = data_or_null<int32_t>(call.cu_seqlens_q);
  params.cu_seqlens_k = data_or_null<int32_t>(call.cu_seqlens_k);
  params.causal = call.packed() && call.options.is_causal ? 1 : 0;
  params.seen = seen;
  const int64_t q_blocks = int64_t{shape.batch} * shape.q_heads * call.means();
  const int64_t k_blocks = call.options.smooth_k ? int64_t{shape.batch} * shape.kv_heads : 0;
  params.q_blocks = static_cast<int32_t>(q_blocks);
  launch(call, "means", q_blocks + k_blocks, Means::kThreads, &params);
}

void quantise_kv_fp4(const Call& call, const Workspace& workspace, const SeenKeys::Words& seen) {
  QuantKvFp4::Params params{};
  params.v = quantisation_of_v(call, workspace, seen);
  params.v_blocks = static_cast<int32_t>(call.kv_blocks());
  params.k_blocks = static_cast<int32_t>(call.kv_spans());
  params.k = quantisation<QuantKFp4::Params>(call, seen, call.shape.head_dim, 1);
  params.k.k = call.view(call.k);
  params.k.k_fp4 = workspace.k_fp4;
  params.k.k_mean = workspace.k_mean;
  params.k.q_mean = workspace.q_mean;
  params.k.mean_scores = workspace.mean_scores;
  params.k.q_heads = call.shape.q_heads;
  params.k.means = call.means();
  params.k.parts = call.parts();
  params.k.causal = call.options.is_causal ? 1 : 0;
  params.k.scale_log2 = call.scale_log2();
  launch(call, call.kernel.quant_v, call.kv_blocks() + call.parts() * call.kv_spans(), QuantKvFp4::threads(call.head_dim()), &params);
}

}  // namespace sage
