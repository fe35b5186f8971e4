// Shared libraries that are there or not, as the driver is: opened when they are wanted, and for the life of the process.
#pragma once

namespace sage::runtime {

// Throws std::runtime_error, naming the library, if there is none, or it has no such function.
void* find(const char* library, const char* function);

}  // namespace sage::runtime
