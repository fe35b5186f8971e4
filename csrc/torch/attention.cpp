#include "torch/attention.h"

#include <algorithm>
#include <limits>

#include "kernels/attention/params.h"
#include "kernels/attention/sm120_qk_fp4_pv_fp4.h"
#include "kernels/attention/sm90_qk_int8_pv_f16_masked.h"
#include "kernels/mask/mask_tiles.h"
#include "runtime/tensor_map.h"
#include "torch/call.h"
#include "torch/few_tokens.h"
#include "torch/hopper_in_16_bits.h"
#include "torch/mask.h"
#include "torch/plan/tiles_in_16_bits.h"
#include "torch/plan/tiling.h"
#include "torch/quantise.h"
#include "torch/workspace.h"

namespace sage {

namespace {

// Packed sequences as a batch of one.
Tensor batched(const Tensor& x) {
  return x.as_strided({1, x.size(0), x.size(1), x.size(2)}, {x.numel(), x.stride(0), x.stride(1), x.stride(2)});
}

AttentionParams attention_params(const Call& call, const Tensor& out, const Tensor& lse, const Workspace& workspace) {
  AttentionParams params{};
  fill_in(call, out, lse, params);
  params.heads_together = call.heads_together();
  params.last_heads = call.last_heads();
  params.k_int8 = workspace.k_int8;
  params.k_scale = workspace.k_scale;
  params.k_mean = workspace.k_mean;
  params.q_factor = workspace.q_factor;
  params.rotated = workspace.rotated;
  params.v_quantised = workspace.v;
  params.v_scale = workspace.v_scale;
  params.v_mean = workspace.v_mean;
  params.cu_seqlens_q = data_or_null<int32_t>(call.cu_seqlens_q);
  params.cu_seqlens_k = data_or_null<int32_t>(call.cu_seqlens_k);
  return params;
}

// Throws ValueError where the kernel cannot do what is asked of it.
void check_kernel(const Call& call) {
  const AttentionKernel& kernel = call.kernel;
  const runtime::Architecture built_for = runtime::KernelStore::get().device(call.device()).built_for;
  TORCH_CHECK_VALUE(kernel.that_alone ? built_for.number == kernel.since && built_for.that_alone : built_for.number >= kernel.since,
                    "kernel: ", kernel.name, " is compiled for sm_", kernel.since, kernel.that_alone ? "a alone" : " and later",
                    "; here is ", runtime::KernelStore::get().architecture(call.device()));
  TORCH_CHECK_VALUE((!kernel.wgmma_int8 && !kernel.in_16_bits) || (call.shape.head_dim % 8 == 0 && call.shape.v_head_dim % 8 == 0),
                    "q, v: the kernel ", kernel.name, " wants multiples of 8 as head_dim, got ", call.shape.head_dim, " and ",
                    call.shape.v_head_dim);
}

void run(Call& call, const Tensor& out, const Tensor& lse, const std::optional<Tensor>& attn_mask) {
  if (out.numel() == 0) {
    if (attn_mask.has_value()) static_cast<void>(described(call, *attn_mask));  // a wrong one is refused all the same
    return;
  }
  if (call.shape.kv_len == 0 || call.shape.batch == 0) {  // of packed sequences: no query sees a key
    out.zero_();
    if (lse.numel() > 0) lse.fill_(-std::numeric_limits<float>::infinity());
    return;
  }
  const AttentionKernel& kernel = call.kernel;
  call.stream = current_stream(call.device());
  if (kernel.in_16_bits) {
    TORCH_CHECK_VALUE(call.scales_up(), "sm_scale: the kernel ", kernel.name, " wants a positive number, 1e-38 at least, got ", call.sm_scale);
    const TilesIn16Bits tiles = tiles_in_16_bits(call.shape, call.options.is_causal, form_of(call, attn_mask), call.multiprocessors());
    attend_in_16_bits(call, attn_mask, tiles.rows, out, lse);
    return;
  }
  LookedAt looked;
  if (attn_mask.has_value()) looked = look_at_mask(call, *attn_mask);
  const int32_t head_dim = call.head_dim();
  const bool masked = kernel.wgmma_int8 && attn_mask.has_value();
  if (kernel.wgmma_int8) {
    make_readable(call, call.q);
    make_readable(call, call.v);
  }
  const Tiling tiling = tiling_of(call, call.multiprocessors(), masked ? form_of(looked.mask) : MaskForm::kNone);
  const Workspace workspace(call, tiling);
  if (kernel.fp4) {
    find_means(call, workspace, looked.seen);
    quantise_kv_fp4(call, workspace, looked.seen);
  } else {
    quantise_k(call, workspace, looked.seen, tiling);
    if (kernel.quant_v != nullptr) quantise_v(call, workspace, looked.seen);
  }
  AttentionParams params = attention_params(call, out, lse, workspace);
  params.mask = looked.mask;

  const char* name = masked ? kernel.masked : call.packed() ? kernel.packed : kernel.name;
  const auto launch_it = [&](void* with) {
    const int32_t shared_bytes = masked ? Sm90QkInt8PvF16Masked::shared_bytes(head_dim) : kernel.shared_bytes(head_dim);
    launch(call, name, tiling.blocks, kernel.threads(head_dim), with, shared_bytes, tiling.cluster);
  };
  if (kernel.fp4) {
    Sm120QkFp4PvFp4::Params extended{};
    static_cast<AttentionParams&>(extended) = params;
    extended.k_fp4 = workspace.k_fp4;
    extended.q_mean = workspace.q_mean;
    extended.mean_scores = workspace.mean_scores;
    extended.means = call.means();
    extended.seen = looked.seen;
    launch_it(&extended);
  } else if (!kernel.wgmma_int8) {
    launch_it(&params);
  } else {
    using Kernel = Sm90QkInt8PvF16;
    Kernel::Params mapped{};
    static_cast<AttentionParams&>(mapped) = params;
    mapped.next_tile = workspace.next_tile;
    mapped.tile_rows = tiling.tile_rows();
    mapped.tiles_of_head = tiles_of_head(call.shape, mapped.tile_rows);
    mapped.tiles = tiling.tiles;
    mapped.first_rows_first = tiling.first_rows_first;
    mapped.items = tiling.items;
    mapped.parted_tiles = tiling.parted_tiles;
    mapped.parts = tiling.parts;
    mapped.partials = workspace.partials;
    mapped.arrived = workspace.next_tile + 1;
    // Packed sequences are one batch element of all tokens.
    const int32_t batch = call.packed() ? 1 : params.batch;
    if (Kernel::keeps_q(head_dim)) {
      mapped.q_map = runtime::encode_tensor_map(call.device(), params.q, batch, params.q_heads, params.qo_len, params.head_dim,
                                                Kernel::kRows);
    }
    mapped.v_map = runtime::encode_tensor_map(call.device(), params.v, batch, params.kv_heads, params.kv_len, params.v_head_dim,
                                              Kernel::kBlockN);
    if (masked && looked.mask.type != AttentionMask::kBool) {
      const auto elements = [](int64_t bytes) { return bytes / 2; };
      const TensorView rows{looked.data.data_ptr(), elements(looked.mask.batch_stride), elements(looked.mask.head_stride),
                            elements(looked.mask.row_stride), 1};
      mapped.mask_map = runtime::encode_tensor_map(call.device(), rows, looked.batch, looked.heads, looked.rows, params.kv_len,
                                                   MaskTiles::kWgmmaRows);
    }
    launch_it(&mapped);
  }
}

}  // namespace

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& attn_mask,
                                     double sm_scale, int64_t bits) {
  const AttentionOptions options(bits);
  const AttentionKernel& kernel = attention_kernel(options.kernel);
  Call call{kernel, check_attention(q, k, v, options.heads_first), q, k, v, {}, {}, sm_scale, options};
  TORCH_CHECK_VALUE(call.shape.kv_len >= 1 || q.numel() == 0, "k: expected at least one token, got none");
  check_kernel(call);
  // No query sees those further on, as of a cache that is not full.
  const int32_t keys = options.is_causal ? std::max(1, std::min(call.shape.kv_len, call.shape.qo_len)) : call.shape.kv_len;
  std::optional<Tensor> cut;
  if (attn_mask.has_value() && keys < call.shape.kv_len) cut = of_first_keys(call, *attn_mask, keys);
  const std::optional<Tensor>& mask = cut.has_value() ? cut : attn_mask;
  call.shape.kv_len = keys;
  if (const auto result = attention_of_few_tokens(call, mask)) return *result;
  const auto [out, lse] = call.outputs();
  run(call, out, lse, mask);
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                                            const Tensor& cu_seqlens_k, double sm_scale, int64_t bits) {
  AttentionOptions options(bits);
  options.heads_first = false;  // of packed sequences they never are
  const AttentionKernel& kernel = attention_kernel(options.kernel);
  TORCH_CHECK_VALUE(kernel.packed != nullptr, "kernel: ", kernel.name, " takes no packed sequences");
  check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q);
  check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q);
  TORCH_CHECK_VALUE(cu_seqlens_k.size(0) == cu_seqlens_q.size(0), "cu_seqlens_k: expected ", cu_seqlens_q.size(0),
                    " elements as cu_seqlens_q, got ", cu_seqlens_k.size(0));
  for (const Tensor* tensor : {&q, &k, &v}) {
    TORCH_CHECK_VALUE(tensor->dim() == 3, "q, k, v: expected [tokens, heads, head_dim], got ", tensor->sizes());
  }
  Call call{kernel, {}, batched(q), batched(k), batched(v), cu_seqlens_q, cu_seqlens_k, sm_scale, options};
  call.shape = check_attention(call.q, call.k, call.v, options.heads_first);
  call.shape.batch = static_cast<int32_t>(cu_seqlens_q.size(0) - 1);
  check_kernel(call);
  const Tensor out = call.empty({q.size(0), q.size(1), v.size(2)}, q.scalar_type());
  const Tensor lse = options.return_lse ? call.empty({q.size(1), q.size(0)}, kFloat) : call.empty({0}, kFloat);
  run(call, batched(out), lse, std::nullopt);
  return {out, lse};
}

}  // namespace sage
