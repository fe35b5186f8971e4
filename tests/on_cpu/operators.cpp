// csrc/torch/'s operators on CPU tensors, as torch.ops.sage_on_cpu: all that a call does on the host as it is, and in the place of
// csrc/runtime/ a store of kernels that are compiled for the CPU, DIRECTORY/ARCHITECTURE/INSTANCE.so (launch.cpp).
#include <dlfcn.h>
#include <torch/library.h>

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

void KernelStore::launch(const Launch& launch, void* params) {
  const std::string path = directory_ + "/" + architecture(launch.device) + "/" + launch.instance + ".so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, dlerror());
  using Function = const char* (*)(const void* params, int grid, int threads, uint32_t shared_bytes, int seed);
  const auto function = reinterpret_cast<Function>(dlsym(library, "launch"));
  const char* failure = function(params, launch.grid, launch.block, launch.shared_bytes, order_of_threads);
  TORCH_CHECK(failure == nullptr, launch.instance, ": ", failure);
}

// There is no stream, and the kernels that need these are not compiled.
void* find(const char*, const char*) {
  return reinterpret_cast<void*>(+[](int32_t, void** stream) -> int32_t {
    *stream = nullptr;
    return 0;
  });
}
int KernelStore::multiprocessors(int) { TORCH_CHECK(false, "no multiprocessors here"); }
TensorMap encode_tensor_map(int, const TensorView&, int32_t, int32_t, int32_t, int32_t, int32_t) {
  TORCH_CHECK(false, "no copy engine here");
}

}  // namespace runtime

namespace {

int64_t number_of(const std::string& kernel) {
  int64_t number = 0;
  while (attention_kernel(number).name != kernel) ++number;
  return number;
}

TORCH_LIBRARY(sage_on_cpu, library) {
  library.def("attention", &attention);
  library.def("attention_varlen", &attention_varlen);
  library.def("number_of", &number_of);
  library.def("set_directory", [](std::string directory, std::string architecture) {
    runtime::KernelStore::get().set_directory(std::move(directory), {std::move(architecture)});
  });
  // Other than 0: blocks, warps and lanes in random order.
  library.def("set_seed", [](int64_t seed) { runtime::order_of_threads = static_cast<int>(seed); });
}

}  // namespace

}  // namespace sage
