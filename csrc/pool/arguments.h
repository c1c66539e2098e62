// Refuses what the pool can't run, before anything starts.
#pragma once

#include <vector>

#include "pool/thread_pool.h"

namespace numa_moe {

// Throw std::invalid_argument, which names the argument, what it was and what is accepted.
void check_options(const PoolOptions& options);
// may_repeat: whether the job may have repeatable phases.
void check_phases(const std::vector<Phase>& phases, int num_groups, bool may_repeat);

}  // namespace numa_moe
