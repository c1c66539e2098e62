#include "arm.h"

#ifdef NUMA_MOE_BENCHMARK_HIGHWAY

#include <hwy/contrib/thread_pool/thread_pool.h>

namespace {

class HighwayArm final : public Arm {
 public:
  // Its constructor takes the number of threads besides the caller's (releases from 1.1 on).
  HighwayArm(int num_threads, bool spins) : pool_(static_cast<size_t>(num_threads - 1)), spins_(spins) {}

  void run(int64_t num_shards, const Work& work) override {
    pool_.Run(0, static_cast<uint64_t>(num_shards),
              [&](uint64_t shard, size_t /*thread*/) { work(static_cast<int64_t>(shard)); });
  }

  void begin_visit() override {
    if (spins_) pool_.SetWaitMode(hwy::PoolWaitMode::kSpin);
  }
  void end_visit() override {
    if (spins_) pool_.SetWaitMode(hwy::PoolWaitMode::kBlock);
  }

 private:
  hwy::ThreadPool pool_;
  const bool spins_;
};

}  // namespace

std::unique_ptr<Arm> make_highway_arm(int num_threads, bool spins) {
  return std::make_unique<HighwayArm>(num_threads, spins);
}

#else
std::unique_ptr<Arm> make_highway_arm(int /*num_threads*/, bool /*spins*/) { return nullptr; }
#endif
