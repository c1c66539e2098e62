// Dispatches to two groups whose tasks end at the same moment, phase by phase: both threads count down at
// once. Built twice, with the pool as it is and with one whose countdown of groups is a plain load and store
// (CMakeLists.txt), which loses counts on any CPU: then nobody completes, and the dispatch never returns.
// Exit status 0: all returned. 1: one didn't.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "jobs.h"
#include "pool/thread_pool.h"

namespace numa_moe {
namespace {

constexpr int64_t kDispatches = 100'000;
constexpr int kPhases = 32;
constexpr auto kTooLong = std::chrono::seconds(5);  // for one dispatch, whatever else the machine does

std::atomic<int64_t> returned{0};

// The two tasks of a phase wait for each other; then the second one to come, which knows first, dawdles for
// anything between nothing and longer than the first one needs to see it.
void end_together(const Task&) {
  static std::atomic<uint32_t> came{0};
  const uint32_t mine = came.fetch_add(1);
  if (mine % 2 == 1) {
    static uint32_t dawdle = 0;  // only the second one's, and there is one at a time
    for (volatile uint32_t step = dawdle++ % 256; step > 0;) step = step - 1;
    return;
  }
  for (int look = 0; came.load() == mine + 1; ++look) {
    if (look > 10'000) std::this_thread::yield();
  }
}

[[noreturn]] void dispatch() {
  FunctionJob job(std::vector<Phase>(kPhases, Phase{{1, 1}, Barrier::kPool}), end_together);
  // The calling thread is group 0's only one, so two CPUs have a thread each.
  ThreadPool pool(unpinned({0, 1}, true));
  while (returned.load(std::memory_order_relaxed) < kDispatches) {
    pool.run(job);
    returned.fetch_add(1, std::memory_order_relaxed);
  }
  std::printf("%lld dispatches returned\n", static_cast<long long>(kDispatches));
  std::fflush(stdout);
  _exit(0);
}

}  // namespace
}  // namespace numa_moe

int main() {
  using numa_moe::returned;
  std::thread(numa_moe::dispatch).detach();
  for (int64_t seen = -1; seen != returned.load();) {
    seen = returned.load();
    std::this_thread::sleep_for(numa_moe::kTooLong);
  }
  std::printf("dispatch %lld never returned\n", static_cast<long long>(returned.load() + 1));
  std::fflush(stdout);
  _exit(1);  // threads are stuck in the pool
}
