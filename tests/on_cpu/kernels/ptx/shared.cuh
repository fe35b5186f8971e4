// Shared memory.
#pragma once

#include "gpu.h"

namespace sage::ptx {

inline uint8_t* dynamic_shared() { return gpu::current->block->shared; }
inline uint32_t shared_address(const void* pointer) {
  return gpu::own_address((static_cast<const uint8_t*>(pointer) - gpu::shared) % gpu::kMostShared);
}

inline void store_shared_16(uint32_t destination, const uint32_t (&bits)[4]) { std::memcpy(gpu::at(destination, 16), bits, 16); }
inline void store_shared_word(uint32_t destination, uint32_t bits) { std::memcpy(gpu::at(destination, 4), &bits, 4); }
inline void store_shared_float(uint32_t destination, float value) { std::memcpy(gpu::at(destination, 4), &value, 4); }
template <typename T>
T load_shared(uint32_t source) {
  T value;
  std::memcpy(&value, gpu::at(source, sizeof(T)), sizeof(T));
  return value;
}
inline float load_shared_float(uint32_t source) { return load_shared<float>(source); }
inline float2 load_shared_float2(uint32_t source) { return load_shared<float2>(source); }
inline uint32_t load_shared_u16(uint32_t source) { return load_shared<uint16_t>(source); }
template <int N>
void load_shared_words(uint32_t (&words)[N], uint32_t source) {
  gpu::races::note_by_thread(gpu::at(source, 4 * N), 4 * N, false, gpu::races::here());
  std::memcpy(words, gpu::at(source, 4 * N), 4 * N);
}

}  // namespace sage::ptx
