// Every task runs once, on a thread of its group; callers, layouts, arguments.
#include "pool/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "jobs.h"

namespace numa_moe {
namespace {

using Layout = std::vector<int>;  // workers per group

// The group that a thread belongs to, worked out from the documented numbering.
int group_of_thread(const Layout& layout, int thread) {
  int first = 0;
  for (std::size_t group = 0; group < layout.size(); ++group) {
    first += layout[group];
    if (thread < first) return static_cast<int>(group);
  }
  return 0;  // the caller
}

std::vector<Phase> phases_of(const std::vector<std::vector<int32_t>>& counts, Barrier barrier) {
  std::vector<Phase> phases;
  for (const auto& tasks_per_group : counts) phases.push_back({tasks_per_group, barrier});
  return phases;
}

// Shapes for any number of groups: even, uneven, with empty groups, empty phases, no phases, many tasks.
std::vector<std::vector<Phase>> shapes(std::size_t groups) {
  const std::vector<int32_t> none(groups, 0);
  const std::vector<int32_t> one(groups, 1);
  const std::vector<int32_t> many(groups, 257);
  std::vector<int32_t> rising;
  std::vector<int32_t> first_only(groups, 0);
  std::vector<int32_t> last_only(groups, 0);
  for (std::size_t group = 0; group < groups; ++group) rising.push_back(static_cast<int32_t>(3 * group));
  first_only.front() = 5;
  last_only.back() = 7;
  std::vector<std::vector<Phase>> all;
  for (const Barrier barrier : {Barrier::kPool, Barrier::kGroup}) {
    for (const auto& counts : std::vector<std::vector<std::vector<int32_t>>>{
             {},
             {none},
             {none, none, none},
             {one},
             {many},
             {rising},
             {first_only},
             {last_only},
             {one, one},
             {many, rising, many},
             {none, one},
             {one, none},
             {none, none, many, none, none},
             {first_only, last_only, first_only},
             {last_only, first_only},
             {first_only, none, last_only},
             {rising, none, rising, first_only, one, last_only, many}}) {
      all.push_back(phases_of(counts, barrier));
    }
  }
  return all;
}

class EveryLayout : public testing::TestWithParam<std::tuple<Layout, bool, bool>> {};

// Seen to fail (or hang) with: claims not reset by an opening; a task reported twice; groups without tasks
// not counted as finished; the countdown of groups not reset; group indices mixed up.
TEST_P(EveryLayout, RunsEveryTaskOnceOnItsGroupsThreads) {
  // Not a structured binding: clang 14 doesn't let a lambda capture one.
  const Layout& layout = std::get<0>(GetParam());
  const bool caller_helps = std::get<1>(GetParam());
  const bool park = std::get<2>(GetParam());
  const PoolOptions options = unpinned(layout, caller_helps);
  ThreadPool pool(park ? parking(options) : options);
  for (int repeat = 0; repeat < 3; ++repeat) {
    for (const auto& phases : shapes(layout.size())) {
      TaskCounts counts(phases);
      std::vector<std::atomic<bool>> busy(static_cast<std::size_t>(pool.num_threads()));
      std::atomic<int> wrong_group{0};
      std::atomic<int> overlapping{0};
      std::atomic<int> on_caller{0};
      const auto caller = std::this_thread::get_id();
      FunctionJob job(phases, [&](const Task& task) {
        std::atomic<bool>& mine = busy.at(static_cast<std::size_t>(task.thread));
        overlapping += mine.exchange(true);
        counts.add(task);
        wrong_group += group_of_thread(layout, task.thread) != task.group;
        const bool is_caller = std::this_thread::get_id() == caller;
        on_caller += is_caller;
        wrong_group += is_caller != (task.thread == pool.num_workers());
        mine = false;
      });
      pool.run(job);
      ASSERT_EQ(counts.tasks_run(1), total_tasks(phases));
      ASSERT_EQ(wrong_group, 0);
      ASSERT_EQ(overlapping, 0);
      ASSERT_TRUE(caller_helps || on_caller == 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Pool, EveryLayout,
                         testing::Combine(testing::Values(Layout{1}, Layout{3}, Layout{1, 1}, Layout{3, 1},
                                                          Layout{1, 2, 1}, Layout{2, 1, 1, 2}),
                                          testing::Bool(), testing::Bool()));

// The only thread is the caller. Seen to hang with: the caller not claiming.
TEST(ThreadPool, TheCallerAloneCanServeThePool) {
  ThreadPool pool(unpinned({0}, true));
  EXPECT_EQ(pool.num_workers(), 0);
  EXPECT_EQ(pool.num_threads(), 1);
  const std::vector<Phase> phases = {{{4}, Barrier::kPool}, {{0}, Barrier::kPool}, {{9}, Barrier::kGroup}};
  TaskCounts counts(phases);
  FunctionJob job(phases, [&](const Task& task) { counts.add(task); });
  pool.run(job);
  EXPECT_EQ(counts.tasks_run(1), 13);
}

TEST(ThreadPool, TheCallerHelpsWhenItsGroupIsBusy) {
  ThreadPool pool(unpinned({1}, true));
  std::atomic<int> running{0};
  std::atomic<int> threads_seen{0};
  // Each of the two tasks waits for the other: it takes both threads.
  FunctionJob job({{{2}, Barrier::kPool}}, [&](const Task& task) {
    running += 1;
    wait_for([&] { return running == 2; });
    threads_seen += 1 << task.thread;
  });
  pool.run(job);
  EXPECT_EQ(threads_seen, 0b11);
}

TEST(ThreadPool, DescribesItself) {
  ThreadPool pool(unpinned({2, 1}, true));
  EXPECT_EQ(pool.num_groups(), 2);
  EXPECT_EQ(pool.num_workers(), 3);
  EXPECT_EQ(pool.num_threads(), 4);
  EXPECT_EQ(pool.threads_in_group(0), 3);
  EXPECT_EQ(pool.threads_in_group(1), 1);
  EXPECT_THROW(pool.threads_in_group(2), std::invalid_argument);
  EXPECT_THROW(pool.threads_in_group(-1), std::invalid_argument);
  EXPECT_TRUE(pool.options().caller_helps);
}

// Seen to fail with: the mutex around a dispatch deleted.
TEST(ThreadPool, CallersTakeTurns) {
  constexpr int kCallers = 4;
  constexpr int kJobs = 200;
  ThreadPool pool(unpinned({1, 1}));
  std::atomic<int> jobs_running{0};
  std::atomic<int> overlaps{0};
  std::atomic<int64_t> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int job_number = 0; job_number < kJobs; ++job_number) {
        const std::vector<Phase> phases = {{{1 + caller, 2}, Barrier::kPool},
                                           {{0, 1 + caller}, Barrier::kPool}};
        TaskCounts counts(phases);
        std::atomic<bool> started{false};
        std::atomic<int> left{static_cast<int>(total_tasks(phases))};
        FunctionJob job(phases, [&](const Task& task) {
          if (!started.exchange(true)) overlaps += jobs_running.fetch_add(1) != 0;
          counts.add(task);
          if (left.fetch_sub(1) == 1) jobs_running -= 1;
        });
        pool.run(job);
        wrong += counts.tasks_run(1) != total_tasks(phases);
      }
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(overlaps, 0);
  EXPECT_EQ(pool.counters().dispatches, static_cast<uint64_t>(kCallers * kJobs));
}

void expect_refused(const std::string& message, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "accepted; expected: " << message;
  } catch (const std::invalid_argument& error) {
    EXPECT_EQ(error.what(), message);
  }
}

TEST(ThreadPool, RefusesBadOptions) {
  const auto start = [](const PoolOptions& options) { return [options] { ThreadPool pool(options); }; };
  PoolOptions options;
  expect_refused("cpus_per_group must have at least one group, got none", start(options));
  expect_refused(
      "cpus_per_group[0] must have at least one worker, got none (only group 0 may be empty, if "
      "the caller helps)",
      start(unpinned({0})));
  expect_refused(
      "cpus_per_group[1] must have at least one worker, got none (only group 0 may be empty, if "
      "the caller helps)",
      start(unpinned({0, 0}, true)));
  options = unpinned({1});
  options.cpus_per_group[0][0] = -2;
  expect_refused("cpus_per_group[0] must hold CPU numbers, or -1 for a worker that isn't pinned, got -2",
                 start(options));
  options = unpinned({1});
  options.worker_spin_us = -1;
  expect_refused("worker_spin_us must be 0 or more, got -1", start(options));
  options = unpinned({1});
  options.dispatcher_spin_us = -5;
  expect_refused("dispatcher_spin_us must be 0 or more, got -5", start(options));
  options = unpinned({1});
  options.dispatcher_yields = -7;
  expect_refused("dispatcher_yields must be 0 or more, got -7", start(options));
}

TEST(ThreadPool, RefusesPhasesThatDoNotFitBeforeAnyTaskRuns) {
  ThreadPool pool(unpinned({1, 1}));
  std::atomic<int> tasks{0};
  const auto run = [&](const std::vector<Phase>& phases) {
    return [&pool, &tasks, phases] {
      FunctionJob job(phases, [&](const Task&) { tasks += 1; });
      pool.run(job);
    };
  };
  expect_refused("phases[1].tasks_per_group must have one count per group (2), got 1",
                 run({{{1, 1}, Barrier::kPool}, {{1}, Barrier::kPool}}));
  expect_refused("phases[0].tasks_per_group must have one count per group (2), got 3",
                 run({{{1, 1, 1}, Barrier::kPool}}));
  expect_refused("phases[0].tasks_per_group[1] must be 0 or more, got -1", run({{{1, -1}, Barrier::kPool}}));
  EXPECT_EQ(tasks, 0);
  run({{{1, 1}, Barrier::kPool}})();
  EXPECT_EQ(tasks, 2);
}

// The largest spins and yields don't overflow a deadline (undefined behaviour, or no spin at all).
TEST(ThreadPool, TakesTheLargestOptions) {
  PoolOptions options = unpinned({1});
  options.worker_spin_us = std::numeric_limits<int64_t>::max();
  options.dispatcher_spin_us = std::numeric_limits<int64_t>::max();
  options.dispatcher_yields = std::numeric_limits<int64_t>::max();
  ThreadPool pool(options);
  std::atomic<int> tasks{0};
  FunctionJob job({{{3}, Barrier::kPool}}, [&](const Task&) {
    leave_time_to_go_wrong();
    tasks += 1;
  });
  pool.run(job);
  EXPECT_EQ(tasks, 3);
  EXPECT_EQ(pool.counters().dispatcher_spins, 1u);  // ended while spinning, not by a deadline in the past
}

}  // namespace
}  // namespace numa_moe
