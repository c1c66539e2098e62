// Shards that take a known time on a core of one's own, and always the same number of instructions.
#pragma once

#include <cstdint>

#include "arm.h"

// Steps of a computation in which each waits for the one before, so that nothing of it depends on memory.
void compute(int64_t steps);

// How many steps take a microsecond on the calling thread's CPU now.
double steps_per_microsecond();

// A shard of so many steps. The object must outlive the work.
struct BusyWork {
  int64_t steps;

  Work work() {
    return {[](void* self, int64_t) { compute(static_cast<BusyWork*>(self)->steps); }, this};
  }
};
