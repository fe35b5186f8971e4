// A call of FP4 attention on the CPU, as csrc/torch/attention.cpp makes it: the same kernels in the same order.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/attention/sm120_qk_fp4_pv_fp4.h"
#include "kernels/quant/mean_q.h"
#include "kernels/quant/mean_scores.h"
#include "kernels/quant/quant_k_fp4.h"
#include "kernels/quant/quant_v_fp4.h"
#include "kernels/sequences.h"

// launch.cpp defines them, one for each kernel.
extern "C" void launch_quant_k_fp4(const void* params, int grid, int threads);
extern "C" void launch_quant_v_fp4(const void* params, int grid, int threads);
extern "C" void launch_mean_q(const void* params, int grid, int threads);
extern "C" void launch_mean_scores(const void* params, int grid, int threads);
extern "C" void launch_sm120_qk_fp4_pv_fp4(const void* params, int grid, int threads);

namespace {

// Memory that starts on 64 bytes, full of NaN: what is read unwritten shows.
template <typename T>
class Workspace {
 public:
  explicit Workspace(int64_t count) : data_(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64))) {
    std::memset(data_, 0xff, count * sizeof(T));
  }
  ~Workspace() { std::free(data_); }
  Workspace(const Workspace&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

}  // namespace

struct Arguments {
  // [batch, heads, tokens, channels], or of packed sequences [tokens, heads, channels]; contiguous
  uint16_t *q, *k, *v, *out;
  float* lse;
  const uint8_t* mask;  // [batch, q_heads, qo_len, kv_len] bool; null: none
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // null: not packed
  int32_t batch, q_heads, kv_heads, qo_len, kv_len, head_dim, v_head_dim;  // batch: or sequences
  int32_t causal, smooth_k, smooth_v, per_block_mean;
  float sm_scale;
};

