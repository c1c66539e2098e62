// What a thread does that has nothing to claim and has spun for a while: if another thread of its group is in
// a task that can be run again, it waits until that one is late, and does so.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pool/phase_sequencer.h"
#include "pool/spin.h"
#include "pool/thread_counters.h"

namespace numa_moe {

// Until condition() holds or there is no such task. late_after_us: -1 for never. waited_us: how long the
// thread has spun already. Returns condition().
template <typename Condition>
bool rerun_late_tasks(PhaseSequencer& sequencer, int group, int thread, int64_t late_after_us,
                      int64_t waited_us, Condition condition, ThreadCounters& counters) {
  if (late_after_us < 0) return condition();
  while (!condition()) {
    const int64_t late_us = sequencer.microseconds_to_lateness(group, thread, late_after_us);
    if (late_us < 0) return false;
    if (spin_until(condition, std::max<int64_t>(0, late_us - waited_us))) return true;
    // After a task that was not there any more, or lost to who had started it, the next one is as late.
    waited_us = late_us;
    if (!sequencer.rerun_late_task(group, thread, counters)) return condition();
  }
  return true;
}

}  // namespace numa_moe
