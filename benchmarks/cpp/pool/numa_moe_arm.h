// The project's own pool as an arm.
#pragma once

#include <memory>

#include "arm.h"
#include "pool/thread_pool.h"

// Each dispatch is a job of one phase; shards are dealt to the groups in turns. repeatable: a late shard is
// run again, see Phase.
std::unique_ptr<Arm> make_numa_moe_arm(const numa_moe::PoolOptions& options, bool repeatable);
