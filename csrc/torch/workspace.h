// What a call needs of memory between its kernels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/attention/sm120_qk_fp4_pv_fp4.h"
#include "kernels/attention/sm90_qk_int8_pv_f16.h"
#include "kernels/quant/quant_k_int8.h"
#include "kernels/quant/quant_kv_fp4.h"
#include "kernels/quant/quant_v.h"
#include "torch/call.h"
#include "torch/plan/tiling.h"
#include "torch/tensor.h"

namespace sage {

// K and V as the attention kernel takes them, with their scales and the means that were subtracted (null without smoothing), and the
// counter of tiles: parts of one tensor, since PyTorch takes a microsecond for each.
struct Workspace {
  Tensor memory;
  int8_t* k_int8 = nullptr;
  float *k_scale = nullptr, *k_mean = nullptr, *q_factor = nullptr;
  int32_t* rotated = nullptr;
  uint8_t *v = nullptr, *v_scale = nullptr;
  float* v_mean = nullptr;
  int32_t* next_tile = nullptr;  // and behind it how many parts of parted tiles have arrived
  float* partials = nullptr;     // what they leave
  uint8_t *k_fp4 = nullptr, *q_mean = nullptr;  // these and their scores: of FP4 alone
  float* mean_scores = nullptr;

  int32_t arrivals = 0;

  Workspace(const Call& call, const Tiling& tiling) {
    const int64_t spans = call.kv_spans(), head_dim = call.head_dim();
    const int64_t means = int64_t{call.shape.batch} * call.shape.kv_heads * head_dim;
    constexpr int64_t kBlocks = QuantKInt8::kSpanN / QuantKInt8::kBlockN;
    uint8_t* base = nullptr;
    int64_t bytes = 0;
    const auto take = [&](auto*& part, int64_t count) {
      if (base != nullptr && count > 0) part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(base + bytes);
      bytes += (count * static_cast<int64_t>(sizeof *part) + 255) / 256 * 256;
    };
    const auto lay_out = [&] {
      bytes = 0;
      if (call.kernel.fp4) {
        take(k_fp4, spans * kBlocks * Fp4::k_block(call.head_dim()));
        take(q_mean, int64_t{call.shape.batch} * call.shape.q_heads * call.means() * head_dim * 2);
        take(mean_scores, call.kv_spans_of(call.shape.q_heads) * call.means() * QuantKFp4::kSpanN);
      } else {
        take(k_int8, spans * QuantKInt8::kSpanN * head_dim);
        take(k_scale, spans * kBlocks * QuantKInt8::kScales);
        take(q_factor, call.options.smooth_k ? means : 0);
        take(rotated, call.options.smooth_k ? means / head_dim : 0);
      }
      take(k_mean, call.options.smooth_k ? means : 0);
      if (call.kernel.quant_v != nullptr) {
        take(v, spans * kBlocks * call.kernel.v_block_bytes(call.head_dim()));
        take(v_scale, spans * kBlocks * call.kernel.v_scale_bytes(call.head_dim()));
        take(v_mean, call.options.smooth_v && call.kernel.v_smooths ? means : 0);
      }
      take(next_tile, call.kernel.wgmma_int8 ? 1 + arrivals : 0);
      take(partials, int64_t{arrivals} * tiling.parts * Sm90QkInt8PvF16::partial_floats(call.head_dim()) * 32);
    };
    arrivals = static_cast<int32_t>(int64_t{tiling.parted_tiles} * tiling.cluster * Sm90QkInt8PvF16::consumer_warps(call.head_dim()));
    lay_out();
    memory = call.empty({bytes}, kByte);
    base = data_or_null<uint8_t>(memory);
    lay_out();
  }
};
static_assert(QuantV::kSpanN == QuantKInt8::kSpanN && QuantV::kBlockN == QuantKInt8::kBlockN && QuantKFp4::kSpanN == QuantV::kSpanN &&
              QuantKFp4::kBlockN == QuantV::kBlockN);

}  // namespace sage
