// Waiting without sleeping, always bounded.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace numa_moe {

// Tells the core that this is a wait: it leaves the pipeline to an SMT sibling and saves power.
inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  // `yield` is a no-op on most cores; an instruction barrier really stalls for a few dozen cycles.
  asm volatile("isb" ::: "memory");
#else
  asm volatile("" ::: "memory");
#endif
}

// The clock is read once in so many pauses: a read costs about as much as a pause, and the bound may be
// overrun by a microsecond.
inline constexpr int kPausesPerClockRead = 16;

// Spins until condition() holds or `microseconds` have passed; returns condition().
template <typename Condition>
bool spin_until(Condition condition, int64_t microseconds) {
  if (condition()) return true;
  if (microseconds <= 0) return false;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      cpu_relax();
      if (condition()) return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// Gives the CPU to others up to `limit` times until condition() holds; returns condition() and how
// often it yielded.
struct YieldResult {
  bool holds;
  int64_t yields;
};

template <typename Condition>
YieldResult yield_until(Condition condition, int64_t limit) {
  int64_t yields = 0;
  bool holds = condition();
  while (!holds && yields < limit) {
    sched_yield();
    ++yields;
    holds = condition();
  }
  return {holds, yields};
}

}  // namespace numa_moe
