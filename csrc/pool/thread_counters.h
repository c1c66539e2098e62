// What one thread counts, on cache lines of its own.
#pragma once

#include <atomic>
#include <cstdint>

#include "pool/padded.h"
#include "pool/thread_pool.h"

namespace numa_moe {

// Written by one thread at a time, read by any: a load and a store need no locked instruction. Relaxed:
// a total says nothing about other memory.
class Counter {
 public:
  void add(uint64_t amount = 1) {
    value_.store(value_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

struct alignas(kSharingDistance) ThreadCounters {
  Counter dispatches;
  Counter dispatcher_spins;
  Counter dispatcher_yields;
  Counter dispatcher_parks;
  Counter worker_parks;
  Counter wakes_sent;
  Counter wakes_skipped;
  Counter late_tasks;
  Counter late_tasks_won;

  void add_to(PoolCounters& totals) const {
    totals.dispatches += dispatches.value();
    totals.dispatcher_spins += dispatcher_spins.value();
    totals.dispatcher_yields += dispatcher_yields.value();
    totals.dispatcher_parks += dispatcher_parks.value();
    totals.worker_parks += worker_parks.value();
    totals.wakes_sent += wakes_sent.value();
    totals.wakes_skipped += wakes_skipped.value();
    totals.late_tasks += late_tasks.value();
    totals.late_tasks_won += late_tasks_won.value();
  }
};

}  // namespace numa_moe
