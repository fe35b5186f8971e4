// Compiled against a new glibc, std::shared_ptr asks this variable of glibc 2.32 whether the process has one thread only.
// A hidden one of our own, which says no, keeps the library loadable on the older glibc that PyTorch itself supports.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
extern "C" char __libc_single_threaded = 0;
