// Copies to shared memory.
#pragma once

#include "gpu.h"

namespace sage::ptx {

template <int Bytes>
void cp_async(uint32_t destination, const void* source, int source_bytes) {
  gpu::start_copy(destination, source, Bytes, source_bytes);
}
inline void cp_async_16(uint32_t destination, const void* source, bool valid) { cp_async<16>(destination, source, valid ? 16 : 0); }
inline void cp_async_commit() { gpu::commit_copies(); }
template <int Pending>
void cp_async_wait() { gpu::wait_for_copies(Pending); }

}  // namespace sage::ptx
