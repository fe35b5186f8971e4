// csrc/torch/'s operators on CPU tensors, as torch.ops.sage_on_cpu: all that a call does on the host as it is, and in the place of
// csrc/runtime/ a store of kernels that are compiled for the CPU, DIRECTORY/ARCHITECTURE/INSTANCE.so (launch.cpp).
#include <dlfcn.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torch/arguments.cpp"
#include "torch/attention.cpp"
#include "torch/attention_kernels.cpp"

namespace sage {

namespace runtime {

int order_of_threads = 0;  // launch.cpp's seed

KernelStore& KernelStore::get() {
  static KernelStore store;
  return store;
}

void KernelStore::set_directory(std::string directory, std::vector<std::string> architectures) {
  directory_ = std::move(directory);
  architectures_ = std::move(architectures);
}

std::string KernelStore::architecture(int) { return architectures_.at(0); }
KernelStore::Device KernelStore::device(int) { return {0, nullptr, {std::stoi(architectures_.at(0).substr(3)), false, false}}; }

namespace {

using Function = const char* (*)(const void* params, int grid, int threads, uint32_t shared_bytes, int seed, void (*previous)());

struct Launched {
  Launch launch;
  Function function;
  std::vector<char> params;
};
std::vector<Launched> launched;  // and not yet run
std::string failure;

// Runs the last one. The one before it, which it may overlap, runs when it is waited for and no sooner, so that whatever is read without a wait, or
// after a wait for a kernel that itself did not wait, is not yet there.
void run_last() {
  if (launched.empty()) return;
  const Launched last = std::move(launched.back());
  launched.pop_back();
  const char* wrong =
      last.function(last.params.data(), last.launch.grid, last.launch.block, last.launch.shared_bytes, order_of_threads, run_last);
  if (wrong != nullptr && failure.empty()) failure = last.launch.instance + ": " + wrong;
}

void run_all() {
  while (!launched.empty()) run_last();
  TORCH_CHECK(failure.empty(), std::exchange(failure, {}));
}

}  // namespace

void KernelStore::launch(const Launch& launch, void* params) {
  if (!launch.overlaps_previous || device(launch.device).built_for.number < 90) run_all();
  const std::string path = directory_ + "/" + architecture(launch.device) + "/" + launch.instance + ".so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, dlerror());
  const auto* bytes = static_cast<const char*>(params);
  launched.push_back({launch, reinterpret_cast<Function>(dlsym(library, "launch")),
                      {bytes, bytes + *static_cast<const int*>(dlsym(library, "params_bytes"))}});
  // Attention is a call's last, after which its workspace is gone.
  for (int64_t i = 0; attention_kernel_name(i) != nullptr; ++i) {
    if (attention_kernel_name(i) == std::string_view(launch.entry)) run_all();
  }
}

// There is no stream, and the kernels that need these are not compiled.
void* find(const char*, const char*) {
  return reinterpret_cast<void*>(+[](int32_t, void** stream) -> int32_t {
    *stream = nullptr;
    return 0;
  });
}
TensorMap encode_tensor_map(int, const TensorView&, int32_t, int32_t, int32_t, int32_t, int32_t) {
  TORCH_CHECK(false, "no copy engine here");
}

}  // namespace runtime

namespace {

TORCH_LIBRARY(sage_on_cpu, library) {
  library.def("attention", &attention);
  library.def("attention_varlen", &attention_varlen);
  library.def("set_directory", [](std::string directory, std::string architecture) {
    runtime::KernelStore::get().set_directory(std::move(directory), {std::move(architecture)});
  });
  // Other than 0: blocks, warps and lanes in random order.
  library.def("set_seed", [](int64_t seed) { runtime::order_of_threads = static_cast<int>(seed); });
}

}  // namespace

}  // namespace sage
