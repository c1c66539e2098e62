// Sleeping on a 32-bit word of memory, by raw system call (futex(2)). Private to this process.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdint>

namespace numa_moe {

// Sleeps if the word still holds `expected`; the kernel compares and queues in one step. Returns after a
// wake, a signal, for no reason at all, or at once when the word differs: callers look again in a loop,
// so the result isn't needed. The word is read by the kernel alone: whatever the caller must see of other
// threads' writes it reads itself, with an ordering of its own.
inline void futex_wait(const uint32_t* word, uint32_t expected) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

inline void futex_wake_one(const uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

inline void futex_wake_all(const uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace numa_moe
