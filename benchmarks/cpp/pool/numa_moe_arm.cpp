#include "numa_moe_arm.h"

#include <utility>

namespace {

using namespace numa_moe;

class ShardJob final : public Job {
 public:
  ShardJob(int64_t num_shards, int64_t num_groups, bool repeatable)
      : num_shards_(num_shards), num_groups_(num_groups) {
    Phase phase;
    phase.repeatable = repeatable;
    for (int64_t group = 0; group < num_groups; ++group) {
      phase.tasks_per_group.push_back(
          static_cast<int32_t>((num_shards + num_groups - 1 - group) / num_groups));
    }
    phases_.push_back(std::move(phase));
  }

  int64_t num_shards() const { return num_shards_; }
  void set_work(const Work& work) { work_ = work; }
  const std::vector<Phase>& phases() const override { return phases_; }
  void run_task(const Task& task) override { work_(task.index * num_groups_ + task.group); }

 private:
  const int64_t num_shards_;
  const int64_t num_groups_;
  std::vector<Phase> phases_;
  Work work_;
};

class NumaMoeArm final : public Arm {
 public:
  NumaMoeArm(const PoolOptions& options, bool repeatable) : pool_(options), repeatable_(repeatable) {}

  void run(int64_t num_shards, const Work& work) override {
    // One job for all dispatches of a kind; one that a late thread may still be in isn't touched again.
    if (job_ == nullptr || job_->num_shards() != num_shards || (repeatable_ && job_.use_count() > 1)) {
      job_ = std::make_shared<ShardJob>(num_shards, pool_.num_groups(), repeatable_);
    }
    job_->set_work(work);
    if (repeatable_) {
      pool_.run(std::shared_ptr<Job>(job_));
    } else {
      pool_.run(*job_);
    }
  }

  std::map<std::string, uint64_t> counters() const override {
    const PoolCounters counters = pool_.counters();
    return {{"dispatches", counters.dispatches},       {"spins", counters.dispatcher_spins},
            {"yields", counters.dispatcher_yields},    {"parks", counters.dispatcher_parks},
            {"worker_parks", counters.worker_parks},   {"wakes_sent", counters.wakes_sent},
            {"wakes_skipped", counters.wakes_skipped}, {"late_tasks", counters.late_tasks}};
  }

 private:
  ThreadPool pool_;
  const bool repeatable_;
  std::shared_ptr<ShardJob> job_;
};

}  // namespace

std::unique_ptr<Arm> make_numa_moe_arm(const PoolOptions& options, bool repeatable) {
  return std::make_unique<NumaMoeArm>(options, repeatable);
}
