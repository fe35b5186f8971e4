// The operators as PyTorch sees them: schemas and CUDA implementations. Fakes and the CPU reference are registered from
// Python (sageattention/_ops.py).
#include <ATen/DynamicLibrary.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "runtime/kernel_store.h"
#include "torch/attention.h"

namespace {

// PyTorch's portable dlopen. The libraries stay open for the life of the process.
void* resolve(const char* library, const char* symbol) {
  return at::DynamicLibrary(library, nullptr, /*leak_handle=*/true).sym(symbol);
}

void set_kernel_directory(std::string directory, std::vector<std::string> architectures) {
  sage::runtime::KernelStore::get().set_directory(std::move(directory), std::move(architectures));
}

std::string kernel_architecture(int64_t device) {
  return sage::runtime::KernelStore::get().architecture(static_cast<int>(device));
}

}  // namespace

TORCH_LIBRARY(sageattention, library) {
  sage::runtime::set_resolver(&resolve);
  library.def("set_kernel_directory(str directory, str[] architectures) -> ()", &set_kernel_directory);
  library.def("kernel_architecture(int device) -> str", &kernel_architecture);
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, str tensor_layout, bool is_causal, float sm_scale, "
      "bool smooth_k, bool smooth_v, bool return_lse, bool or_pytorch, str kernel, bool per_block_mean=True) -> (Tensor, Tensor)");
  library.def(
      "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
      "SymInt max_seqlen_k, bool is_causal, float sm_scale, bool smooth_k, bool smooth_v, bool return_lse, str kernel) "
      "-> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(sageattention, CUDA, library) {
  library.impl("attention", &sage::attention);
  library.impl("attention_varlen", &sage::attention_varlen);
}

// There is no gradient: asking for one is an error, not silence.
TORCH_LIBRARY_IMPL(sageattention, Autograd, library) {
  library.impl("attention", torch::autograd::autogradNotImplementedFallback());
  library.impl("attention_varlen", torch::autograd::autogradNotImplementedFallback());
}
