// Jobs that are complete while some thread may still read what belongs to them: it was late with a task that
// another thread has run again. They are kept until those threads have left.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "pool/task_slot.h"
#include "pool/thread_pool.h"

namespace numa_moe {

class LateJobs {
 public:
  // Keeps the job if a slot isn't empty. A slot may show a thread that is late with an older job: then this
  // one is kept longer than it need be.
  void keep(std::shared_ptr<Job> job, const std::vector<TaskSlot>& slots) {
    Kept kept{std::move(job), {}};
    for (const TaskSlot& slot : slots) {
      if (const TaskSlot::Value value = slot.read(); value != 0) kept.late.emplace_back(&slot, value);
    }
    if (!kept.late.empty()) jobs_.push_back(std::move(kept));
  }

  // Lets go of jobs whose late threads have left. Returns how many are kept on.
  std::size_t release() {
    std::erase_if(jobs_, [](const Kept& kept) {
      return std::all_of(kept.late.begin(), kept.late.end(),
                         [](const auto& late) { return late.first->read() != late.second; });
    });
    return jobs_.size();
  }

 private:
  struct Kept {
    std::shared_ptr<Job> job;
    std::vector<std::pair<const TaskSlot*, TaskSlot::Value>> late;  // and what the slot showed
  };

  std::vector<Kept> jobs_;
};

}  // namespace numa_moe
