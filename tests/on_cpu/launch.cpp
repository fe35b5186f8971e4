// One kernel, compiled for the CPU: KERNEL of KERNEL_SOURCE.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Dynamic shared memory, which a kernel declares as an array without length; of others' static variables there is one for all threads.
namespace sage {
alignas(1024) uint8_t memory[100 * 1024];
}

#include KERNEL_SOURCE

template <typename Params>
void call(void (*kernel)(Params), const void* params) {
  kernel(*static_cast<const Params*>(params));
}
template <typename Params>
constexpr int size_of_params(void (*)(Params)) { return sizeof(Params); }

extern "C" __attribute__((visibility("default"))) const int params_bytes = size_of_params(sage::KERNEL);

// Null, or what went wrong. `previous`, if there is one, runs the kernel before, and is called once a thread waits for that.
extern "C" __attribute__((visibility("default"))) const char* launch(const void* params, int grid, int threads, uint32_t shared_bytes,
                                                                     int seed, void (*previous)()) {
  if (shared_bytes > sizeof sage::memory) return "more shared memory than there is";
  return gpu::launch([](const void* p) { call(sage::KERNEL, p); }, params, grid, threads, sage::memory, shared_bytes, seed, previous);
}
