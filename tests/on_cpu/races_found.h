// races.h: what it asks of gpu.h, and what the compiler calls.
#pragma once

#include <dlfcn.h>

#include <cstdio>

namespace gpu::races {

inline uint32_t this_thread() { return current - fibers.data(); }

// Where in the sources, innermost first.
inline std::string place_of(const void* where) {
  Dl_info library;
  if (where == nullptr || dladdr(where, &library) == 0) return "?";
  char command[4096], line[4096];
  const long offset = static_cast<const char*>(where) - static_cast<const char*>(library.dli_fbase) - 1;
  std::snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%lx", library.dli_fname, offset);
  std::string place;
  FILE* lines = popen(command, "r");
  while (lines != nullptr && std::fgets(line, sizeof line, lines) != nullptr) {
    const std::string path(line, std::strcspn(line, " \n"));
    if (path.find("/on_cpu/") == std::string::npos) place += (place.empty() ? "" : " < ") + path.substr(path.rfind('/') + 1);
  }
  if (lines != nullptr) pclose(lines);
  return place;
}

inline std::string describe(const Access& access, bool is_write) {
  const std::string by = access.who >= known.size() ? " by the copy engine" : (access.by_engine ? " by tensor cores for" : " by") + name(fibers[access.who]).substr(3);
  const std::string place = place_of(access.where);
  return (is_write ? "a write" : "a read") + by + (place.empty() ? "" : " at ") + place;
}
inline void report(const Access& access, bool is_write, const Access& earlier, bool was_write, uint32_t byte) {
  fail("unordered accesses to byte " + std::to_string(byte) + " of shared memory: " + describe(access, is_write) + ", and before it " +
       describe(earlier, was_write) + "; found");
}

}  // namespace gpu::races

// These must not call themselves: nothing but what their own memory is for is an access.
#define SAGE_UNSEEN extern "C" __attribute__((no_sanitize("thread")))
#define SAGE_NOTE(address, bytes, is_write) \
  if (address >= gpu::races::memory && address < gpu::races::end && !gpu::races::ignored) { \
    gpu::races::note_by_thread(address, bytes, is_write, __builtin_return_address(0)); \
  }
#define SAGE_ACCESS(name, bytes, is_write) \
  SAGE_UNSEEN void __tsan_##name(void* address) { SAGE_NOTE(address, bytes, is_write) }
#define SAGE_ACCESSES(bytes) \
  SAGE_ACCESS(read##bytes, bytes, false) \
  SAGE_ACCESS(write##bytes, bytes, true) \
  SAGE_ACCESS(unaligned_read##bytes, bytes, false) \
  SAGE_ACCESS(unaligned_write##bytes, bytes, true)
SAGE_ACCESSES(1)
SAGE_ACCESSES(2)
SAGE_ACCESSES(4)
SAGE_ACCESSES(8)
SAGE_ACCESSES(16)
SAGE_UNSEEN void __tsan_read_range(void* address, size_t bytes) { SAGE_NOTE(address, bytes, false) }
SAGE_UNSEEN void __tsan_write_range(void* address, size_t bytes) { SAGE_NOTE(address, bytes, true) }
SAGE_UNSEEN void __tsan_vptr_update(void**, void*) {}
SAGE_UNSEEN void __tsan_vptr_read(void**) {}
SAGE_UNSEEN void __tsan_init() {}
SAGE_UNSEEN uint8_t __tsan_atomic8_load(const volatile uint8_t* address, int) { return *address; }
#undef SAGE_ACCESSES
#undef SAGE_ACCESS
#undef SAGE_NOTE
#undef SAGE_UNSEEN
