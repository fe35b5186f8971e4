#include "torch/attention_kernels.h"

#include <iterator>

#include "kernels/attention/sm120_qk_fp4_pv_fp4.h"
#include "kernels/attention/sm80_qk_int8_pv_f16.h"
#include "kernels/attention/sm80_qk_int8_pv_f16_accum_f16.h"
#include "kernels/attention/sm89_qk_int8_pv_f8.h"
#include "kernels/attention/sm89_qk_int8_pv_f8_accum_f16.h"
#include "kernels/attention/sm90_qk_f16_pv_f16.h"
#include "kernels/attention/sm90_qk_int8_pv_f16.h"
#include "torch/tensor.h"

namespace sage {

namespace {

template <typename Kernel>
constexpr AttentionKernel mma_sync(const char* name, int32_t since, const char* quant_v = nullptr) {
  AttentionKernel kernel{};
  kernel.name = name;
  kernel.block_m = [](int32_t) { return static_cast<int32_t>(Kernel::kBlockM); };
  kernel.threads = &Kernel::threads;
  kernel.shared_bytes = &Kernel::shared_bytes;
  kernel.since = since;
  kernel.quant_v = quant_v;
  kernel.v_block_bytes = [](int32_t head_dim) { return static_cast<int32_t>(Kernel::kBlockN * head_dim * Kernel::kValueBytes); };
  kernel.v_scale_bytes = &Kernel::scale_bytes;
  kernel.v_smooths = Kernel::kValues == Values::kE4m3;
  kernel.packed = name;
  return kernel;
}

template <typename Kernel>
constexpr AttentionKernel fp4(const char* name) {
  AttentionKernel kernel{};
  kernel.name = name;
  kernel.block_m = [](int32_t) { return static_cast<int32_t>(Kernel::kBlockM); };
  kernel.threads = &Kernel::threads;
  kernel.shared_bytes = &Kernel::shared_bytes;
#ifdef SAGE_EMULATE_FP4
  kernel.since = 80;
#else
  kernel.since = 120;
#endif
  kernel.quant_v = "quant_kv_fp4";
  kernel.v_block_bytes = [](int32_t head_dim) { return static_cast<int32_t>(Fp4::v_block(head_dim)); };
  kernel.v_scale_bytes = &Kernel::scale_bytes;
  kernel.packed = name;
  kernel.fp4 = kernel.v_smooths = true;
  return kernel;
}

template <typename Kernel>
constexpr AttentionKernel wgmma(const char* name, const char* masked, const char* packed) {
  AttentionKernel kernel{};
  kernel.name = name;
  kernel.masked = masked;
  kernel.packed = packed;
  kernel.block_m = &Kernel::block_m;
  kernel.threads = &Kernel::threads;
  kernel.shared_bytes = &Kernel::shared_bytes;
  kernel.since = 90;
  kernel.that_alone = kernel.wgmma_int8 = true;
  return kernel;
}

constexpr AttentionKernel wgmma_in_16_bits(const char* name) {
  AttentionKernel kernel{};
  kernel.name = name;
  kernel.since = 90;
  kernel.that_alone = kernel.in_16_bits = true;
  return kernel;
}

constexpr AttentionKernel kKernels[] = {
    mma_sync<Sm80QkInt8PvF16>("sm80_qk_int8_pv_f16", 80),
    mma_sync<Sm80QkInt8PvF16AccumF16>("sm80_qk_int8_pv_f16_accum_f16", 80, "quant_v_f16"),
    mma_sync<Sm89QkInt8PvF8>("sm89_qk_int8_pv_f8", 89, "quant_v_f8"),
    mma_sync<Sm89QkInt8PvF8AccumF16>("sm89_qk_int8_pv_f8_accum_f16", 89, "quant_v_f8"),
    wgmma<Sm90QkInt8PvF16>("sm90_qk_int8_pv_f16", "sm90_qk_int8_pv_f16_masked", "sm90_qk_int8_pv_f16_packed"),
    fp4<Sm120QkFp4PvFp4>("sm120_qk_fp4_pv_fp4"),
    wgmma_in_16_bits("sm90_qk_f16_pv_f16"),
};

}  // namespace

const AttentionKernel& attention_kernel(int64_t number) {
  TORCH_CHECK_VALUE(attention_kernel_name(number) != nullptr, "kernel: expected a number below ", std::size(kKernels), ", got ",
                    number);
  return kKernels[number];
}

const char* attention_kernel_name(int64_t number) {
  return number >= 0 && number < static_cast<int64_t>(std::size(kKernels)) ? kKernels[number].name : nullptr;
}

}  // namespace sage
