#include "arm.h"

#ifdef NUMA_MOE_BENCHMARK_TORCH

#include <ATen/Parallel.h>

namespace {

class ParallelForArm final : public Arm {
 public:
  explicit ParallelForArm(int num_threads) { at::set_num_threads(num_threads); }

  void run(int64_t num_shards, const Work& work) override {
    at::parallel_for(0, num_shards, 1, [&](int64_t begin, int64_t end) {
      for (int64_t shard = begin; shard < end; ++shard) work(shard);
    });
  }
};

}  // namespace

std::unique_ptr<Arm> make_parallel_for_arm(int num_threads) {
  return std::make_unique<ParallelForArm>(num_threads);
}

#else
std::unique_ptr<Arm> make_parallel_for_arm(int /*num_threads*/) { return nullptr; }
#endif
