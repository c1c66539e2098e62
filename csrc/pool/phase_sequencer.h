// Takes a job through its phases: claims, barriers, completion. Whoever finishes a phase opens the next
// one itself, so no thread has to be woken just to coordinate. Knows nothing of how threads wait.
//
// A phase of a group ends when its count of unfinished tasks comes to zero. At a group barrier the thread
// that brought it there opens the group's next phase. At a pool barrier it decrements one countdown of
// groups, and the thread that brings that to zero opens the next phase in all groups or completes the job.
// One countdown needs no fence: each group's last thread does a read-modify-write on the same word, exactly
// one of them sees it come to zero, and acquire-release hands it what all others did before. (If each
// looked at the other groups' counts instead, two of them could miss each other without a sequentially
// consistent fence.)
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "pool/completion_signal.h"
#include "pool/group.h"
#include "pool/own_page.h"
#include "pool/padded.h"
#include "pool/task_slot.h"
#include "pool/thread_counters.h"
#include "pool/thread_pool.h"
#include "pool/thread_statistics.h"

namespace numa_moe {

class PhaseSequencer {
 public:
  // workers_per_group: threads are numbered through the groups. caller_helps: one more thread, the last, is
  // of group 0, and completion() has to be recalled by those who open a phase of it.
  PhaseSequencer(const std::vector<int>& workers_per_group, bool caller_helps, bool collect_statistics);

  // The memory of a group's shared state, for a thread of the group to touch first, and then construct().
  OwnPage<Group>& group_page(int group) { return groups_[static_cast<std::size_t>(group)]; }
  Group& group(int group) { return *groups_[static_cast<std::size_t>(group)]; }
  CompletionSignal& completion() { return completion_; }

  // Opens the job's first phase, passing over empty ones. One thread at a time, and not before the job
  // before is complete. `phases` fits the groups (checked by the caller).
  void start(Job& job, const std::vector<Phase>& phases, ThreadCounters& counters);

  // Claims and runs tasks of the group until none is left to claim. By threads of this group.
  void run_tasks(int group, int thread, ThreadCounters& counters);

  // How long a thread of the group with nothing to claim should wait before it visits others' tasks: its own
  // last one twice over, since theirs are about as large, but no less than `least`. Microseconds; -1 if
  // nobody is in a task that can be run again.
  int64_t microseconds_to_lateness(int group, int thread, int64_t least);
  // Runs again what another thread of the group has started and not finished. By a thread of the group with
  // nothing to claim. False if there was no such task.
  bool rerun_late_task(int group, int thread, ThreadCounters& counters);
  // Whether somebody has visited a task of the job, so that threads may be late in it. After completion, by
  // the thread that called start().
  bool was_visited() const { return visitors_.load(std::memory_order_seq_cst) != 0; }
  const std::vector<TaskSlot>& slots() const { return slots_; }

  // What the first task that failed threw, or null. After completion, by the thread that called start().
  std::exception_ptr take_error();

  // Counts the job that is complete. By the thread that called start(), before it calls it again.
  void count_finished_job();
  // By any thread.
  std::vector<SiteStatistics> statistics() const;

  // Makes the group's threads look again, though there is nothing to claim. Between jobs.
  void rouse(int group, ThreadCounters& counters);

 private:
  // advance() and arrive() return a phase whose end all groups have reached, so that the calling thread has
  // to open the next one; or this, and then it may not touch the job any more.
  static constexpr int kNothingToDo = -1;

  bool ends_with_pool_barrier(int phase) const;
  int advance(int group, int phase, ThreadCounters& counters);
  int arrive(int phase);
  void open(int group, int phase, int32_t num_tasks, ThreadCounters& counters);
  void finish_group_phase(int group, int phase, ThreadCounters& counters);
  void open_all(int phase, ThreadCounters& counters);
  void complete(ThreadCounters& counters);
  void run_task(Job& job, const Task& task);
  bool run_repeatable_task(Job& job, const Task& task, TaskSlot::Value shown);
  static void enter_job(const Group& group, uint32_t number, ThreadStatistics& statistics);
  void report(int group, int phase, int32_t finished, ThreadCounters& counters);
  void fail(std::exception_ptr error);
  TaskSlot& slot(int thread) { return slots_[static_cast<std::size_t>(thread)]; }
  template <typename Visit>
  bool any_other_slot(int group, int thread, Visit visit);

  const int num_groups_;
  const bool caller_helps_;
  const bool collect_statistics_;
  std::vector<int> first_thread_;  // of each group, and the end

  std::vector<TaskSlot> slots_;  // of each thread
  std::vector<ThreadStatistics> thread_statistics_;
  ThreadStatistics job_statistics_;  // by the thread in start()

  // Constant during a job: written by start(), read by those who open phases.
  Job* job_ = nullptr;
  const std::vector<Phase>* phases_ = nullptr;
  uint32_t job_number_ = 0;  // 0: nobody counts
  int site_ = -1;
  int64_t started_ns_ = 0;
  int finished_site_ = -1;  // of the job before
  int64_t finished_ns_ = 0;

  // Read before each task, written at most once per job by a task that fails. Relaxed: it only saves
  // work. error_ is written by the thread that sets it, and read after completion.
  alignas(kSharingDistance) std::atomic<bool> failed_{false};
  std::exception_ptr error_;

  // Since start(). Hardly ever written.
  alignas(kSharingDistance) std::atomic<uint32_t> visitors_{0};

  int64_t completed_ns_ = 0;  // written by who completes the job, read after completion
  alignas(kSharingDistance) std::atomic<int> groups_left_{0};
  alignas(kSharingDistance) CompletionSignal completion_;
  alignas(kSharingDistance) std::vector<OwnPage<Group>> groups_;
};

}  // namespace numa_moe
