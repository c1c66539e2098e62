#include "visit.h"

#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double microseconds(const timeval& time) {
  return 1e6 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec);
}

rusage usage() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return used;
}

}  // namespace

void let_others_sleep() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

void print_visit(Arm& arm, const VisitPlan& plan, const std::string& members) {
  std::vector<double> wall_us;
  wall_us.reserve(static_cast<size_t>(plan.dispatches));
  arm.begin_visit();
  for (int64_t dispatch = 0; dispatch < plan.uncounted; ++dispatch) arm.run(plan.num_shards, plan.work);
  const std::map<std::string, uint64_t> counted_before = arm.counters();
  const double intruder_before = plan.intruder == nullptr ? 0 : plan.intruder->cpu_us();
  const rusage before = usage();
  Clock::time_point begin = Clock::now();
  for (int64_t dispatch = 0; dispatch < plan.dispatches; ++dispatch) {
    arm.run(plan.num_shards, plan.work);
    const Clock::time_point end = Clock::now();
    wall_us.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    begin = end;
  }
  const rusage after = usage();
  const double intruder_after = plan.intruder == nullptr ? 0 : plan.intruder->cpu_us();
  const std::map<std::string, uint64_t> counted = arm.counters();
  arm.end_visit();

  const auto per_dispatch = [&](double total) { return total / static_cast<double>(plan.dispatches); };
  std::printf("{%s, \"user_us\": %.4f, \"system_us\": %.4f, \"counters\": {", members.c_str(),
              per_dispatch(microseconds(after.ru_utime) - microseconds(before.ru_utime)),
              per_dispatch(microseconds(after.ru_stime) - microseconds(before.ru_stime)));
  const char* separator = "";
  for (const auto& [name, total] : counted) {
    std::printf("%s\"%s\": %.6g", separator, name.c_str(),
                per_dispatch(static_cast<double>(total - counted_before.at(name))));
    separator = ", ";
  }
  std::printf("}, \"intruder_us\": %.4f, \"wall_us\": [", per_dispatch(intruder_after - intruder_before));
  separator = "";
  for (const double time : wall_us) {
    std::printf("%s%.3f", separator, time);
    separator = ", ";
  }
  std::printf("]}\n");
  std::fflush(stdout);
}
