// The library's functions, which Python calls: C functions, since no text goes through LibTorch's stable ABI of 2.9. Fakes and the CPU
// reference are registered from Python (sageattention/_ops.py).
//
// PyTorch has one library a namespace in a process, and aborts where a second one registers it while it is opened. So nothing is
// registered then: Python calls sage_register_operators with the namespace that _build.json states, and reports what came of it.
#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "runtime/kernel_store.h"
#include "torch/attention.h"
#include "torch/attention_kernels.h"
#include "torch/plan/faster_in_16_bits.h"
#include "torch/tensor.h"

namespace {

constexpr sage::Operator kOperators[] = {
    SAGE_OPERATOR(attention, "(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, float sm_scale, int options) -> (Tensor, Tensor)"),
    SAGE_OPERATOR(attention_varlen,
                  "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, float sm_scale, "
                  "int options) -> (Tensor, Tensor)"),
};

// What the thread's last call has to say.
std::string& said() {
  static thread_local std::string text;
  return text;
}

// Null, or what went wrong.
template <typename Function>
const char* attempt(const Function& function) noexcept {
  try {
    function();
    return nullptr;
  } catch (const std::exception& error) {
    said() = error.what();
    return said().c_str();
  }
}

}  // namespace

#ifdef _WIN32
#define SAGE_EXPORT extern "C" __declspec(dllexport)
#else
#define SAGE_EXPORT extern "C" [[gnu::visibility("default")]]
#endif

// Makes the operators torch.ops.<name_space>.
SAGE_EXPORT const char* sage_register_operators(const char* name_space) noexcept {
  return attempt([&] { sage::register_operators(name_space, kOperators); });
}

// Names the cubin set, and the folders in it.
SAGE_EXPORT const char* sage_set_kernel_directory(const char* directory, const char* const* folders, int count) noexcept {
  return attempt([&] { sage::runtime::KernelStore::get().set_directory(directory, {folders, folders + count}); });
}

// The folder whose kernels a device runs, in `folder`, until the thread's next call.
SAGE_EXPORT const char* sage_kernel_architecture(int device, const char** folder) noexcept {
  return attempt([&] {
    said() = sage::runtime::KernelStore::get().architecture(device);
    *folder = said().c_str();
  });
}

// The name of the attention kernel of a number; null past the last.
SAGE_EXPORT const char* sage_kernel_name(int number) noexcept { return sage::attention_kernel_name(number); }

// Whether Hopper's kernel in 16 bits is expected to be faster than the kernel of a number, on a GPU of so many multiprocessors. mask: a MaskForm.
SAGE_EXPORT const char* sage_faster_in_16_bits(int kernel, int multiprocessors, int batch, int q_heads, int kv_heads, int qo_len, int kv_len,
                                               int head_dim, int v_head_dim, bool is_causal, int mask, bool* faster) noexcept {
  return attempt([&] {
    for (const int size : {multiprocessors, batch, q_heads, kv_heads, qo_len, kv_len, head_dim, v_head_dim}) {
      TORCH_CHECK_VALUE(size >= 1, "multiprocessors, batch, q_heads, kv_heads, qo_len, kv_len, head_dim, v_head_dim: expected each at least 1, got ", size);
    }
    TORCH_CHECK_VALUE(q_heads % kv_heads == 0, "q_heads: expected a multiple of kv_heads (", kv_heads, "), got ", q_heads);
    TORCH_CHECK_VALUE(std::max(head_dim, v_head_dim) <= sage::kLargestHeadDim, "head_dim, v_head_dim: expected at most ",
                      sage::kLargestHeadDim, ", got ", std::max(head_dim, v_head_dim));
    sage::AttentionOptions options(0);
    options.is_causal = is_causal;
    const sage::AttentionShape shape{batch, q_heads, kv_heads, qo_len, kv_len, head_dim, v_head_dim};
    const sage::Call call{sage::attention_kernel(kernel), shape, {}, {}, {}, {}, {}, 1.0, options};
    *faster = sage::faster_in_16_bits(call, static_cast<sage::MaskForm>(mask), multiprocessors) > 0;
  });
}