extern "C" void fp4_attention(const Arguments& a) {
  using namespace sage;
  constexpr int d = SAGE_HEAD_DIM;
  const bool packed = a.cu_seqlens_q != nullptr;
  const auto view = [&](uint16_t* data, int64_t heads, int64_t tokens, int64_t channels) {
    const int32_t aligned = channels % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
    return packed ? TensorView{data, 0, channels, heads * channels, aligned}
                  : TensorView{data, heads * tokens * channels, tokens * channels, channels, aligned};
  };
  const int64_t spans = packed ? slots(a.kv_len, a.batch, QuantKInt8::kSpanN) : int64_t{a.batch} * QuantKInt8::spans(a.kv_len);
  const int row_blocks = (a.qo_len + MeanQ::kRows - 1) / MeanQ::kRows;
  const int means = a.per_block_mean && !packed ? row_blocks : 1;
  const int together = packed ? 1 : 2;
  const int blocks = packed ? spans * a.kv_heads : a.batch * a.kv_heads * ((QuantKInt8::spans(a.kv_len) + together - 1) / together);
  const Workspace<uint8_t> k_fp4(spans * a.kv_heads * 2 * Fp4::k_block(d)), v_fp4(spans * a.kv_heads * 2 * Fp4::v_block(d));
  const Workspace<float> v_scale(spans * a.kv_heads * 2 * QuantV::scales(d));
  const Workspace<float> k_mean(int64_t{a.batch} * a.kv_heads * d), v_mean(int64_t{a.batch} * a.kv_heads * d);
  const Workspace<uint8_t> q_mean(int64_t{a.batch} * a.q_heads * means * d * 2);
  const Workspace<float> mean_scores(spans * a.q_heads * means * MeanScores::kSpanN);
  const float scale_log2 = static_cast<float>(a.sm_scale * 1.4426950408889634);

  QuantKFp4::Params k{};
  k.k = view(a.k, a.kv_heads, a.kv_len, a.head_dim);
  k.k_fp4 = k_fp4.get();
  k.k_mean = a.smooth_k ? k_mean.get() : nullptr;
  k.kv_heads = a.kv_heads;
  k.kv_len = a.kv_len;
  k.head_dim = a.head_dim;
  k.sequences = a.batch;
  k.together = together;
  k.cu_seqlens = a.cu_seqlens_k;
  launch_quant_k_fp4(&k, blocks, QuantKFp4::kThreads);

  MeanQ::Params mean{};
  mean.q = view(a.q, a.q_heads, a.qo_len, a.head_dim);
  mean.q_mean = q_mean.get();
  mean.q_heads = a.q_heads;
  mean.qo_len = a.qo_len;
  mean.head_dim = a.head_dim;
  mean.means = means;
  mean.cu_seqlens = a.cu_seqlens_q;
  launch_mean_q(&mean, a.batch * a.q_heads * means, MeanQ::kThreads);

  MeanScores::Params score{};
  score.k = k.k;
  score.q_mean = q_mean.get();
  score.k_mean = k.k_mean;
  score.scores = mean_scores.get();
  score.q_heads = a.q_heads;
  score.kv_heads = a.kv_heads;
  score.kv_len = a.kv_len;
  score.head_dim = a.head_dim;
  score.sequences = a.batch;
  score.means = means;
  score.scale_log2 = scale_log2;
  score.cu_seqlens = a.cu_seqlens_k;
  launch_mean_scores(&score, spans * a.q_heads, MeanScores::kThreads);

  QuantVFp4::Params v{};
  v.v = view(a.v, a.kv_heads, a.kv_len, a.v_head_dim);
  v.v_quantised = v_fp4.get();
  v.v_scale = v_scale.get();
  v.v_mean = a.smooth_v ? v_mean.get() : nullptr;
  v.kv_heads = a.kv_heads;
  v.kv_len = a.kv_len;
  v.head_dim = a.v_head_dim;
  v.sequences = a.batch;
  v.together = together;
  v.cu_seqlens = a.cu_seqlens_k;
  launch_quant_v_fp4(&v, blocks, QuantV::threads(d));

  Sm120QkFp4PvFp4::Params p{};
  p.q = mean.q;
  p.v = v.v;
  p.out = view(a.out, a.q_heads, a.qo_len, a.v_head_dim);
  p.k_mean = k.k_mean;
  p.lse = a.lse;
  p.heads_together = a.q_heads / a.kv_heads;
  p.batch = a.batch;
  p.q_heads = a.q_heads;
  p.kv_heads = a.kv_heads;
  p.qo_len = a.qo_len;
  p.kv_len = a.kv_len;
  p.head_dim = a.head_dim;
  p.v_head_dim = a.v_head_dim;
  p.causal = a.causal;
  p.scale_log2 = scale_log2;
  p.v_quantised = v_fp4.get();
  p.v_scale = v_scale.get();
  p.v_mean = v.v_mean;
  p.cu_seqlens_q = a.cu_seqlens_q;
  p.cu_seqlens_k = a.cu_seqlens_k;
  p.k_fp4 = k_fp4.get();
  p.q_mean = q_mean.get();
  p.mean_scores = mean_scores.get();
  p.means = means;
  // Every tile of a mask is to be looked at, as if mask_tiles had found it so.
  const int64_t key_tiles = (a.kv_len + 63) / 64;
  const std::vector<uint8_t> tiles(int64_t{a.batch} * a.q_heads * row_blocks * key_tiles, AttentionMask::kMixed);
  if (a.mask != nullptr) {
    p.mask.data = a.mask;
    p.mask.tiles = tiles.data();
    p.mask.batch_stride = int64_t{a.q_heads} * a.qo_len * a.kv_len;
    p.mask.head_stride = int64_t{a.qo_len} * a.kv_len;
    p.mask.row_stride = a.kv_len;
    p.mask.key_stride = 1;
    p.mask.tiles_batch_stride = a.q_heads * row_blocks * key_tiles;
    p.mask.tiles_head_stride = row_blocks * key_tiles;
    p.mask.tiles_row_stride = key_tiles;
    p.mask.tile_rows = MeanQ::kRows;
    p.mask.type = AttentionMask::kBool;
  }
  const int64_t row_tiles = packed ? slots(a.qo_len, a.batch + 1, MeanQ::kRows) : int64_t{a.batch} * row_blocks;
  launch_sm120_qk_fp4_pv_fp4(&p, row_tiles * a.q_heads, Sm120QkFp4PvFp4::threads(d));
}
