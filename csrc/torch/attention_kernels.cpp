#include "torch/attention_kernels.h"

#include <c10/util/Exception.h>

#include <string>

#include "kernels/attention/sm80_qk_int8_pv_f16.h"
#include "kernels/attention/sm80_qk_int8_pv_f16_accum_f16.h"
#include "kernels/attention/sm89_qk_int8_pv_f8.h"
#include "kernels/attention/sm89_qk_int8_pv_f8_accum_f16.h"
#include "kernels/attention/sm90_qk_int8_pv_f16.h"

namespace sage {

namespace {

template <typename Kernel>
constexpr AttentionKernel mma_sync(c10::string_view name, int32_t since, const char* quant_v = nullptr) {
  AttentionKernel kernel{};
  kernel.name = name;
  kernel.block_m = [](int32_t) { return static_cast<int32_t>(Kernel::kBlockM); };
  kernel.threads = &Kernel::threads;
  kernel.shared_bytes = &Kernel::shared_bytes;
  kernel.largest_head_dim = 256;
  kernel.since = since;
  kernel.quant_v = quant_v;
  kernel.v_bytes = Kernel::kValueBytes;
  kernel.v_scale_bytes = &Kernel::scale_bytes;
  kernel.v_smooths = Kernel::kUnsmoothedBytes > 0;
  kernel.v_differs = kernel.masks = kernel.packed = true;
  return kernel;
}

template <typename Kernel>
constexpr AttentionKernel wgmma(c10::string_view name) {
  AttentionKernel kernel{};
  kernel.name = name;
  kernel.block_m = &Kernel::block_m;
  kernel.threads = &Kernel::threads;
  kernel.shared_bytes = &Kernel::shared_bytes;
  kernel.largest_head_dim = 256;
  kernel.since = 90;
  kernel.few_queries = 512;
  kernel.few_keys = 256;
  kernel.that_alone = kernel.v_differs = kernel.masks = kernel.packed = kernel.persistent = true;
  return kernel;
}

constexpr AttentionKernel kKernels[] = {
    mma_sync<Sm80QkInt8PvF16>("sm80_qk_int8_pv_f16", 80),
    mma_sync<Sm80QkInt8PvF16AccumF16>("sm80_qk_int8_pv_f16_accum_f16", 80, "quant_v_f16"),
    mma_sync<Sm89QkInt8PvF8>("sm89_qk_int8_pv_f8", 89, "quant_v_f8"),
    mma_sync<Sm89QkInt8PvF8AccumF16>("sm89_qk_int8_pv_f8_accum_f16", 89, "quant_v_f8"),
    wgmma<Sm90QkInt8PvF16>("sm90_qk_int8_pv_f16"),
};

}  // namespace

const AttentionKernel& attention_kernel(c10::string_view name) {
  std::string names;
  for (const AttentionKernel& kernel : kKernels) {
    if (kernel.name == name) return kernel;
    names += (names.empty() ? "" : ", ") + std::string(kernel.name);
  }
  TORCH_CHECK_VALUE(false, "kernel: expected one of ", names, "; got '", name, "'");
}

}  // namespace sage
