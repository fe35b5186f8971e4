// csrc/torch/'s operators on CPU tensors, as torch.ops.sage_on_cpu: all that a call does on the host as it is, but for the driver, and in the place of
// csrc/runtime/'s a store of kernels that are compiled for the CPU, DIRECTORY/ARCHITECTURE/INSTANCE.so (launch.cpp).
#include <dlfcn.h>
#include <torch/library.h>

#include "runtime/driver.cpp"
#include "runtime/tensor_map.cpp"
#include "tensor_map.h"
#include "torch/arguments.cpp"
#include "torch/attention.cpp"
#include "torch/attention_kernels.cpp"

namespace sage {

namespace runtime {

int order_of_threads;                // launch.cpp's seed
std::function<const char*()> before;  // a launch that the next one may overlap: made when that one waits for it

const char* make_the_one_before() {
  const auto launch = std::exchange(before, nullptr);
  return launch == nullptr ? nullptr : launch();
}

KernelStore& KernelStore::get() {
  static KernelStore store;
  return store;
}

void KernelStore::set_directory(std::string directory, std::vector<std::string> architectures) {
  directory_ = std::move(directory);
  architectures_ = std::move(architectures);
}

std::string KernelStore::architecture(int) { return architectures_.at(0); }
// Of few multiprocessors, so that a block of threads that stays computes several tiles.
KernelStore::Device KernelStore::device(int) {
  const std::string name = architecture(0);
  return {5, nullptr, {std::stoi(name.substr(3)), name.back() == 'a', false}};
}

void KernelStore::launch(const Launch& launch, void* params) {
  const std::string path = directory_ + "/" + architecture(launch.device) + "/" + launch.instance + ".so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, dlerror());
  using Function = const char* (*)(const void* params, int grid, int cluster, int threads, uint32_t shared_bytes, int seed, const char* (*before)());
  const auto function = reinterpret_cast<Function>(dlsym(library, "launch"));
  struct alignas(64) Line { char bytes[64]; };
  const size_t bytes = *static_cast<const size_t*>(dlsym(library, "params_bytes"));
  std::vector<Line> copied((bytes + sizeof(Line) - 1) / sizeof(Line));
  std::memcpy(copied.data(), params, bytes);
  const auto run = [=]() -> const char* {
    static std::string message;
    const char* failure = function(copied.data(), launch.grid, launch.cluster, launch.block, launch.shared_bytes, order_of_threads, make_the_one_before);
    if (failure == nullptr) return make_the_one_before();
    message = launch.instance + ": " + failure;
    return message.c_str();
  };
  const auto check = [](const char* failure) { TORCH_CHECK(failure == nullptr, failure); };
  if (launch.overlaps_previous) {
    check(run());
  } else {
    check(make_the_one_before());
    before = run;
  }
}

// There is no stream, no context, and of the driver's functions one that does something.
void* find(const char*, const char* function) {
  if (std::string(function) == "cuTensorMapEncodeTiled") return reinterpret_cast<void*>(&gpu::encode);
  if (std::string(function).starts_with("cu")) return reinterpret_cast<void*>(+[] { return kCudaSuccess; });
  return reinterpret_cast<void*>(+[](int32_t, void** stream) -> int32_t {
    *stream = nullptr;
    return 0;
  });
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
  library.def("set_seed", [](int64_t seed) {
    runtime::order_of_threads = static_cast<int>(seed);
    runtime::before = nullptr;  // of a call that failed
  });
}

}  // namespace

}  // namespace sage
