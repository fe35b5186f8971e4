// Shared memory. Copies are made at once.
#pragma once

#include "gpu.h"

namespace sage::ptx {

inline uint32_t shared_address(const void* pointer) {
  gpu::shared = static_cast<uint8_t*>(const_cast<void*>(pointer));
  return 0;
}
inline void cp_async_16(uint32_t destination, const void* source, bool valid) {
  if (reinterpret_cast<uintptr_t>(source) % 16) gpu::fail("misaligned copy");
  if (valid) std::memcpy(gpu::at(destination, 16), source, 16);
  if (!valid) std::memset(gpu::at(destination, 16), 0, 16);
}
inline void store_shared_16(uint32_t destination, const uint32_t (&bits)[4]) { std::memcpy(gpu::at(destination, 16), bits, 16); }
inline void store_shared_float(uint32_t destination, float value) { std::memcpy(gpu::at(destination, 4), &value, 4); }
template <typename T>
T load_shared(uint32_t source) {
  T value;
  std::memcpy(&value, gpu::at(source, sizeof(T)), sizeof(T));
  return value;
}
inline float load_shared_float(uint32_t source) { return load_shared<float>(source); }
inline float2 load_shared_float2(uint32_t source) { return load_shared<float2>(source); }
template <int N>
void load_shared_words(uint32_t (&words)[N], uint32_t source) {
  std::memcpy(words, gpu::at(source, 4 * N), 4 * N);
}
inline void cp_async_commit() {}
template <int Pending>
void cp_async_wait() {}

}  // namespace sage::ptx
