// Random jobs on random pools whose threads stand still at random places. Every task checks by plain reads
// that what it may rely on is there. NUMA_MOE_STRESS_SECONDS says how long each test goes on, or
// NUMA_MOE_STRESS_JOBS for how many jobs (with at least one pool), NUMA_MOE_STRESS_SEED where the random
// sequence starts.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "jobs.h"
#include "pool/thread_pool.h"
#include "stalls.h"

namespace numa_moe {
namespace {

constexpr std::size_t kMostPhases = 5;
constexpr std::size_t kMostGroups = 4;
constexpr std::size_t kMostTasks = 6;
constexpr int64_t kJobsPerPool = 200;

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::atoll(value) : otherwise;
}

// Each task leaves the job's number in a cell of its own. Cells are plain, never cleared, and shared by all
// jobs, so a task that runs twice, too early, or in a job that is over, is seen, or is a data race.
class CheckedJob final : public Job {
 public:
  void prepare(int64_t number, std::vector<Phase> phases) {
    number_ = number;
    phases_ = std::move(phases);
  }
  const std::vector<Phase>& phases() const override { return phases_; }

  void run_task(const Task& task) override {
    const auto phase = static_cast<std::size_t>(task.phase);
    const auto group = static_cast<std::size_t>(task.group);
    int64_t& mine = cells_[phase][group].at(static_cast<std::size_t>(task.index));
    if (mine == number_) faults_ += 1;
    for (std::size_t before = 0; before < phase; ++before) {
      // Own phases before are over; those of other groups up to the last pool barrier.
      for (std::size_t other = 0; other < phases_[before].tasks_per_group.size(); ++other) {
        if (other == group || pool_barrier_between(before, phase)) check_finished(before, other);
      }
    }
    switch ((number_ * 31 + task.phase * 7 + task.group * 3 + task.index) % 64) {
      case 0: std::this_thread::sleep_for(std::chrono::microseconds(20)); break;
      case 1: std::this_thread::yield(); break;
      default: break;
    }
    mine = number_;
  }

  void check_all_finished() {
    for (std::size_t phase = 0; phase < phases_.size(); ++phase) {
      for (std::size_t group = 0; group < phases_[phase].tasks_per_group.size(); ++group)
        check_finished(phase, group);
    }
  }
  int faults() const { return faults_; }

 private:
  bool pool_barrier_between(std::size_t before, std::size_t phase) const {
    return std::any_of(phases_.begin() + static_cast<std::ptrdiff_t>(before),
                       phases_.begin() + static_cast<std::ptrdiff_t>(phase),
                       [](const Phase& passed) { return passed.barrier == Barrier::kPool; });
  }
  void check_finished(std::size_t phase, std::size_t group) {
    const auto tasks = static_cast<std::size_t>(phases_[phase].tasks_per_group[group]);
    for (std::size_t task = 0; task < tasks; ++task) {
      if (cells_[phase][group][task] != number_) faults_ += 1;
    }
  }

  int64_t number_ = 0;
  std::vector<Phase> phases_;
  std::array<std::array<std::array<int64_t, kMostTasks>, kMostGroups>, kMostPhases> cells_{};
  std::atomic<int> faults_{0};
};

class RandomPool {
 public:
  explicit RandomPool(uint64_t seed) : random_(seed) {}

  int below(int limit) { return static_cast<int>(random_() % static_cast<uint64_t>(limit)); }
  int one_of(std::initializer_list<int> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }

  PoolOptions options() {
    const bool caller_helps = below(2) == 0;
    std::vector<int> layout;
    const int groups = 1 + below(static_cast<int>(kMostGroups));
    for (int group = 0; group < groups; ++group) {
      layout.push_back(group == 0 && caller_helps ? below(3) : 1 + below(2));
    }
    PoolOptions options = unpinned(layout, caller_helps);
    options.worker_spin_us = one_of({0, 0, 5});
    options.dispatcher_spin_us = one_of({0, 0, 5});
    options.dispatcher_yields = one_of({0, 0, 3, 128});
    return options;
  }

  std::vector<Phase> phases(int groups) {
    std::vector<Phase> phases(static_cast<std::size_t>(below(static_cast<int>(kMostPhases) + 1)));
    for (Phase& phase : phases) {
      phase.barrier = below(2) == 0 ? Barrier::kPool : Barrier::kGroup;
      const bool empty = below(6) == 0;
      for (int group = 0; group < groups; ++group) {
        phase.tasks_per_group.push_back(empty ? 0 : below(static_cast<int>(kMostTasks) + 1));
      }
    }
    return phases;
  }

 private:
  std::mt19937_64 random_;
};

// stall_rarity 0: no stalls.
void stress(uint32_t stall_rarity) {
  const auto seconds = std::chrono::seconds(from_environment("NUMA_MOE_STRESS_SECONDS", 5));
  const auto first_seed = static_cast<uint64_t>(from_environment("NUMA_MOE_STRESS_SEED", 1));
  const int64_t jobs = from_environment("NUMA_MOE_STRESS_JOBS", 0);
  const auto end = std::chrono::steady_clock::now() + seconds;
  CheckedJob job;
  int64_t number = 0;
  uint64_t seed = first_seed;
  do {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomPool random(seed);
    const RandomStalls stalls(seed++, stall_rarity);
    ThreadPool pool(random.options());
    for (int64_t repeat = 0; repeat < kJobsPerPool; ++repeat) {
      job.prepare(++number, random.phases(pool.num_groups()));
      pool.run(job);
      job.check_all_finished();
      ASSERT_EQ(job.faults(), 0) << "job " << number;
    }
    EXPECT_EQ(pool.counters().dispatches, static_cast<uint64_t>(kJobsPerPool));
  } while (jobs > 0 ? number < jobs : std::chrono::steady_clock::now() < end);
  std::cout << number << " jobs on " << number / kJobsPerPool << " pools\n";
}

// Seen to fail or hang with the mutations that MUTATIONS.md lists for them.
TEST(Stress, RandomJobsWithFrequentStalls) { stress(8); }
TEST(Stress, RandomJobsWithRareStalls) { stress(200); }
TEST(Stress, RandomJobsWithoutStalls) { stress(0); }

}  // namespace
}  // namespace numa_moe
