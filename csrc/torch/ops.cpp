// The operators as PyTorch sees them: schemas and CUDA implementations. Fakes and the CPU reference are registered from
// Python (sageattention/_ops.py).
//
// PyTorch has one library a namespace in a process, and aborts where a second one registers it while it is opened. So nothing is
// registered then: Python calls sage_register_operators with the namespace that _build.json states, and reports what came of it.
#include <ATen/DynamicLibrary.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <exception>
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

void define(torch::Library& library) {
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

void implement(torch::Library& library) {
  library.impl("attention", &sage::attention);
  library.impl("attention_varlen", &sage::attention_varlen);
}

// There is no gradient: asking for one is an error, not silence.
void refuse_gradients(torch::Library& library) {
  library.impl("attention", torch::autograd::autogradNotImplementedFallback());
  library.impl("attention_varlen", torch::autograd::autogradNotImplementedFallback());
}

// Registered for the life of the process.
torch::Library& library(const char* name_space, torch::Library::Kind kind, std::optional<c10::DispatchKey> key) {
  return *new torch::Library(kind, name_space, key, "csrc/torch/ops.cpp", 0);
}

}  // namespace

#ifdef _WIN32
#define SAGE_EXPORT __declspec(dllexport)
#else
#define SAGE_EXPORT __attribute__((visibility("default")))
#endif

// Makes the operators torch.ops.<name_space>. Returns null, or what went wrong: another library has that namespace.
extern "C" SAGE_EXPORT const char* sage_register_operators(const char* name_space) noexcept {
  static std::string failure;
  try {
    sage::runtime::set_resolver(&resolve);
    define(library(name_space, torch::Library::DEF, std::nullopt));
    implement(library(name_space, torch::Library::IMPL, c10::DispatchKey::CUDA));
    refuse_gradients(library(name_space, torch::Library::IMPL, c10::DispatchKey::Autograd));
    return nullptr;
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
}
