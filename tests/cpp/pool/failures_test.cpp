// Tasks that throw.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "jobs.h"
#include "pool/thread_pool.h"

namespace numa_moe {
namespace {

void expect_runs_well(ThreadPool& pool) {
  const std::vector<Phase> phases(
      2, Phase{std::vector<int32_t>(static_cast<std::size_t>(pool.num_groups()), 3), Barrier::kPool});
  TaskCounts counts(phases);
  FunctionJob job(phases, [&](const Task& task) { counts.add(task); });
  pool.run(job);
  EXPECT_EQ(counts.tasks_run(1), total_tasks(phases));
}

class Failures : public testing::TestWithParam<std::tuple<std::vector<int>, bool>> {};

// Seen to fail with: the exception not kept for run(); the flag not reset (the job after is skipped).
TEST_P(Failures, AnExceptionReachesTheCallerAndThePoolGoesOn) {
  const auto& [layout, caller_helps] = GetParam();
  ThreadPool pool(unpinned(layout, caller_helps));
  const std::vector<Phase> phases(3, Phase{std::vector<int32_t>(layout.size(), 8), Barrier::kPool});
  for (int repeat = 0; repeat < 30; ++repeat) {
    const int failing_phase = repeat % 3;
    const int failing_group = repeat % static_cast<int>(layout.size());
    TaskCounts counts(phases);
    FunctionJob job(phases, [&](const Task& task) {
      counts.add(task);
      if (task.phase == failing_phase && task.group == failing_group && task.index == 5) {
        throw std::runtime_error("task " + std::to_string(repeat));
      }
    });
    try {
      pool.run(job);
      ADD_FAILURE() << "no exception";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "task " + std::to_string(repeat));
    }
    // Later phases are skipped, and nothing ran twice.
    const int64_t tasks_per_phase = 8 * static_cast<int64_t>(layout.size());
    EXPECT_GE(counts.tasks_run(0), (2 - failing_phase) * tasks_per_phase);
    EXPECT_EQ(counts.tasks_run(0) + counts.tasks_run(1), total_tasks(phases));
    expect_runs_well(pool);
  }
}

// Every task throws: one of them reaches the caller, whole (AddressSanitizer and ThreadSanitizer watch the
// others go). Seen to fail with: every exception kept, not the first (ThreadSanitizer).
TEST_P(Failures, OneOfManyExceptionsReachesTheCaller) {
  const auto& [layout, caller_helps] = GetParam();
  ThreadPool pool(unpinned(layout, caller_helps));
  for (int repeat = 0; repeat < 50; ++repeat) {
    FunctionJob job(
        {{std::vector<int32_t>(layout.size(), 16), Barrier::kPool}},
        [&](const Task& task) -> void { throw std::runtime_error("group " + std::to_string(task.group)); });
    try {
      pool.run(job);
      ADD_FAILURE() << "no exception";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()).substr(0, 6), "group ");
    }
  }
  expect_runs_well(pool);
}

INSTANTIATE_TEST_SUITE_P(Pool, Failures,
                         testing::Combine(testing::Values(std::vector<int>{1}, std::vector<int>{3},
                                                          std::vector<int>{2, 1, 1}),
                                          testing::Bool()));

// With one thread the order is known. Seen to fail with: tasks not skipped after a failure.
TEST(Failures, TheRestOfTheJobIsSkipped) {
  for (const PoolOptions& options : {unpinned({1}), unpinned({0}, true)}) {
    ThreadPool pool(options);
    int tasks = 0;
    FunctionJob job({{{10}, Barrier::kPool}, {{10}, Barrier::kPool}}, [&](const Task& task) {
      ++tasks;
      if (task.index == 3) throw std::runtime_error("stop");
    });
    EXPECT_THROW(pool.run(job), std::runtime_error);
    EXPECT_EQ(tasks, 4);
  }
}

TEST(Failures, ExceptionsOfAnyTypeReachTheCaller) {
  ThreadPool pool(unpinned({1}));
  FunctionJob job({{{1}, Barrier::kPool}}, [](const Task&) { throw 42; });
  EXPECT_THROW(pool.run(job), int);
  expect_runs_well(pool);
}

}  // namespace
}  // namespace numa_moe
