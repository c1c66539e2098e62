// Jobs for the pool's tests.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "pool/thread_pool.h"

namespace numa_moe {

// Calls a function for each task.
class FunctionJob final : public Job {
 public:
  FunctionJob(std::vector<Phase> phases, std::function<void(const Task&)> function)
      : phases_(std::move(phases)), function_(std::move(function)) {}

  const std::vector<Phase>& phases() const override { return phases_; }
  void run_task(const Task& task) override { function_(task); }

 private:
  const std::vector<Phase> phases_;
  const std::function<void(const Task&)> function_;
};

// Counts how often each task ran.
class TaskCounts {
 public:
  explicit TaskCounts(const std::vector<Phase>& phases) {
    for (const Phase& phase : phases) {
      auto& groups = counts_.emplace_back();
      for (const int32_t tasks : phase.tasks_per_group) {
        groups.push_back(std::make_unique<std::atomic<int>[]>(static_cast<std::size_t>(tasks)));
        sizes_.push_back(tasks);
      }
    }
  }

  void add(const Task& task) {
    counts_.at(static_cast<std::size_t>(task.phase))
        .at(static_cast<std::size_t>(task.group))[static_cast<std::size_t>(task.index)]
        .fetch_add(1, std::memory_order_relaxed);
  }

  // How many of all tasks ran exactly so often.
  int64_t tasks_run(int times) const {
    int64_t tasks = 0;
    std::size_t position = 0;
    for (const auto& groups : counts_) {
      for (const auto& group : groups) {
        const int32_t size = sizes_[position++];
        for (int32_t index = 0; index < size; ++index)
          tasks += group[static_cast<std::size_t>(index)] == times;
      }
    }
    return tasks;
  }

 private:
  std::vector<std::vector<std::unique_ptr<std::atomic<int>[]>>> counts_;
  std::vector<int32_t> sizes_;
};

inline int64_t total_tasks(const std::vector<Phase>& phases) {
  int64_t total = 0;
  for (const Phase& phase : phases) {
    for (const int32_t tasks : phase.tasks_per_group) total += tasks;
  }
  return total;
}

// Unpinned workers: so many in each group.
inline PoolOptions unpinned(const std::vector<int>& workers_per_group, bool caller_helps = false) {
  PoolOptions options;
  for (const int workers : workers_per_group) {
    options.cpus_per_group.push_back(std::vector<int>(static_cast<std::size_t>(workers), -1));
  }
  options.caller_helps = caller_helps;
  return options;
}

// The same pool with every wait going straight to sleep.
inline PoolOptions parking(PoolOptions options) {
  options.worker_spin_us = 0;
  options.dispatcher_spin_us = 0;
  options.dispatcher_yields = 0;
  return options;
}

// Waits for something that another thread is sure to do soon; the watchdog ends it if not.
template <typename Condition>
void wait_for(Condition condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

// Gives a thread that should be waiting the time to do wrong. Too short a time only overlooks a fault.
inline void leave_time_to_go_wrong() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

}  // namespace numa_moe
