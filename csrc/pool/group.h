// What the threads of one group share, in a page of its own.
#pragma once

#include <atomic>
#include <cstdint>

#include "pool/claim_word.h"
#include "pool/padded.h"

namespace numa_moe {

class Job;

struct Group {
  // Claimed from by all threads of the group. The rest of its line describes the open phase: written by
  // the opener before claim.open(), read after a claim and until that task is reported, during which the
  // phase can't end. Whoever claims has the line already. Atomic for those who visit another thread's task:
  // they may read while the next phase is written, and find out afterwards.
  alignas(kSharingDistance) ClaimWord claim;
  std::atomic<Job*> job{nullptr};
  std::atomic<int> phase{0};
  std::atomic<int32_t> num_tasks{0};
  std::atomic<bool> repeatable{false};

  // Tasks of the open phase not yet reported as finished. Apart from the claims: a thread that reports
  // shouldn't take the line from those that still claim.
  alignas(kSharingDistance) std::atomic<int32_t> unfinished{0};
};

}  // namespace numa_moe
