// One kernel, compiled for the CPU. Given are its source, its name and its parameters' type, and a namespace of its own in the place of `sage`.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Dynamic shared memory, which a kernel declares as an array without length; of others' static variables there is one for all threads.
namespace sage {
__attribute__((aligned(1024))) uint8_t memory[100 * 1024];
}

#include KERNEL_SOURCE

#define JOINED(a, b) a##b
#define NAMED(name) JOINED(launch_, name)
extern "C" void NAMED(KERNEL)(const void* params, int grid, int threads) {
  gpu::launch([](const void* p) { sage::KERNEL(*static_cast<const sage::PARAMETERS::Params*>(p)); }, params, grid, threads);
}
