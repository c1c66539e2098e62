// How the thread in run() learns that its job is complete, asleep if need be.
//
// Sleep and completion change the same word, by read-modify-write: whichever comes first, the other one
// sees it. A sleeping dispatcher is therefore woken exactly once per job, an awake one never, without any
// fence.
//
// A caller that helps must also be recalled when a phase of its group opens, and that is announced in
// another word (ClaimWord). There the usual pair is needed, all of it sequentially consistent:
//   the caller     announces its sleep here,  then reads the claim word;
//   an opener      changes the claim word,    then reads the announcement here.
// In the single order of these four operations one of the two reads comes after the other thread's write:
// either the caller finds the tasks or the opener finds the caller asleep.
#pragma once

#include <atomic>
#include <cstdint>

#include "pool/futex.h"

namespace numa_moe {

class CompletionSignal {
 public:
  // Before the job's first phase opens. Relaxed: the opening publishes it.
  void arm() { state_.store(kRunning, std::memory_order_relaxed); }

  // Acquire: everything that the job's tasks wrote is visible once this is true.
  bool complete() const { return state_.load(std::memory_order_acquire) == kComplete; }

  // By the last finisher, once per job. Returns whether wake() is due. Release: the tasks' writes, which
  // the last finisher has acquired, pass on to the dispatcher.
  [[nodiscard]] bool set_complete() {
    return state_.exchange(kComplete, std::memory_order_release) == kAsleep;
  }

  // Takes back a helping caller's announcement after a phase of its group was opened. Returns whether
  // wake() is due.
  [[nodiscard]] bool recall() {
    uint32_t expected = kAsleep;
    return state_.load(std::memory_order_seq_cst) == kAsleep &&
           state_.compare_exchange_strong(expected, kRunning, std::memory_order_relaxed,
                                          std::memory_order_relaxed);
  }

  void wake() const { futex_wake_one(address()); }

  // By the thread in run(). False if the job is complete: acquire, like complete().
  bool announce_sleep() {
    uint32_t expected = kRunning;
    return state_.compare_exchange_strong(expected, kAsleep, std::memory_order_seq_cst,
                                          std::memory_order_acquire) ||
           expected == kAsleep;
  }

  // Awake again, for whatever reason.
  void retract_sleep() {
    uint32_t expected = kAsleep;
    state_.compare_exchange_strong(expected, kRunning, std::memory_order_relaxed, std::memory_order_relaxed);
  }

  // Sleeps while the announcement stands.
  void sleep() const { futex_wait(address(), kAsleep); }

 private:
  static constexpr uint32_t kComplete = 0;
  static constexpr uint32_t kRunning = 1;
  static constexpr uint32_t kAsleep = 2;

  const uint32_t* address() const { return reinterpret_cast<const uint32_t*>(&state_); }

  static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);
  std::atomic<uint32_t> state_{kComplete};
};

}  // namespace numa_moe
