#include "pool/worker.h"

#include <pthread.h>

#include <cstdio>

#include "pool/affinity.h"
#include "pool/late_tasks.h"
#include "pool/membership.h"
#include "pool/spin.h"
#include "pool/stall_points.h"

namespace numa_moe {

void Worker::start(WorkerContext& context, int group, int index_in_group, int index, int cpu) {
  group_ = group;
  index_ = index;
  requested_cpu_ = cpu;
  thread_ = std::thread([this, &context, index_in_group] { run(context, index_in_group); });
}

WorkerState Worker::state() const {
  return {group_,           requested_cpu_, allowed_cpus(thread_id_),
          pin_error_,       thread_id_,     scheduling_of(thread_id_),
          scheduling_error_};
}

void Worker::run(WorkerContext& context, int index_in_group) {
  char name[16];  // the kernel's limit
  std::snprintf(name, sizeof(name), "numa_moe/%d.%d", group_, index_in_group);
  pthread_setname_np(pthread_self(), name);
  thread_id_ = calling_thread_id();
  if (requested_cpu_ >= 0) {
    pin_error_ = pin_calling_thread(requested_cpu_);
    // One that wanders would keep others off any CPU.
    if (pin_error_ == 0) scheduling_error_ = schedule_calling_thread(context.scheduling);
  }
  if (index_in_group == 0) context.sequencer.group_page(group_).touch();
  context.placed.count_down();
  context.may_run.wait();

  const Membership membership(context.pool, index_);
  while (wait_for_tasks(context)) context.sequencer.run_tasks(group_, index_, counters_);
}

// Returns false when the pool stops.
bool Worker::wait_for_tasks(WorkerContext& context) {
  ClaimWord& claim = context.sequencer.group(group_).claim;
  const auto has_work = [&] {
    // Relaxed: nothing but the end of the wait follows from it.
    return ClaimWord::unclaimed(claim.read()) > 0 || context.stop.load(std::memory_order_relaxed);
  };
  if (!spin_until(has_work, context.spin_us) &&
      !rerun_late_tasks(context.sequencer, group_, index_, context.late_after_us, context.spin_us, has_work,
                        counters_)) {
    yield_until(has_work, context.yields);
  }

  for (;;) {
    const ClaimWord::Value seen = claim.read();
    if (ClaimWord::unclaimed(seen) > 0) return true;
    // stop is set before the group is roused. So if it isn't seen here, either `seen` is older than that
    // opening (reading the newer one would have acquired it) and the announcement fails, or the opening
    // comes after the announcement and wakes.
    if (context.stop.load(std::memory_order_relaxed)) return false;
    stall(StallPoint::kBeforeAnnouncement);
    if (!claim.announce_sleeper(seen)) continue;
    counters_.worker_parks.add();
    stall(StallPoint::kBeforeSleep);
    claim.sleep(seen);
  }
}

}  // namespace numa_moe
