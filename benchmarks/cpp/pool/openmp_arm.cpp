#include "arm.h"

#ifdef _OPENMP

namespace {

class OpenMpArm final : public Arm {
 public:
  explicit OpenMpArm(int num_threads) : num_threads_(num_threads) {}

  void run(int64_t num_shards, const Work& work) override {
#pragma omp parallel for schedule(static) num_threads(num_threads_)
    for (int64_t shard = 0; shard < num_shards; ++shard) work(shard);
  }

 private:
  const int num_threads_;
};

}  // namespace

std::unique_ptr<Arm> make_openmp_arm(int num_threads) { return std::make_unique<OpenMpArm>(num_threads); }

#else
std::unique_ptr<Arm> make_openmp_arm(int /*num_threads*/) { return nullptr; }
#endif
