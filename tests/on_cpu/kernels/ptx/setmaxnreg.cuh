// Registers go from warp to warp.
#pragma once

#include "gpu.h"

namespace sage::ptx {

inline void set_registers(int registers) {
  gpu::together<char>(registers, [](auto given, auto) {
    gpu::Warp& warp = *gpu::current->warp;
    int& free = gpu::current->block->free_registers;
    while (given[0] - warp.registers > free) gpu::wait(free, free);
    free -= given[0] - warp.registers;
    warp.registers = given[0];
  });
}
template <int Registers>
void registers_release() { set_registers(Registers); }
template <int Registers>
void registers_acquire() { set_registers(Registers); }

}  // namespace sage::ptx
