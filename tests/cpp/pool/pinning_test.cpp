// Workers on their CPUs, or not, and that the pool says so.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <vector>

#include "jobs.h"
#include "memory/system_call_filter.h"
#include "pool/affinity.h"
#include "pool/thread_pool.h"

namespace numa_moe {
namespace {

constexpr int kNoSuchCpu = 1 << 15;

void expect_runs_well(ThreadPool& pool) {
  const std::vector<Phase> phases(
      2, Phase{std::vector<int32_t>(static_cast<std::size_t>(pool.num_groups()), 5), Barrier::kPool});
  TaskCounts counts(phases);
  FunctionJob job(phases, [&](const Task& task) { counts.add(task); });
  pool.run(job);
  EXPECT_EQ(counts.tasks_run(1), total_tasks(phases));
}

// Seen to fail with: workers not pinned; all pinned to the first CPU.
TEST(Pinning, EveryWorkerIsOnItsCpu) {
  const std::vector<int> cpus = allowed_cpus(0);
  PoolOptions options;
  for (const int cpu : cpus) options.cpus_per_group.push_back({cpu});  // one group per CPU
  ThreadPool pool(options);
  const std::vector<WorkerState> workers = pool.workers();
  ASSERT_EQ(workers.size(), cpus.size());
  std::set<int> thread_ids;
  for (std::size_t worker = 0; worker < workers.size(); ++worker) {
    EXPECT_EQ(workers[worker].group, static_cast<int>(worker));
    EXPECT_EQ(workers[worker].requested_cpu, cpus[worker]);
    EXPECT_EQ(workers[worker].allowed, std::vector<int>{cpus[worker]});
    EXPECT_EQ(workers[worker].pin_error, 0);
    EXPECT_TRUE(workers[worker].pinned());
    thread_ids.insert(workers[worker].thread_id);
  }
  EXPECT_EQ(thread_ids.size(), cpus.size());
  EXPECT_TRUE(pool.workers_spin());

  std::mutex mutex;
  std::vector<std::set<int>> ran_on(cpus.size());
  FunctionJob job({{std::vector<int32_t>(cpus.size(), 10), Barrier::kPool}}, [&](const Task& task) {
    const std::lock_guard lock(mutex);
    ran_on[static_cast<std::size_t>(task.group)].insert(sched_getcpu());
  });
  pool.run(job);
  for (std::size_t group = 0; group < cpus.size(); ++group)
    EXPECT_EQ(ran_on[group], std::set<int>{cpus[group]});
}

// Seen to fail with: the constructor pinning the calling thread.
TEST(Pinning, TheCallersAffinityStays) {
  const std::vector<int> before = allowed_cpus(0);
  PoolOptions options;
  options.cpus_per_group = {{before.front()}};
  options.caller_helps = true;
  ThreadPool pool(options);
  expect_runs_well(pool);
  EXPECT_EQ(allowed_cpus(0), before);
}

TEST(Pinning, UnpinnedWorkersKeepTheProcesssMask) {
  ThreadPool pool(unpinned({2}));
  for (const WorkerState& worker : pool.workers()) {
    EXPECT_EQ(worker.allowed, allowed_cpus(0));
    EXPECT_EQ(worker.requested_cpu, -1);
    EXPECT_EQ(worker.pin_error, 0);
    EXPECT_FALSE(worker.pinned());
  }
  EXPECT_FALSE(pool.workers_spin());
  expect_runs_well(pool);
}

TEST(Pinning, ACpuThatDoesNotExistIsReported) {
  PoolOptions options;
  options.cpus_per_group = {{allowed_cpus(0).front()}, {kNoSuchCpu}};
  ThreadPool pool(options);
  const std::vector<WorkerState> workers = pool.workers();
  EXPECT_TRUE(workers[0].pinned());
  EXPECT_FALSE(workers[1].pinned());
  EXPECT_EQ(workers[1].pin_error, EINVAL);
  EXPECT_EQ(workers[1].allowed, allowed_cpus(0));
  EXPECT_FALSE(pool.workers_spin());
  expect_runs_well(pool);
}

// Two workers on one CPU: a spinning one would keep the other from working.
TEST(Pinning, WorkersThatShareACpuDoNotSpin) {
  const int cpu = allowed_cpus(0).front();
  PoolOptions options;
  options.cpus_per_group = {{cpu, cpu}};
  ThreadPool pool(options);
  for (const WorkerState& worker : pool.workers()) EXPECT_TRUE(worker.pinned());
  EXPECT_FALSE(pool.workers_spin());
  expect_runs_well(pool);
}

// The mask is read when asked for: somebody else moves a worker.
TEST(Pinning, AMaskChangedLaterIsSeen) {
  const std::vector<int> cpus = allowed_cpus(0);
  if (cpus.size() < 2) GTEST_SKIP() << "needs two CPUs";
  PoolOptions options;
  options.cpus_per_group = {{cpus[0]}};
  ThreadPool pool(options);
  ASSERT_TRUE(pool.workers()[0].pinned());
  cpu_set_t other;
  CPU_ZERO(&other);
  CPU_SET(static_cast<std::size_t>(cpus[1]), &other);
  ASSERT_EQ(sched_setaffinity(pool.workers()[0].thread_id, sizeof(other), &other), 0);
  EXPECT_EQ(pool.workers()[0].allowed, std::vector<int>{cpus[1]});
  EXPECT_FALSE(pool.workers()[0].pinned());
  expect_runs_well(pool);
}

// In a process of its own: says on stderr what the pool made of it.
[[noreturn]] void start_pool_where(int system_call, int error) {
  const std::vector<int> before = allowed_cpus(0);
  if (!deny_system_calls({system_call}, error)) {
    std::fputs("no seccomp here", stderr);
    std::exit(0);
  }
  PoolOptions options;
  options.cpus_per_group = {{before.front()}};
  ThreadPool pool(options);
  const WorkerState worker = pool.workers()[0];
  int tasks = 0;
  FunctionJob job({{{3}, Barrier::kPool}}, [&](const Task&) { ++tasks; });
  pool.run(job);
  std::fprintf(stderr, "pinned %d error %d mask %s tasks %d spin %d", worker.pinned(), worker.pin_error,
               worker.allowed == before ? "as before"
               : worker.allowed.empty() ? "unknown"
                                        : "other",
               tasks, pool.workers_spin());
  std::exit(0);
}

// With one CPU the mask of an unpinned worker looks pinned, and rightly so.
TEST(PinningDeathTest, ARefusedPinIsReported) {
  if (allowed_cpus(0).size() < 2) GTEST_SKIP() << "needs two CPUs";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(start_pool_where(SYS_sched_setaffinity, EPERM), testing::ExitedWithCode(0),
              "pinned 0 error 1 mask as before tasks 3 spin 0|no seccomp here");
}

// Seen to fail with: the call's answer taken for success.
TEST(PinningDeathTest, APinThatOnlyPretendsIsReported) {
  if (allowed_cpus(0).size() < 2) GTEST_SKIP() << "needs two CPUs";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(start_pool_where(SYS_sched_setaffinity, 0), testing::ExitedWithCode(0),
              "pinned 0 error 0 mask as before tasks 3 spin 0|no seccomp here");
}

#ifndef NUMA_MOE_SANITIZED  // sanitizers need this call themselves
TEST(PinningDeathTest, AMaskThatCannotBeReadIsNoPin) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(start_pool_where(SYS_sched_getaffinity, EINVAL), testing::ExitedWithCode(0),
              "pinned 0 error 0 mask unknown tasks 3 spin 0|no seccomp here");
}
#endif

}  // namespace
}  // namespace numa_moe
