#include "pool/affinity.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <cerrno>
#include <thread>
#include <vector>

namespace numa_moe {
namespace {

// Independent of the code under test: asks the C library with its fixed-size mask.
std::vector<int> allowed_by_libc() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return {};
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
  }
  return cpus;
}

TEST(Affinity, ReadsTheMask) { EXPECT_EQ(allowed_cpus(0), allowed_by_libc()); }

TEST(Affinity, PinsTheCallingThreadOnly) {
  const std::vector<int> before = allowed_by_libc();
  for (const int cpu : before) {
    std::thread([cpu] {
      EXPECT_EQ(pin_calling_thread(cpu), 0);
      EXPECT_EQ(allowed_by_libc(), std::vector<int>{cpu});
      EXPECT_EQ(allowed_cpus(calling_thread_id()), std::vector<int>{cpu});
    }).join();
  }
  EXPECT_EQ(allowed_by_libc(), before);
}

TEST(Affinity, ReportsACpuThatDoesNotExist) {
  for (const int cpu : {-1, 1023, 1024, 40000, 1 << 16, 2000000000}) {
    std::thread([cpu] {
      const std::vector<int> before = allowed_by_libc();
      EXPECT_EQ(pin_calling_thread(cpu), EINVAL) << cpu;
      EXPECT_EQ(allowed_cpus(0), before) << cpu;
    }).join();
  }
}

TEST(Affinity, KnowsNothingOfAThreadThatDoesNotExist) {
  EXPECT_EQ(allowed_cpus(2000000000), std::vector<int>{});
}

}  // namespace
}  // namespace numa_moe
