// What host and kernels of tests/on_cpu/ agree on of a launch that overlaps those before it.
#pragma once

namespace gpu {

// Before what each thread must have waited for the kernels before: never, before later ones may start (griddepcontrol.launch_dependents), or before the
// thread's end too, as in a call's first kernel.
enum MustWait { kNever, kBeforeOthers, kBeforeEnd };

}  // namespace gpu
