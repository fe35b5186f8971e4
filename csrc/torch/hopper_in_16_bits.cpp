#include "torch/hopper_in_16_bits.h"

#include <algorithm>

#include "kernels/attention/sm90_qk_f16_pv_f16_masked.h"
#include "runtime/tensor_map.h"
#include "torch/plan/tiles_in_16_bits.h"

namespace sage {

bool can_in_16_bits(const Call& call, const std::optional<Tensor>& attn_mask) {
  return call.scales_up() && (!attn_mask.has_value() || has_hoppers_type(call, *attn_mask));
}

void attend_in_16_bits(Call& call, const std::optional<Tensor>& attn_mask, int32_t tile_rows, const Tensor& out, const Tensor& lse) {
  using Kernel = Sm90QkF16PvF16;
  for (Tensor* tensor : {&call.q, &call.k, &call.v}) make_readable(call, *tensor);
  const AttentionShape& shape = call.shape;
  const int32_t head_dim = head_dim_in_16_bits(shape), multiprocessors = call.multiprocessors();
  Kernel::Params params{};
  fill_in(call, out, lse, params);
  params.tile_rows = tile_rows;
  params.tiles_of_head = tiles_of_head(shape, tile_rows);
  params.tiles = static_cast<int32_t>(grid_size(int64_t{params.tiles_of_head} * shape.batch * shape.q_heads));
  const int32_t in_turn = heads_in_turn(params.tiles_of_head, multiprocessors);
  const bool turns = !call.options.is_causal && in_turn < call.heads_together();
  params.heads_together = turns ? in_turn : call.heads_together();
  params.last_heads = turns ? call.all_heads() % in_turn : call.last_heads();
  const bool masked = attn_mask.has_value();
  if (masked) {
    check_hoppers_type(call, *attn_mask);
    params.mask = described(call, *attn_mask);
    params.mask.tile_rows = tile_rows;  // of tiles that nobody has looked at
    const auto size = static_cast<int32_t>(attn_mask->element_size());
    params.mask_bytes = has_even_rows(params.mask, size) ? 16 : has_even_rows(params.mask, size, 4) ? 4 : size;
  }
  const auto map = [&](const TensorView& x, int32_t heads, int32_t tokens, int32_t channels) {
    static_assert(Kernel::kRows == Kernel::kBlockN);
    return runtime::encode_tensor_map(call.device(), x, shape.batch, heads, tokens, channels, Kernel::kBlockN);
  };
  params.q_map = map(params.q, shape.q_heads, shape.qo_len, shape.head_dim);
  params.k_map = map(call.view(call.k), shape.kv_heads, shape.kv_len, shape.head_dim);
  params.v_map = map(params.v, shape.kv_heads, shape.kv_len, shape.v_head_dim);
  launch_instance(call, masked ? "sm90_qk_f16_pv_f16_masked" : "sm90_qk_f16_pv_f16", head_dim, std::min(params.tiles, multiprocessors), Kernel::threads(head_dim),
                  &params, masked ? Sm90QkF16PvF16Masked::shared_bytes(head_dim) : Kernel::shared_bytes(head_dim));
}

}  // namespace sage
