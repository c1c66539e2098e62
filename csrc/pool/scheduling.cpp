#include "pool/scheduling.h"

#include <sched.h>

#include <cerrno>

namespace numa_moe {

int schedule_calling_thread(Scheduling scheduling) noexcept {
  if (scheduling == Scheduling::kNormal) return 0;
  const int policy = scheduling == Scheduling::kFifo ? SCHED_FIFO : SCHED_RR;
  sched_param parameters{};
  parameters.sched_priority = sched_get_priority_min(policy);
  return sched_setscheduler(0, policy | SCHED_RESET_ON_FORK, &parameters) == 0 ? 0 : errno;
}

Scheduling scheduling_of(pid_t thread_id) noexcept {
  const int policy = sched_getscheduler(thread_id);
  if (policy < 0) return Scheduling::kNormal;
  switch (policy & ~SCHED_RESET_ON_FORK) {
    case SCHED_FIFO: return Scheduling::kFifo;
    case SCHED_RR: return Scheduling::kRoundRobin;
    default: return Scheduling::kNormal;
  }
}

}  // namespace numa_moe
