// What the pool counts of its threads, by site.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "jobs.h"
#include "pool/affinity.h"
#include "pool/duration_histogram.h"
#include "pool/thread_pool.h"

namespace numa_moe {
namespace {

constexpr int64_t kMs = 1'000'000;

class SiteJob final : public Job {
 public:
  SiteJob(int site, std::vector<Phase> phases, std::function<void(const Task&)> function)
      : site_(site), phases_(std::move(phases)), function_(std::move(function)) {}
  const std::vector<Phase>& phases() const override { return phases_; }
  void run_task(const Task& task) override { function_(task); }
  int site() const override { return site_; }

 private:
  const int site_;
  const std::vector<Phase> phases_;
  const std::function<void(const Task&)> function_;
};

void run_nothing(ThreadPool& pool, int site) {
  const auto groups = static_cast<std::size_t>(pool.num_groups());
  SiteJob job(site, {{std::vector<int32_t>(groups, 1)}}, [](const Task&) {});
  pool.run(job);
}

SiteStatistics counted(const ThreadPool& pool, int thread, int site) {
  for (const SiteStatistics& statistics : pool.statistics()) {
    if (statistics.thread == thread && statistics.site == site) return statistics;
  }
  SiteStatistics none;
  none.durations.counts.resize(kDurationBuckets);
  return none;
}

uint64_t number_of(const Durations& durations) {
  uint64_t number = 0;
  for (const uint64_t count : durations.counts) number += count;
  return number;
}

void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

TEST(DurationBuckets, FollowEachOtherAndAreNarrow) {
  ASSERT_EQ(duration_bucket_begin(0), 0);
  for (int bucket = 1; bucket < kDurationBuckets; ++bucket) {
    const int64_t begin = duration_bucket_begin(bucket);
    const int64_t end = duration_bucket_begin(bucket + 1);
    EXPECT_EQ(duration_bucket(begin - 1), bucket - 1);
    EXPECT_EQ(duration_bucket(begin), bucket);
    EXPECT_EQ(duration_bucket(end - 1), bucket);
    EXPECT_LE(end - begin, begin / 8);
  }
}

TEST(DurationBuckets, TakeWhateverComes) {
  EXPECT_EQ(duration_bucket(-5), 0);
  EXPECT_EQ(duration_bucket(INT64_MAX), kDurationBuckets - 1);
}

TEST(DurationHistogram, CountsByBucketAndKeepsTheLongest) {
  DurationHistogram histogram;
  histogram.add(10);
  histogram.add(5000);
  histogram.add(5001);
  histogram.add(700);
  EXPECT_EQ(histogram.count(0), 1U);
  EXPECT_EQ(histogram.count(duration_bucket(5000)), 2U);
  EXPECT_EQ(histogram.count(duration_bucket(700)), 1U);
  EXPECT_EQ(histogram.max(), 5001);
}

// Seen to fail with: waits that aren't less the time of tasks; a wait of the job that is entered instead of
// the one before.
TEST(Statistics, AThreadWaitsForTheRestOfAJob) {
  ThreadPool pool(unpinned({1, 1}));
  // Group 0 works for 80 ms, group 1 for 20.
  SiteJob job(3, {{{1, 1}}}, [](const Task& task) { sleep_ms(task.group == 0 ? 80 : 20); });
  pool.run(job);
  run_nothing(pool, 4);

  const SiteStatistics slow = counted(pool, 0, 3);
  const SiteStatistics quick = counted(pool, 1, 3);
  const SiteStatistics whole = counted(pool, -1, 3);
  EXPECT_EQ(slow.tasks, 1U);
  EXPECT_EQ(quick.tasks, 1U);
  EXPECT_GE(slow.busy_ns, 80 * kMs);
  EXPECT_GE(quick.busy_ns, 20 * kMs);
  ASSERT_EQ(number_of(slow.durations), 1U);
  ASSERT_EQ(number_of(quick.durations), 1U);
  ASSERT_EQ(number_of(whole.durations), 1U);
  EXPECT_GE(whole.durations.max_ns, 80 * kMs);
  // However slow the machine is, what isn't work is a wait.
  EXPECT_EQ(quick.durations.max_ns, whole.durations.max_ns - static_cast<int64_t>(quick.busy_ns));
  EXPECT_LE(slow.durations.max_ns, whole.durations.max_ns - 80 * kMs);
}

// Seen to fail with: the time of tasks of an older job taken for that of the one before.
TEST(Statistics, AThreadWithoutTasksWaitsAllTheTime) {
  ThreadPool pool(unpinned({1, 1}));
  SiteJob both(1, {{{1, 1}}}, [](const Task&) { sleep_ms(30); });
  SiteJob first_only(2, {{{1, 0}}}, [](const Task&) { sleep_ms(40); });
  pool.run(both);
  pool.run(first_only);
  pool.run(both);

  const SiteStatistics idle = counted(pool, 1, 2);
  EXPECT_EQ(idle.tasks, 0U);
  EXPECT_EQ(idle.busy_ns, 0U);
  ASSERT_EQ(number_of(idle.durations), 1U);
  EXPECT_EQ(idle.durations.max_ns, counted(pool, -1, 2).durations.max_ns);
}

TEST(Statistics, SitesAndThreadsAreCountedApart) {
  const std::vector<Phase> phases = {{{5, 7}}, {{2, 3}}};
  ThreadPool pool(unpinned({2, 1}, /*caller_helps=*/true));
  for (int call = 0; call < 100; ++call) {
    SiteJob job(call % 4, phases, [](const Task&) {});
    pool.run(job);
  }
  for (int site = 0; site < 4; ++site) {
    // A thread counts when nobody waits for it any longer. The caller is the last, and of group 0.
    wait_for([&] {
      return counted(pool, 0, site).tasks + counted(pool, 1, site).tasks + counted(pool, 3, site).tasks ==
             25U * 7U;
    });
    wait_for([&] { return counted(pool, 2, site).tasks == 25U * 10U; });
    EXPECT_EQ(number_of(counted(pool, -1, site).durations), 25U);
  }
}

TEST(Statistics, SitesOutOfRangeAreTheNearestOnes) {
  ThreadPool pool(unpinned({1}));
  run_nothing(pool, -1);
  run_nothing(pool, kMostSites);
  run_nothing(pool, kMostSites + 1000);
  wait_for([&] { return counted(pool, 0, 0).tasks == 1 && counted(pool, 0, kMostSites - 1).tasks == 2; });
}

TEST(Statistics, NothingIsCountedUnlessAsked) {
  PoolOptions options = unpinned({1});
  options.collect_statistics = false;
  ThreadPool pool(options);
  run_nothing(pool, 0);
  run_nothing(pool, 1);
  EXPECT_TRUE(pool.statistics().empty());
}

// Seen to fail with: was_late() not called.
TEST(Statistics, ALateThreadIsNamed) {
  PoolOptions options;
  options.cpus_per_group = {{allowed_cpus(calling_thread_id()).front()}};
  options.caller_helps = true;
  options.late_after_us = 200;
  ThreadPool pool(options);
  ASSERT_TRUE(pool.workers_spin());

  struct Shared {
    std::atomic<int> arrived{0};
    std::atomic<bool> open{false};
    std::atomic<bool> held{false};
  };
  const auto shared = std::make_shared<Shared>();
  const auto hold_the_worker = [shared](const Task& task) {
    // Both threads have a task before the worker stops in its own.
    if (shared->arrived.fetch_add(1) < 2) wait_for([&] { return shared->arrived >= 2; });
    if (task.thread != 0 || shared->held.exchange(true)) return;
    wait_for([&] { return shared->open.load(); });
  };
  Phase phase{{4}};
  phase.repeatable = true;
  pool.run(std::make_shared<SiteJob>(9, std::vector<Phase>{phase}, hold_the_worker));
  shared->open = true;
  wait_for([&] { return counted(pool, 0, 9).late_tasks == 1; });
  EXPECT_EQ(counted(pool, 1, 9).late_tasks, 0U);
  // The caller ran all that were committed.
  wait_for([&] { return counted(pool, 1, 9).tasks == 4; });
  EXPECT_EQ(counted(pool, 0, 9).tasks, 0U);
}

// With ThreadSanitizer: reading is no data race.
TEST(Statistics, CanBeReadAtAnyTime) {
  ThreadPool pool(unpinned({1, 1}, /*caller_helps=*/true));
  std::atomic<bool> done{false};
  std::thread reader([&] {
    uint64_t last = 0;
    while (!done) {
      uint64_t tasks = 0;
      for (const SiteStatistics& statistics : pool.statistics()) tasks += statistics.tasks;
      EXPECT_GE(tasks, last);
      last = tasks;
    }
  });
  for (int call = 0; call < 3000; ++call) run_nothing(pool, call % 20);
  done = true;
  reader.join();
}

}  // namespace
}  // namespace numa_moe
