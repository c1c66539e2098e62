// Which CPUs a thread may run on, asked and set by sched_setaffinity(2) with masks of any size.
#pragma once

#include <sys/types.h>

#include <vector>

namespace numa_moe {

// Asks the kernel to run the calling thread on this CPU alone. Returns an errno, 0 if the kernel accepted:
// which proves nothing (a sandbox may answer 0 and do nothing), so callers read the mask back.
// EINVAL: no such CPU, or none that this process may use. Allocates little and throws nothing.
int pin_calling_thread(int cpu) noexcept;

// The CPUs that a thread of any process (0: the calling one) may run on, ascending, read from the kernel.
// Empty when the kernel doesn't tell.
std::vector<int> allowed_cpus(pid_t thread_id);

// The kernel's number of the calling thread.
pid_t calling_thread_id() noexcept;

}  // namespace numa_moe
