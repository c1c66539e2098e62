#include "arm.h"

#ifdef NUMA_MOE_BENCHMARK_PTHREADPOOL

#include <pthreadpool.h>

namespace {

class PthreadpoolArm final : public Arm {
 public:
  explicit PthreadpoolArm(int num_threads) : pool_(pthreadpool_create(static_cast<size_t>(num_threads))) {}
  ~PthreadpoolArm() override { pthreadpool_destroy(pool_); }

  void run(int64_t num_shards, const Work& work) override {
    const auto run_shard = [](void* context, size_t shard) {
      (*static_cast<const Work*>(context))(static_cast<int64_t>(shard));
    };
    pthreadpool_parallelize_1d(pool_, run_shard, const_cast<Work*>(&work), static_cast<size_t>(num_shards),
                               0);
  }

 private:
  const pthreadpool_t pool_;
};

}  // namespace

std::unique_ptr<Arm> make_pthreadpool_arm(int num_threads) {
  return std::make_unique<PthreadpoolArm>(num_threads);
}

#else
std::unique_ptr<Arm> make_pthreadpool_arm(int /*num_threads*/) { return nullptr; }
#endif
