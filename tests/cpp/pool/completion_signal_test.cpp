// Deterministic tests of the completion signal's own rules.
#include "pool/completion_signal.h"

#include <gtest/gtest.h>

namespace numa_moe {
namespace {

TEST(CompletionSignal, SaysWhenTheJobIsComplete) {
  CompletionSignal signal;
  signal.arm();
  EXPECT_FALSE(signal.complete());
  EXPECT_FALSE(signal.set_complete());  // nobody asleep
  EXPECT_TRUE(signal.complete());
}

// Seen to fail with: arm() deleted.
TEST(CompletionSignal, IsArmedAgainForTheNextJob) {
  CompletionSignal signal;
  signal.arm();
  EXPECT_FALSE(signal.set_complete());
  signal.arm();
  EXPECT_FALSE(signal.complete());
}

// Seen to fail with: set_complete() never, or always, reporting a sleeper.
TEST(CompletionSignal, WakesASleeperOncePerJob) {
  CompletionSignal signal;
  signal.arm();
  EXPECT_TRUE(signal.announce_sleep());
  EXPECT_TRUE(signal.set_complete());
  signal.arm();
  EXPECT_FALSE(signal.set_complete());
}

// Seen to hang with: announce_sleep() overwriting a completion.
TEST(CompletionSignal, RefusesSleepAfterCompletion) {
  CompletionSignal signal;
  signal.arm();
  EXPECT_FALSE(signal.set_complete());
  EXPECT_FALSE(signal.announce_sleep());
  EXPECT_TRUE(signal.complete());
}

// The completion comes between the announcement and the sleep. Seen to hang with: sleep() on another value.
TEST(CompletionSignal, DoesNotSleepAfterCompletion) {
  CompletionSignal signal;
  signal.arm();
  EXPECT_TRUE(signal.announce_sleep());
  EXPECT_TRUE(signal.set_complete());
  signal.sleep();
  signal.retract_sleep();
  EXPECT_TRUE(signal.complete());  // seen to fail with: retract_sleep() storing whatever the state
}

// Seen to fail with: retract_sleep() deleted (the flag that says "asleep" not reset).
TEST(CompletionSignal, AThreadThatIsAwakeAgainIsNotWoken) {
  CompletionSignal signal;
  signal.arm();
  EXPECT_TRUE(signal.announce_sleep());
  signal.retract_sleep();
  EXPECT_FALSE(signal.recall());
  EXPECT_FALSE(signal.set_complete());
}

// Seen to fail with: recall() leaving the state as it is; seen to hang with: sleep() on another value.
TEST(CompletionSignal, ASleeperIsRecalledOnce) {
  CompletionSignal signal;
  signal.arm();
  EXPECT_FALSE(signal.recall());
  EXPECT_TRUE(signal.announce_sleep());
  EXPECT_TRUE(signal.recall());
  EXPECT_FALSE(signal.recall());
  signal.sleep();
  EXPECT_FALSE(signal.complete());
  EXPECT_TRUE(signal.announce_sleep());  // and may sleep again
  EXPECT_TRUE(signal.announce_sleep());  // after a wake for no reason
  EXPECT_TRUE(signal.set_complete());
}

}  // namespace
}  // namespace numa_moe
