#include "runtime/library.h"

#include <stdexcept>
#include <string>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace sage::runtime {

namespace {

#ifdef _WIN32
void* open(const char* library) { return reinterpret_cast<void*>(LoadLibraryA(library)); }
void* look_up(void* library, const char* function) {
  return reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library), function));
}
std::string failure() { return "Windows error " + std::to_string(GetLastError()); }
#else
void* open(const char* library) { return dlopen(library, RTLD_LAZY); }
void* look_up(void* library, const char* function) { return dlsym(library, function); }
std::string failure() {
  const char* said = dlerror();
  return said == nullptr ? "no reason given" : said;
}
#endif

}  // namespace

void* find(const char* library, const char* function) {
  void* opened = open(library);
  void* found = opened == nullptr ? nullptr : look_up(opened, function);
  if (found == nullptr) {
    throw std::runtime_error(std::string(SAGE_PACKAGE ": no ") + function + " in " + library + ": " + failure());
  }
  return found;
}

}  // namespace sage::runtime
