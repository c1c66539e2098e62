// How the kernel shares a CPU between a worker and other programs.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace numa_moe {

enum class Scheduling : uint8_t {
  kNormal,      // takes turns with everybody
  kFifo,        // goes before all normal threads for as long as it has work (SCHED_FIFO)
  kRoundRobin,  // the same, in turns with other real-time threads of its priority (SCHED_RR)
};

// Asks for it for the calling thread: at the lowest real-time priority, so that the kernel's own real-time
// threads still come first, and not for threads or processes that it starts. Returns an errno, 0 if the
// kernel accepted. EPERM: it takes CAP_SYS_NICE or an RLIMIT_RTPRIO of 1 or more.
int schedule_calling_thread(Scheduling scheduling) noexcept;

// What holds for a thread, asked of the kernel; kNormal when it doesn't tell.
Scheduling scheduling_of(pid_t thread_id) noexcept;

}  // namespace numa_moe
