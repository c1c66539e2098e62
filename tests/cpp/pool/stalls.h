// Makes threads of the pool stand still at chosen places (csrc/pool/stall_points.h).
#pragma once

#include <cstdint>

#include "pool/stall_points.h"

namespace numa_moe {

// While it lives: the first thread that comes to the point, and that `who` fits, stands still until
// release(). At most kMostHeld at a time.
class HeldThread {
 public:
  static constexpr int kMostHeld = 4;

  struct Anyone {};
  struct Only {
    int thread_id;
  };     // kernel thread ids
  struct AllBut {
    int thread_id;
  };

  HeldThread(StallPoint point, Anyone);
  HeldThread(StallPoint point, Only who);
  HeldThread(StallPoint point, AllBut who);
  ~HeldThread();
  HeldThread(const HeldThread&) = delete;
  HeldThread& operator=(const HeldThread&) = delete;

  bool holds() const;
  void release();

 private:
  const int slot_;
};

// While it lives: threads stand still at random, everywhere. One in `rarity` times; a few pauses, a yield,
// or a sleep of some microseconds.
class RandomStalls {
 public:
  RandomStalls(uint64_t seed, uint32_t rarity);
  ~RandomStalls();
  RandomStalls(const RandomStalls&) = delete;
  RandomStalls& operator=(const RandomStalls&) = delete;
};

}  // namespace numa_moe
