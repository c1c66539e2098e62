// What the threads of one group share, in a page of its own.
#pragma once

#include <atomic>
#include <cstddef>
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
  // For statistics: the job's number and site, and what is known of the one before.
  std::atomic<uint32_t> job_number{0};
  std::atomic<int16_t> site{0};
  std::atomic<int16_t> finished_site{-1};
  std::atomic<int64_t> finished_ns{0};

  // Tasks of the open phase not yet reported as finished. Apart from the claims: a thread that reports
  // shouldn't take the line from those that still claim.
  alignas(kSharingDistance) std::atomic<int32_t> unfinished{0};
};
static_assert(offsetof(Group, finished_ns) + sizeof(Group::finished_ns) <= 64,
              "on the line of the claim word");

}  // namespace numa_moe
