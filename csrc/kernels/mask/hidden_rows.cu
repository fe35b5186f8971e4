// Zeros, and a log-sum-exp of -infinity, for rows all of whose keys a mask hides by large negative numbers, in what PyTorch's attention has computed:
// there such a row is the mean of V.
#include "kernels/mask/hidden_rows.h"

#include "kernels/attention/mask_value.cuh"
#include "kernels/element.cuh"
#include "kernels/ptx/grid.cuh"

namespace sage {

// Whether all keys of a row are hidden, in all lanes.
__device__ __forceinline__ bool sees_nothing(const HiddenRows::Params& p, const uint8_t* row) {
  bool sees = false;
  for (int key = threadIdx.x % 32; key < p.kv_len; key += 32) sees |= mask_value(p.mask.type, row + key * p.mask.key_stride) != -INFINITY;
  return !__any_sync(0xffffffffu, sees);
}

extern "C" __global__ void __launch_bounds__(HiddenRows::kThreads) hidden_rows(const __grid_constant__ HiddenRows::Params p) {
  // What a row's log-sum-exp may be if all keys are hidden: by float16's least number, or less. Few others are.
  constexpr float kSuspicious = -3e4f;
  ptx::grid_dependency_wait();
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * HiddenRows::kThreads + threadIdx.x, rows = int64_t{p.batch} * p.heads * p.qo_len;
  uint32_t suspicious = __ballot_sync(0xffffffffu, row < rows && p.lse[row] <= kSuspicious);
  while (suspicious != 0) {
    const int of_warp = __ffs(static_cast<int>(suspicious)) - 1;
    suspicious &= suspicious - 1;
    const int64_t hidden = row - lane + of_warp, batch_head = hidden / p.qo_len;
    const int token = static_cast<int>(hidden % p.qo_len);
    const int batch = static_cast<int>(batch_head / p.heads), head = static_cast<int>(batch_head % p.heads);
    if (!sees_nothing(p, mask_row(p.mask, batch, head, token))) continue;
    auto* to = const_cast<uint16_t*>(row_pointer<uint16_t>(p.out, batch, head, token));
    for (int channel = lane * 8; channel < p.v_head_dim; channel += 32 * 8) *reinterpret_cast<uint4*>(to + channel) = make_uint4(0, 0, 0, 0);
    if (lane == 0) p.lse[hidden] = -INFINITY;
  }
}

}  // namespace sage
