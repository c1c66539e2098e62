// One group's open tasks and whether its workers sleep, in a single 64-bit word.
//
//   high half: the epoch, one higher with each opening; parked workers sleep on it
//   low half:  bit 31, set while a worker may be asleep; bits 0 to 30, the tasks not claimed yet
//
// Everything that two threads could disagree about lives in this one word, so the order in which they
// change it settles who was first, and no pair of separate words has to be kept in step by fences:
//  - A claim is a compare-exchange of the whole word. A thread that read it, slept through any number of
//    phases and goes on holds an old epoch, and its claim fails.
//  - A worker announces its sleep by a compare-exchange too. Either it comes before the next opening, which
//    then reads the bit and wakes, or after, and then it fails. An opening that finds the bit clear needs
//    no system call.
// Epochs are equal again after 2^32 openings; for that to matter a thread would have to stand still
// between two of its instructions for just that many.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "pool/futex.h"
#include "pool/stall_points.h"

namespace numa_moe {

class ClaimWord {
 public:
  using Value = uint64_t;

  static uint32_t epoch(Value value) { return static_cast<uint32_t>(value >> 32); }
  static int32_t unclaimed(Value value) { return static_cast<int32_t>(value & (kSleepers - 1)); }
  static bool has_sleepers(Value value) { return (value & kSleepers) != 0; }

  // Acquire, so that a worker that sees the opening which stops it sees the order to stop as well.
  Value read() const { return word_.load(std::memory_order_acquire); }

  // For a caller that helps and is about to sleep elsewhere: its half of a pair with the sequentially
  // consistent exchange in open(), see CompletionSignal.
  bool has_tasks() const { return unclaimed(word_.load(std::memory_order_seq_cst)) > 0; }

  // Claims a task if there still is what was seen. Success acquires: the word was last changed either by
  // open() or by claims that follow it, which continue its release sequence, so what the opener wrote
  // before is visible.
  bool claim_if_unchanged(Value seen) {
    return word_.compare_exchange_weak(seen, seen - 1, std::memory_order_acquire, std::memory_order_relaxed);
  }

  // Claims one of the open tasks. Returns the word as it was before, this task still unclaimed; one without
  // unclaimed tasks if none is left.
  Value claim() {
    for (;;) {
      const Value seen = word_.load(std::memory_order_relaxed);  // what it says is checked by the exchange
      if (unclaimed(seen) == 0) return seen;
      stall(StallPoint::kBeforeClaim);
      if (claim_if_unchanged(seen)) return seen;
    }
  }

  // Opens `tasks` tasks (0: just moves the epoch on). Returns whether wake() is due. Only when nothing is
  // unclaimed, by one thread at a time, each having seen the opening before (hence the relaxed load).
  // Release: what was written before belongs to the opened tasks. Sequentially consistent: the opener's
  // half of the pair with a caller that helps, see CompletionSignal; on x86 an exchange is that anyway.
  [[nodiscard]] bool open(int32_t tasks) {
    const uint32_t next_epoch = epoch(word_.load(std::memory_order_relaxed)) + 1;
    const Value next = (Value{next_epoch} << 32) | static_cast<uint32_t>(tasks);
    return has_sleepers(word_.exchange(next, std::memory_order_seq_cst));
  }

  void wake() const { futex_wake_all(epoch_address()); }

  // Makes the next opening wake its caller up. False if there has been an opening since `seen` was read.
  // Relaxed: no data passes here, only the word's own order counts.
  bool announce_sleeper(Value seen) {
    if (has_sleepers(seen)) return true;  // the bit stays until the next opening, which changes the epoch
    return word_.compare_exchange_strong(seen, seen | kSleepers, std::memory_order_relaxed,
                                         std::memory_order_relaxed);
  }

  // Sleeps until wake(), but not if there has been an opening since `seen` was read: the kernel compares
  // the epoch before it queues the thread.
  void sleep(Value seen) const { futex_wait(epoch_address(), epoch(seen)); }

 private:
  static constexpr Value kSleepers = Value{1} << 31;

  // Only the kernel reads through this pointer.
  const uint32_t* epoch_address() const {
    return reinterpret_cast<const uint32_t*>(&word_) + (std::endian::native == std::endian::little ? 1 : 0);
  }

  static_assert(std::atomic<Value>::is_always_lock_free && sizeof(std::atomic<Value>) == sizeof(Value));
  std::atomic<Value> word_{0};
};

}  // namespace numa_moe
