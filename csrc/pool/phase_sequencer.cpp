#include "pool/phase_sequencer.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "pool/stall_points.h"

namespace numa_moe {

PhaseSequencer::PhaseSequencer(const std::vector<int>& workers_per_group, bool caller_helps,
                               bool collect_statistics)
    : num_groups_(static_cast<int>(workers_per_group.size())),
      caller_helps_(caller_helps),
      collect_statistics_(collect_statistics),
      first_thread_{0},
      slots_(static_cast<std::size_t>(std::accumulate(workers_per_group.begin(), workers_per_group.end(), 0) +
                                      (caller_helps ? 1 : 0))),
      thread_statistics_(slots_.size()),
      groups_(workers_per_group.size()) {
  for (const int workers : workers_per_group) first_thread_.push_back(first_thread_.back() + workers);
}

void PhaseSequencer::start(Job& job, const std::vector<Phase>& phases, ThreadCounters& counters) {
  // Plain and relaxed writes: the threads of the job before have reported and left (or are late in it, and
  // look at none of this), and those of this one come in through a claim, which acquires what its opening
  // released.
  job_ = &job;
  phases_ = &phases;
  failed_.store(false, std::memory_order_relaxed);
  visitors_.store(0, std::memory_order_relaxed);
  completion_.arm();
  if (collect_statistics_) {
    if (++job_number_ == 0) ++job_number_;
    site_ = std::clamp(job.site(), 0, kMostSites - 1);
    started_ns_ = now_ns();
  }
  open_all(0, counters);
}

void PhaseSequencer::run_tasks(int group_index, int thread, ThreadCounters& counters) {
  Group& group = this->group(group_index);
  TaskSlot& own = slot(thread);
  ThreadStatistics& statistics = thread_statistics_[static_cast<std::size_t>(thread)];
  for (;;) {
    int32_t finished = 0;
    int phase = 0;
    int64_t begin_ns = 0;  // 0: none begun that is counted
    int32_t committed = 0;
    for (;;) {
      const ClaimWord::Value claimed = group.claim.claim();
      const int32_t unclaimed = ClaimWord::unclaimed(claimed);
      if (unclaimed == 0) break;
      // Relaxed: the claim has acquired them, and they stay until the task is reported, which nobody else
      // does before it is shown in the slot.
      Job& job = *group.job.load(std::memory_order_relaxed);
      phase = group.phase.load(std::memory_order_relaxed);
      const int32_t index = group.num_tasks.load(std::memory_order_relaxed) - unclaimed;
      const Task task{phase, group_index, index, thread};
      const uint32_t number = group.job_number.load(std::memory_order_relaxed);
      if (number != 0 && (begin_ns == 0 || !statistics.is_in(number))) {
        const int64_t now = now_ns();
        // It was late in a job, and is in the next one now.
        if (begin_ns != 0) statistics.worked(now - begin_ns, committed);
        begin_ns = now;
        committed = 0;
        enter_job(group, number, statistics);
      }
      if (!group.repeatable.load(std::memory_order_relaxed)) {
        run_task(job, task);
        ++finished;
        ++committed;
        continue;
      }
      const TaskSlot::Value shown = TaskSlot::started(ClaimWord::epoch(claimed), index, finished);
      const auto begin = std::chrono::steady_clock::now();
      own.start(shown);
      if (run_repeatable_task(job, task, shown)) {
        ++finished;
        ++committed;
      } else {
        // Taken: whoever took it has reported it, and with it those finished before. The phase may be over.
        finished = 0;
        if (number != 0) statistics.was_late();
      }
      own.last_task_ns =
          std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin)
              .count();
      if (finished == TaskSlot::kMostUnreported) break;
    }
    // Reported together, once there is nothing more to claim: the phase can't end meanwhile, and each
    // thread writes to the shared count once per phase instead of once per task.
    if (finished > 0) report(group_index, phase, finished, counters);
    // Nobody waits any longer for what this thread counts now.
    if (begin_ns != 0) statistics.worked(now_ns() - begin_ns, committed);
    if (finished == 0) return;
  }
}

// By a thread of the group that has a task of the job, and hasn't given it up: nobody opens another one.
void PhaseSequencer::enter_job(const Group& group, uint32_t number, ThreadStatistics& statistics) {
  if (statistics.is_in(number)) return;
  statistics.enter(number, group.site.load(std::memory_order_relaxed),
                   {number - 1, group.finished_site.load(std::memory_order_relaxed),
                    group.finished_ns.load(std::memory_order_relaxed)});
}

void PhaseSequencer::report(int group_index, int phase, int32_t finished, ThreadCounters& counters) {
  stall(StallPoint::kBeforeReport);
  // Release: what the tasks wrote. Acquire: if this is the last report, what all other tasks of the
  // group wrote (their reports are read-modify-writes, one release sequence).
  if (group(group_index).unfinished.fetch_sub(finished, std::memory_order_acq_rel) != finished) return;
  finish_group_phase(group_index, phase, counters);
}

void PhaseSequencer::run_task(Job& job, const Task& task) {
  if (failed_.load(std::memory_order_relaxed)) return;
  try {
    job.run_task(task);
  } catch (...) {
    fail(std::current_exception());
  }
  // An exception that lost against another one is gone by here; the winner's last reference is error_'s.
}

