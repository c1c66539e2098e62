// One thread of the pool: pins itself, runs its group's tasks, spins a while when there are none, parks.
#pragma once

#include <atomic>
#include <cstdint>
#include <latch>
#include <thread>

#include "pool/phase_sequencer.h"
#include "pool/thread_counters.h"
#include "pool/thread_pool.h"

namespace numa_moe {

// What all workers of a pool share.
struct WorkerContext {
  WorkerContext(const void* owner, PhaseSequencer& tasks, int num_workers, Scheduling how)
      : pool(owner), sequencer(tasks), scheduling(how), placed(num_workers) {}

  const void* pool;  // whose tasks the workers run, see membership.h
  PhaseSequencer& sequencer;
  const Scheduling scheduling;
  std::latch placed;             // every worker has pinned itself and touched its group's memory
  std::latch may_run{1};         // the groups' state exists; the fields below are set
  int64_t spin_us = 0;           // how long an idle worker spins before it parks
  int64_t yields = 0;            // and how often it yields after that
  int64_t late_after_us = -1;    // how long it waits before it runs another one's task, -1: it never does
  std::atomic<bool> stop{false};  // set before the groups are roused
};

class Worker {
 public:
  // Starts the thread. Throws std::system_error.
  void start(WorkerContext& context, int group, int index_in_group, int index, int cpu);
  void join() { thread_.join(); }
  bool started() const { return thread_.joinable(); }

  // After context.placed; the mask is read back now.
  WorkerState state() const;
  const ThreadCounters& counters() const { return counters_; }

 private:
  void run(WorkerContext& context, int index_in_group);
  bool wait_for_tasks(WorkerContext& context);

  std::thread thread_;
  int group_ = 0;
  int index_ = 0;
  int requested_cpu_ = -1;
  int pin_error_ = 0;
  int scheduling_error_ = 0;
  int thread_id_ = 0;
  ThreadCounters counters_;
};

}  // namespace numa_moe
