// What one thread is running, for others to see: so that a task whose thread has lost its CPU can be run
// again by a thread that has nothing to do.
//
// Only tasks of repeatable phases are shown. A task is run at any number of threads at once, but committed
// by one: by whoever takes it from the slot where it was started. The thread that started it may come back
// at any later time, finds it taken, and drops what it computed.
//
// Why nothing that such a late thread reads is freed. A thread that runs a task, its own or another's, says
// so in its slot until it has left the job. Whoever runs another's task
//     shows itself in its own slot, counts itself as a visitor, then looks whether the task is still there;
// whoever finishes the job
//     has taken its last tasks, then reads the count of visitors, and if there was one, all slots.
// All of it is sequentially consistent, so in the single order of these operations either the visitor's look
// comes after the taking, and it leaves without touching the job, or its count comes before the finisher's
// read, which then finds the slots of both.
#pragma once

#include <atomic>
#include <cstdint>

#include "pool/padded.h"

namespace numa_moe {

class alignas(kSharingDistance) TaskSlot {
 public:
  // 0: nothing. Else, from the highest bit:
  //   32 bits: the epoch of the group's claim word that the task belongs to
  //   20 bits: the task's index and one; 0: a visitor, who runs another thread's task
  //   11 bits: tasks that the thread has finished in this phase, but not yet reported
  //    1 bit:  taken
  // The unreported ones go with the task: who takes it reports them, or the phase would wait for a thread
  // that has lost its CPU after all.
  using Value = uint64_t;

  static constexpr int32_t kMostTasks = (1 << 20) - 1;
  static constexpr int32_t kMostUnreported = (1 << 11) - 1;

  static Value started(uint32_t epoch, int32_t index, int32_t unreported) {
    return Value{epoch} << 32 | static_cast<Value>(index + 1) << 12 | static_cast<Value>(unreported) << 1;
  }
  static uint32_t epoch(Value value) { return static_cast<uint32_t>(value >> 32); }
  static int32_t index(Value value) { return static_cast<int32_t>(value >> 12 & kMostTasks) - 1; }
  static int32_t unreported(Value value) { return static_cast<int32_t>(value >> 1 & kMostUnreported); }
  // Whether it is a task that was started in this epoch and not yet taken.
  static bool can_be_taken(Value value, uint32_t in_epoch) {
    return epoch(value) == in_epoch && index(value) >= 0 && (value & kTaken) == 0;
  }

  Value read() const { return value_.load(std::memory_order_seq_cst); }

  // By the slot's thread. Release: what it did for the unreported tasks goes to whoever takes this one.
  void start(Value task) { value_.store(task, std::memory_order_release); }

  // By the slot's thread, which has run the task: true if it is the one to commit it; the slot is then empty.
  bool finish(Value task) {
    if (value_.compare_exchange_strong(task, 0, std::memory_order_seq_cst, std::memory_order_relaxed))
      return true;
    leave();
    return false;
  }

  // By a visitor, who has run the task as well: true if it is the one to commit it.
  bool take(Value task) {
    return value_.compare_exchange_strong(task, task | kTaken, std::memory_order_seq_cst,
                                          std::memory_order_relaxed);
  }

  // By the slot's thread: it visits another slot's task, of this epoch.
  void visit(uint32_t in_epoch) { value_.store(Value{in_epoch} << 32 | kTaken, std::memory_order_seq_cst); }
  // By the slot's thread, after its last access to the job. Release: what follows may free what it read.
  void leave() { value_.store(0, std::memory_order_release); }

  // How long the thread's last task took; read by itself alone.
  int64_t last_task_ns = 0;

 private:
  static constexpr Value kTaken = 1;

  std::atomic<Value> value_{0};
};

}  // namespace numa_moe
