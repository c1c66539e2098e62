// Deterministic tests of the claim word's own rules.
#include "pool/claim_word.h"

#include <gtest/gtest.h>

#include <limits>

namespace numa_moe {
namespace {

TEST(ClaimWord, HasNothingToClaimAtFirst) {
  ClaimWord word;
  EXPECT_FALSE(word.has_tasks());
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 0);
}

TEST(ClaimWord, HandsOutEveryTaskOnce) {
  ClaimWord word;
  EXPECT_FALSE(word.open(3));
  EXPECT_TRUE(word.has_tasks());
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 3);
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 2);
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 1);
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 0);
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 0);
  EXPECT_FALSE(word.has_tasks());
}

// Seen to fail with: the number of tasks not set by open().
TEST(ClaimWord, OpeningSetsTheNumberOfTasks) {
  ClaimWord word;
  EXPECT_FALSE(word.open(1));
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 1);
  EXPECT_FALSE(word.open(2));
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 2);
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 1);
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 0);
}

TEST(ClaimWord, HoldsTheMostTasksThatAPhaseCanHave) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  ClaimWord word;
  EXPECT_FALSE(word.open(kMost));
  EXPECT_FALSE(ClaimWord::has_sleepers(word.read()));
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), kMost);
  EXPECT_EQ(ClaimWord::unclaimed(word.read()), kMost - 1);
}

// Seen to fail with: the epoch not advanced by open().
TEST(ClaimWord, AStaleThreadCannotClaim) {
  ClaimWord word;
  EXPECT_FALSE(word.open(2));
  const ClaimWord::Value seen = word.read();
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 2);
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 1);
  EXPECT_FALSE(word.open(2));  // as many tasks as the stale thread has seen
  EXPECT_FALSE(word.claim_if_unchanged(seen));
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 2);
}

// Seen to fail with: the sleepers' bit ignored by open(); not set by announce_sleeper(); kept by open().
TEST(ClaimWord, OpeningReportsSleepersOnce) {
  ClaimWord word;
  EXPECT_TRUE(word.announce_sleeper(word.read()));
  EXPECT_TRUE(word.announce_sleeper(word.read()));  // a second one
  EXPECT_FALSE(word.has_tasks());
  EXPECT_TRUE(word.open(1));
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 1);
  EXPECT_FALSE(word.open(1));
}

// Seen to fail with: announce_sleeper() setting the bit whatever the word holds.
TEST(ClaimWord, AStaleThreadCannotAnnounceItsSleep) {
  ClaimWord word;
  const ClaimWord::Value seen = word.read();
  EXPECT_FALSE(word.open(0));
  EXPECT_FALSE(word.announce_sleeper(seen));
  EXPECT_FALSE(word.open(1));  // nobody asleep
  EXPECT_EQ(ClaimWord::unclaimed(word.claim()), 1);
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

}  // namespace
}  // namespace numa_moe
