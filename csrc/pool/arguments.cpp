#include "pool/arguments.h"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "pool/task_slot.h"

namespace numa_moe {
namespace {

void check_not_negative(const char* name, int64_t value) {
  if (value < 0) {
    throw std::invalid_argument(std::string(name) + " must be 0 or more, got " + std::to_string(value));
  }
}

}  // namespace

void check_options(const PoolOptions& options) {
  const auto& groups = options.cpus_per_group;
  if (groups.empty()) throw std::invalid_argument("cpus_per_group must have at least one group, got none");
  for (std::size_t group = 0; group < groups.size(); ++group) {
    const std::string name = "cpus_per_group[" + std::to_string(group) + "]";
    // A group that no thread serves would never finish its tasks.
    if (groups[group].empty() && !(group == 0 && options.caller_helps)) {
      throw std::invalid_argument(name + " must have at least one worker, got none (only group 0 may be " +
                                  "empty, if the caller helps)");
    }
    for (const int cpu : groups[group]) {
      if (cpu < -1) {
        throw std::invalid_argument(name + " must hold CPU numbers, or -1 for a worker that isn't pinned, " +
                                    "got " + std::to_string(cpu));
      }
    }
  }
  check_not_negative("worker_spin_us", options.worker_spin_us);
  check_not_negative("dispatcher_spin_us", options.dispatcher_spin_us);
  check_not_negative("dispatcher_yields", options.dispatcher_yields);
  if (options.late_after_us < -1) {
    throw std::invalid_argument("late_after_us must be 0 or more, or -1 for never, got " +
                                std::to_string(options.late_after_us));
  }
}

void check_phases(const std::vector<Phase>& phases, int num_groups, bool may_repeat) {
  for (std::size_t phase = 0; phase < phases.size(); ++phase) {
    const std::vector<int32_t>& counts = phases[phase].tasks_per_group;
    const std::string name = "phases[" + std::to_string(phase) + "].tasks_per_group";
    if (counts.size() != static_cast<std::size_t>(num_groups)) {
      throw std::invalid_argument(name + " must have one count per group (" + std::to_string(num_groups) +
                                  "), got " + std::to_string(counts.size()));
    }
    if (phases[phase].repeatable && !may_repeat) {
      throw std::invalid_argument("phases[" + std::to_string(phase) +
                                  "] is repeatable: such a job must be handed over as a shared pointer");
    }
    for (std::size_t group = 0; group < counts.size(); ++group) {
      if (phases[phase].repeatable && counts[group] > TaskSlot::kMostTasks) {
        throw std::invalid_argument(name + "[" + std::to_string(group) + "] must be at most " +
                                    std::to_string(TaskSlot::kMostTasks) + " in a repeatable phase, got " +
                                    std::to_string(counts[group]));
      }
      if (counts[group] < 0) {
        throw std::invalid_argument(name + "[" + std::to_string(group) + "] must be 0 or more, got " +
                                    std::to_string(counts[group]));
      }
    }
  }
}

}  // namespace numa_moe