// By the thread that has shown the task in its slot. False if another one has taken it.
bool PhaseSequencer::run_repeatable_task(Job& job, const Task& task, TaskSlot::Value shown) {
  TaskSlot& own = slot(task.thread);
  std::exception_ptr error;
  const bool skipped = failed_.load(std::memory_order_relaxed);
  if (!skipped) {
    try {
      stall(StallPoint::kInTask);
      job.run_task(task);
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (!own.finish(shown)) return false;
  if (error != nullptr) {
    fail(std::move(error));
  } else if (!skipped) {
    job.commit_task(task);
  }
  return true;
}

void PhaseSequencer::fail(std::exception_ptr error) {
  if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::move(error);
}

// Whether visit(slot) is true of some thread of the group but this one.
template <typename Visit>
bool PhaseSequencer::any_other_slot(int group, int thread, Visit visit) {
  const auto index = static_cast<std::size_t>(group);
  for (int other = first_thread_[index]; other < first_thread_[index + 1]; ++other) {
    if (other != thread && visit(slot(other))) return true;
  }
  const int caller = first_thread_.back();
  return group == 0 && caller_helps_ && caller != thread && visit(slot(caller));
}

int64_t PhaseSequencer::microseconds_to_lateness(int group_index, int thread, int64_t least) {
  const uint32_t epoch = ClaimWord::epoch(group(group_index).claim.read());
  const bool waiting = any_other_slot(group_index, thread, [epoch](const TaskSlot& other) {
    return TaskSlot::can_be_taken(other.read(), epoch);
  });
  return waiting ? std::max(least, 2 * slot(thread).last_task_ns / 1000) : -1;
}

bool PhaseSequencer::rerun_late_task(int group_index, int thread, ThreadCounters& counters) {
  Group& group = this->group(group_index);
  const uint32_t epoch = ClaimWord::epoch(group.claim.read());
  // Acquire: not read after the look below. If the task is still there by then, the phase was open all the
  // while, and these are its own.
  Job* const job = group.job.load(std::memory_order_acquire);
  const int phase = group.phase.load(std::memory_order_acquire);
  TaskSlot& own = slot(thread);
  return any_other_slot(group_index, thread, [&](TaskSlot& other) {
    const TaskSlot::Value shown = other.read();
    if (!TaskSlot::can_be_taken(shown, epoch)) return false;
    own.visit(epoch);
    visitors_.fetch_add(1, std::memory_order_seq_cst);
    stall(StallPoint::kBeforeLook);
    if (other.read() != shown) {
      own.leave();
      return false;
    }
    counters.late_tasks.add();
    const int64_t begin_ns = now_ns();
    const Task task{phase, group_index, TaskSlot::index(shown), thread};
    std::exception_ptr error;
    const bool skipped = failed_.load(std::memory_order_relaxed);
    if (!skipped) {
      try {
        stall(StallPoint::kInVisit);
        job->run_task(task);
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (!other.take(shown)) {
      own.leave();
      return true;
    }
    counters.late_tasks_won.add();
    // The task is this thread's now, so the job can't end before the report.
    const uint32_t number = group.job_number.load(std::memory_order_relaxed);
    ThreadStatistics& statistics = thread_statistics_[static_cast<std::size_t>(thread)];
    if (number != 0) enter_job(group, number, statistics);
    if (error != nullptr) {
      fail(std::move(error));
    } else if (!skipped) {
      job->commit_task(task);
    }
    // Left before the report, like everyone: with it the job may be complete.
    own.leave();
    report(group_index, phase, TaskSlot::unreported(shown) + 1, counters);
    if (number != 0) statistics.worked(now_ns() - begin_ns, 1);
    return true;
  });
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
  // Relaxed: everyone who claimed in the group's phase before has reported, or others have for it, and this
  // thread has acquired the reports. Published by the opening's release.
  group.job.store(job_, std::memory_order_relaxed);
  group.phase.store(phase, std::memory_order_relaxed);
  group.num_tasks.store(num_tasks, std::memory_order_relaxed);
  group.job_number.store(job_number_, std::memory_order_relaxed);
  group.site.store(static_cast<int16_t>(site_), std::memory_order_relaxed);
  group.finished_site.store(static_cast<int16_t>(finished_site_), std::memory_order_relaxed);
  group.finished_ns.store(finished_ns_, std::memory_order_relaxed);
  group.repeatable.store((*phases_)[static_cast<std::size_t>(phase)].repeatable, std::memory_order_relaxed);
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
  if (collect_statistics_) completed_ns_ = now_ns();
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

void PhaseSequencer::count_finished_job() {
  if (!collect_statistics_) return;
  finished_site_ = site_;
  finished_ns_ = completed_ns_ - started_ns_;
  job_statistics_.job_took(finished_site_, finished_ns_);
}

std::vector<SiteStatistics> PhaseSequencer::statistics() const {
  std::vector<SiteStatistics> all;
  for (std::size_t thread = 0; thread < thread_statistics_.size(); ++thread) {
    thread_statistics_[thread].append_to(all, static_cast<int>(thread));
  }
  job_statistics_.append_to(all, -1);
  return all;
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
