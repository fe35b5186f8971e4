// One kernel, compiled for the CPU: KERNEL of KERNEL_SOURCE.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Dynamic shared memory, which a kernel declares as an array without length; of others' static variables there is one for all threads.
namespace sage {
alignas(1024) uint8_t memory[gpu::kMostBlocks * gpu::kMostShared];
}

#include KERNEL_SOURCE

template <typename Params>
void call(void (*kernel)(Params), const void* params) {
  kernel(*static_cast<const Params*>(params));
}
template <typename Params>
constexpr size_t size_of(void (*)(Params)) { return sizeof(Params); }

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const size_t params_bytes = size_of(sage::KERNEL);

// gpu::launch
EXPORT const char* launch(const void* params, int grid, int cluster, int threads, uint32_t shared_bytes, int seed, const char* (*before)(),
                          gpu::MustWait must_wait) {
  if (shared_bytes > gpu::kMostShared) return "more shared memory than there is";
  if (cluster > gpu::kMostBlocks) return "a larger cluster than every GPU has";
  return gpu::launch([](const void* p) { call(sage::KERNEL, p); }, params, grid, cluster, threads, sage::memory, shared_bytes, seed, before, must_wait);
}
