#include "ops/exit_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace numa_moe {
namespace {

// Kernel thread id of the thread that ends the process, or 0. Relaxed: a call that misses it by a moment
// is one that came back in time.
std::atomic<pid_t> exiting_thread{0};

}  // namespace

void begin_process_exit() {
  // A child that is forked meanwhile isn't ending.
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { exiting_thread.store(0, std::memory_order_relaxed); });
  static_cast<void>(registered);
  exiting_thread.store(gettid(), std::memory_order_relaxed);
}

ExitGuard::~ExitGuard() {
  const pid_t exiting = exiting_thread.load(std::memory_order_relaxed);
  if (exiting == 0 || exiting == gettid()) return;
  for (;;) pause();
}

}  // namespace numa_moe
