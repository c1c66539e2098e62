// Places in the pool where a thread may be preempted at the worst moment. A test build
// (-DNUMA_MOE_POOL_STALLS) supplies the function and sleeps there at random, which reaches interleavings
// that a machine with few CPUs hardly ever shows. In the product they are nothing.
#pragma once

namespace numa_moe {

enum class StallPoint {
  kBeforeClaim,         // between reading a claim word and the compare-exchange
  kBeforeReport,        // tasks run, not yet counted as finished
  kInTask,              // in a repeatable task that this thread has claimed
  kInVisit,             // in another thread's task
  kBeforeLook,          // shown as a visitor, not yet looked whether the task is still there
  kBeforeArrival,       // the group is finished, the countdown of groups not yet decremented
  kBeforeOpening,       // the countdown came to zero, the next phase is not yet open
  kBeforeWake,          // a phase is open or the job complete, sleepers not yet woken
  kBeforeAnnouncement,  // nothing found to do, sleep not yet announced
  kBeforeSleep,         // sleep announced, not yet asleep
};

#ifdef NUMA_MOE_POOL_STALLS
void stall(StallPoint point);
#else
inline void stall(StallPoint) {}
#endif

}  // namespace numa_moe
