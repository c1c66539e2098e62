// Deterministic tests of the claim word's own rules.
#include "pool/claim_word.h"

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <thread>
#include <vector>

namespace numa_moe {
namespace {

TEST(ClaimWord, HasNothingToClaimAtFirst) {
  ClaimWord word;
  EXPECT_FALSE(word.has_tasks());
  EXPECT_EQ(word.claim(), 0);
}

TEST(ClaimWord, HandsOutEveryTaskOnce) {
  ClaimWord word;
  EXPECT_FALSE(word.open(3));
  EXPECT_TRUE(word.has_tasks());
  EXPECT_EQ(word.claim(), 3);
  EXPECT_EQ(word.claim(), 2);
  EXPECT_EQ(word.claim(), 1);
  EXPECT_EQ(word.claim(), 0);
  EXPECT_EQ(word.claim(), 0);
  EXPECT_FALSE(word.has_tasks());
}

// Seen to fail with: the number of tasks not set by open().
TEST(ClaimWord, OpeningSetsTheNumberOfTasks) {
  ClaimWord word;
  EXPECT_FALSE(word.open(1));
  EXPECT_EQ(word.claim(), 1);
  EXPECT_FALSE(word.open(2));
  EXPECT_EQ(word.claim(), 2);
  EXPECT_EQ(word.claim(), 1);
  EXPECT_EQ(word.claim(), 0);
}

TEST(ClaimWord, HoldsTheMostTasksThatAPhaseCanHave) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  ClaimWord word;
  EXPECT_FALSE(word.open(kMost));
  EXPECT_FALSE(ClaimWord::has_sleepers(word.read()));
  EXPECT_EQ(word.claim(), kMost);
  EXPECT_EQ(ClaimWord::unclaimed(word.read()), kMost - 1);
}

// Seen to fail with: the epoch not advanced by open().
TEST(ClaimWord, AStaleThreadCannotClaim) {
  ClaimWord word;
  EXPECT_FALSE(word.open(2));
  const ClaimWord::Value seen = word.read();
  EXPECT_EQ(word.claim(), 2);
  EXPECT_EQ(word.claim(), 1);
  EXPECT_FALSE(word.open(2));  // as many tasks as the stale thread has seen
  EXPECT_FALSE(word.claim_if_unchanged(seen));
  EXPECT_EQ(word.claim(), 2);
}

// Seen to fail with: the sleepers' bit ignored by open(); not set by announce_sleeper(); kept by open().
TEST(ClaimWord, OpeningReportsSleepersOnce) {
  ClaimWord word;
  EXPECT_TRUE(word.announce_sleeper(word.read()));
  EXPECT_TRUE(word.announce_sleeper(word.read()));  // a second one
  EXPECT_FALSE(word.has_tasks());
  EXPECT_TRUE(word.open(1));
  EXPECT_EQ(word.claim(), 1);
  EXPECT_FALSE(word.open(1));
}

// Seen to fail with: announce_sleeper() setting the bit whatever the word holds.
TEST(ClaimWord, AStaleThreadCannotAnnounceItsSleep) {
  ClaimWord word;
  const ClaimWord::Value seen = word.read();
  EXPECT_FALSE(word.open(0));
  EXPECT_FALSE(word.announce_sleeper(seen));
  EXPECT_FALSE(word.open(1));  // nobody asleep
  EXPECT_EQ(word.claim(), 1);
}

// Seen to hang with: sleep() on another value than the epoch that was seen; the epoch not advanced.
TEST(ClaimWord, AStaleThreadDoesNotSleep) {
  ClaimWord word;
  const ClaimWord::Value seen = word.read();
  EXPECT_TRUE(word.announce_sleeper(seen));
  EXPECT_TRUE(word.open(0));  // the wake comes before the sleep
  word.wake();
  word.sleep(seen);
}

// Seen to fail with: claims by load and store instead of compare-exchange.
TEST(ClaimWord, ThreadsNeverClaimTheSameTask) {
  constexpr int kThreads = 4;
  constexpr int32_t kTasks = 20000;
  ClaimWord word;
  std::vector<std::atomic<int>> claims(kTasks + 1);
  for (int round = 0; round < 5; ++round) {
    for (auto& count : claims) count = 0;
    EXPECT_FALSE(word.open(kTasks));
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&] {
        while (const int32_t unclaimed = word.claim()) claims[static_cast<std::size_t>(unclaimed)] += 1;
      });
    }
    for (auto& thread : threads) thread.join();
    for (int32_t task = 1; task <= kTasks; ++task) ASSERT_EQ(claims[static_cast<std::size_t>(task)], 1);
  }
}

}  // namespace
}  // namespace numa_moe
