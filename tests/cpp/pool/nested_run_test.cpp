// run() called from inside a task.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "jobs.h"
#include "pool/thread_pool.h"

namespace numa_moe {
namespace {

// Seen to hang with: the test for membership deleted (the inner call waits for the mutex that the outer
// one holds), for workers or for a caller that helps.
TEST(NestedRun, RunsWholeOnTheCallingThread) {
  for (const auto& layout : {std::vector<int>{2}, std::vector<int>{1, 1}, std::vector<int>{0}}) {
    const bool caller_helps = layout[0] == 0 || layout.size() == 1;
    ThreadPool pool(unpinned(layout, caller_helps));
    const std::vector<int32_t> three_each(layout.size(), 3);
    const std::vector<Phase> inner_phases = {{three_each, Barrier::kPool}, {three_each, Barrier::kGroup}};
    std::atomic<int> wrong{0};
    std::atomic<int> inner_tasks{0};
    FunctionJob outer({{std::vector<int32_t>(layout.size(), 4), Barrier::kPool}}, [&](const Task& task) {
      const auto thread = std::this_thread::get_id();
      int last_phase = 0;
      TaskCounts counts(inner_phases);
      FunctionJob inner(inner_phases, [&](const Task& inner_task) {
        wrong += std::this_thread::get_id() != thread;
        wrong += inner_task.thread != task.thread;
        wrong += inner_task.phase < last_phase;
        last_phase = inner_task.phase;
        counts.add(inner_task);
        inner_tasks += 1;
      });
      pool.run(inner);
      wrong += counts.tasks_run(1) != total_tasks(inner_phases);
    });
    pool.run(outer);
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(inner_tasks, static_cast<int>(layout.size()) * 4 * static_cast<int>(total_tasks(inner_phases)));
    EXPECT_EQ(pool.counters().dispatches, 1u);
  }
}

TEST(NestedRun, ChecksItsPhasesToo) {
  ThreadPool pool(unpinned({1, 1}));
  FunctionJob inner({{{1}, Barrier::kPool}}, [](const Task&) {});
  FunctionJob outer({{{1, 1}, Barrier::kPool}}, [&](const Task&) { pool.run(inner); });
  EXPECT_THROW(pool.run(outer), std::invalid_argument);
}

TEST(NestedRun, ExceptionsPassThrough) {
  ThreadPool pool(unpinned({1}));
  FunctionJob inner({{{1}, Barrier::kPool}}, [](const Task&) { throw std::runtime_error("inner"); });
  std::atomic<int> caught{0};
  FunctionJob outer({{{1}, Barrier::kPool}}, [&](const Task&) {
    try {
      pool.run(inner);
    } catch (const std::runtime_error&) {
      caught += 1;
    }
  });
  pool.run(outer);
  EXPECT_EQ(caught, 1);
}

// A task of one pool uses another, whose task calls back into the first: on the same thread, so inline.
// Seen to hang with: only the innermost membership looked at.
TEST(NestedRun, AcrossTwoPoolsAndBack) {
  ThreadPool first(unpinned({1}));
  ThreadPool second(unpinned({0}, true));  // its caller runs everything
  std::atomic<int> tasks{0};
  FunctionJob innermost({{{2}, Barrier::kPool}}, [&](const Task& task) {
    EXPECT_EQ(task.thread, 0);
    tasks += 1;
  });
  FunctionJob middle({{{2}, Barrier::kPool}}, [&](const Task&) { first.run(innermost); });
  FunctionJob outer({{{2}, Barrier::kPool}}, [&](const Task&) { second.run(middle); });
  first.run(outer);
  EXPECT_EQ(tasks, 8);
  EXPECT_EQ(first.counters().dispatches, 1u);
  EXPECT_EQ(second.counters().dispatches, 2u);
}

// A caller that helped is no member any more once run() has returned. Seen to fail with: the membership
// not ended.
TEST(NestedRun, MembershipEndsWithRun) {
  ThreadPool pool(unpinned({1}, true));
  FunctionJob job({{{4}, Barrier::kPool}}, [](const Task&) {});
  pool.run(job);
  pool.run(job);
  EXPECT_EQ(pool.counters().dispatches, 2u);
}

}  // namespace
}  // namespace numa_moe
