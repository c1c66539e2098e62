#include "pool/phase_sequencer.h"

#include <utility>

#include "pool/stall_points.h"

namespace numa_moe {

PhaseSequencer::PhaseSequencer(int num_groups, bool caller_helps)
    : num_groups_(num_groups), caller_helps_(caller_helps), groups_(static_cast<std::size_t>(num_groups)) {}

void PhaseSequencer::start(Job& job, const std::vector<Phase>& phases, ThreadCounters& counters) {
  // Plain and relaxed writes: the threads of the job before have reported and left, and those of this
  // one come in through a claim, which acquires what its opening released.
  job_ = &job;
  phases_ = &phases;
  failed_.store(false, std::memory_order_relaxed);
  completion_.arm();
  open_all(0, counters);
}

void PhaseSequencer::run_tasks(int group_index, int thread, ThreadCounters& counters) {
  Group& group = this->group(group_index);
  for (;;) {
    int32_t finished = 0;
    while (const int32_t unclaimed = group.claim.claim()) {
      run_task(*group.job, {group.phase, group_index, group.num_tasks - unclaimed, thread});
      ++finished;
    }
    if (finished == 0) return;
    // Reported together, once there is nothing more to claim: the phase can't end meanwhile, and each
    // thread writes to the shared count once per phase instead of once per task.
    const int phase = group.phase;
    stall(StallPoint::kBeforeReport);
    // Release: what the tasks wrote. Acquire: if this is the last report, what all other tasks of the
    // group wrote (their reports are read-modify-writes, one release sequence).
    if (group.unfinished.fetch_sub(finished, std::memory_order_acq_rel) != finished) return;
    finish_group_phase(group_index, phase, counters);
  }
}

void PhaseSequencer::run_task(Job& job, const Task& task) {
  if (failed_.load(std::memory_order_relaxed)) return;
  try {
    job.run_task(task);
  } catch (...) {
    if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
  }
  // An exception that lost against another one is gone by here; the winner's last reference is error_'s.
}

std::exception_ptr PhaseSequencer::take_error() { return std::exchange(error_, nullptr); }

bool PhaseSequencer::ends_with_pool_barrier(int phase) const {
  return static_cast<std::size_t>(phase) + 1 == phases_->size() ||
         (*phases_)[static_cast<std::size_t>(phase)].barrier == Barrier::kPool;
}

void PhaseSequencer::finish_group_phase(int group, int phase, ThreadCounters& counters) {
  const int reached_by_all =
      ends_with_pool_barrier(phase) ? arrive(phase) : advance(group, phase + 1, counters);
  if (reached_by_all != kNothingToDo) open_all(reached_by_all + 1, counters);
}

// Takes one group, which is finished with all phases before, into `phase`. Phases without tasks are
// finished at once. The calling thread must not have given up its hold on the job: the group hasn't
// arrived at any barrier from `phase` on.
int PhaseSequencer::advance(int group, int phase, ThreadCounters& counters) {
  for (;; ++phase) {
    const int32_t num_tasks =
        (*phases_)[static_cast<std::size_t>(phase)].tasks_per_group[static_cast<std::size_t>(group)];
    if (num_tasks > 0) {
      open(group, phase, num_tasks, counters);
      return kNothingToDo;
    }
    if (ends_with_pool_barrier(phase)) return arrive(phase);
  }
}

int PhaseSequencer::arrive(int phase) {
  stall(StallPoint::kBeforeArrival);
  // Release: what this group's tasks wrote. Acquire: for the last to arrive, what all groups' tasks wrote,
  // which its openings (or completion) release again.
  return groups_left_.fetch_sub(1, std::memory_order_acq_rel) == 1 ? phase : kNothingToDo;
}

// All groups are finished with the phases before `phase`: lets them go on. Loops only over barriers that
// no group has tasks for.
void PhaseSequencer::open_all(int phase, ThreadCounters& counters) {
  for (;;) {
    stall(StallPoint::kBeforeOpening);
    if (static_cast<std::size_t>(phase) == phases_->size()) return complete(counters);
    // Relaxed: other threads decrement it only after they claimed in a phase opened below.
    groups_left_.store(num_groups_, std::memory_order_relaxed);
    int reached_by_all = kNothingToDo;
    for (int group = 0; group < num_groups_; ++group) {
      // Only the last group can complete the countdown here, for this thread arrives for a group, or lets
      // it go, not before its turn. After that turn the job may be gone.
      reached_by_all = advance(group, phase, counters);
    }
    if (reached_by_all == kNothingToDo) return;
    phase = reached_by_all + 1;
  }
}

void PhaseSequencer::open(int group_index, int phase, int32_t num_tasks, ThreadCounters& counters) {
  Group& group = this->group(group_index);
  // Plain writes: everyone who claimed in the group's phase before has reported, and this thread has
  // acquired the reports. Published by the opening's release.
  group.job = job_;
  group.phase = phase;
  group.num_tasks = num_tasks;
  group.unfinished.store(num_tasks, std::memory_order_relaxed);
  const bool sleepers = group.claim.open(num_tasks);
  stall(StallPoint::kBeforeWake);
  if (sleepers) {
    group.claim.wake();
    counters.wakes_sent.add();
  } else {
    counters.wakes_skipped.add();
  }
  if (caller_helps_ && group_index == 0 && completion_.recall()) {
    completion_.wake();
    counters.wakes_sent.add();
  }
}

void PhaseSequencer::complete(ThreadCounters& counters) {
  const bool asleep = completion_.set_complete();
  // From here on the next job may have started: nothing of this one is touched. A wake that comes late is
  // one that its sleeper didn't expect, and it looks again.
  stall(StallPoint::kBeforeWake);
  if (asleep) {
    completion_.wake();
    counters.wakes_sent.add();
  } else {
    counters.wakes_skipped.add();
  }
}

void PhaseSequencer::rouse(int group_index, ThreadCounters& counters) {
  Group& group = this->group(group_index);
  if (group.claim.open(0)) {
    group.claim.wake();
    counters.wakes_sent.add();
  } else {
    counters.wakes_skipped.add();
  }
}

}  // namespace numa_moe
