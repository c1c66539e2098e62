// Measures thread pools; ../../pool.py builds and runs this, and says what is compared. All arms of a run
// live in this one process and take turns. Every visit is printed as a line of JSON.
//
//   pool_speed empty THREADS VISITS DISPATCHES              round trip of a dispatch with nothing to do
//   pool_speed wait WORKERS SHARD_US VISITS DISPATCHES      a dispatcher that waits for its workers
//   pool_speed intruder PLACE PERCENT VISITS DISPATCHES     another process on a CPU
//                                                           (PLACE: worker, caller, outside)
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arm.h"
#include "busy_work.h"
#include "intruder.h"
#include "numa_moe_arm.h"
#include "pool/affinity.h"
#include "pool/scheduling.h"
#include "visit.h"

namespace {

using namespace numa_moe;

using NamedArms = std::vector<std::pair<std::string, std::unique_ptr<Arm>>>;

// Of an intruder's arms, on all their CPUs together: as long as a layer's step of a large model.
constexpr double kDispatchUs = 3000;
constexpr int64_t kTasksPerThread = 60;

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "pool_speed: %s\n", message.c_str());
  std::exit(2);
}

std::string quoted(const std::string& name, const std::string& value) {
  return "\"" + name + "\": \"" + value + "\"";
}

void skip(const std::string& arm, const std::string& why) {
  std::printf("{%s, %s}\n", quoted("arm", arm).c_str(), quoted("skipped", why).c_str());
}

// Puts each thread of a pool on a CPU of its own, the caller's first. Every shard waits for all others, so
// each thread runs one.
void pin_threads(Arm& arm, const std::vector<int>& cpus, int num_threads) {
  struct Context {
    const std::vector<int>& cpus;
    const int num_threads;
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<int> next{1};
    std::atomic<int> arrived{0};
  } context{cpus, num_threads};
  arm.begin_visit();
  arm.run(num_threads, {[](void* pointer, int64_t) {
                          Context& shared = *static_cast<Context*>(pointer);
                          const bool calls = std::this_thread::get_id() == shared.caller;
                          const int position = calls ? 0 : shared.next.fetch_add(1);
                          pin_calling_thread_to(shared.cpus.at(static_cast<size_t>(position)));
                          shared.arrived.fetch_add(1);
                          while (shared.arrived.load() < shared.num_threads) sched_yield();
                        },
                        &context});
  arm.end_visit();
}

// On the CPUs from `first` on: that many workers in one group, or in a group each.
PoolOptions workers_on(const std::vector<int>& cpus, int first, int count, bool group_each) {
  PoolOptions options;
  if (!group_each) options.cpus_per_group.emplace_back();
  for (int worker = 0; worker < count; ++worker) {
    if (group_each) options.cpus_per_group.emplace_back();
    options.cpus_per_group.back().push_back(cpus.at(static_cast<size_t>(first + worker)));
  }
  return options;
}

bool real_time_is_permitted() {
  bool permitted = false;
  std::thread([&] { permitted = schedule_calling_thread(Scheduling::kFifo) == 0; }).join();
  return permitted;
}

void run_empty(int num_threads, int64_t visits, int64_t dispatches) {
  const std::vector<int> cpus = allowed_cpus(0);
  if (num_threads < 1 || num_threads > static_cast<int>(cpus.size()))
    fail("THREADS must be 1 to the CPUs' number");
  NamedArms arms;
  const auto add = [&](const std::string& name, std::unique_ptr<Arm> arm, const std::string& lacking) {
    if (arm == nullptr) return skip(name, lacking);
    pin_threads(*arm, cpus, num_threads);
    arms.emplace_back(name, std::move(arm));
  };
  PoolOptions options = workers_on(cpus, 1, num_threads - 1, /*group_each=*/false);
  options.caller_helps = true;
  // First, and the caller then pinned: threads inherit the mask of who starts them.
  arms.emplace_back("numa_moe", make_numa_moe_arm(options, /*repeatable=*/false));
  arms.emplace_back("numa_moe, late tasks run again", make_numa_moe_arm(options, /*repeatable=*/true));
  options.collect_statistics = false;
  arms.emplace_back("numa_moe, no statistics", make_numa_moe_arm(options, /*repeatable=*/false));
  auto highway_spins = make_highway_arm(num_threads, /*spins=*/true);
  auto highway_blocks = make_highway_arm(num_threads, /*spins=*/false);
  auto pthreadpool = make_pthreadpool_arm(num_threads);
  auto parallel_for = make_parallel_for_arm(num_threads);
  auto openmp = make_openmp_arm(num_threads);
  add("OpenMP", std::move(openmp), "built without OpenMP");
  add("at::parallel_for", std::move(parallel_for), "built without torch");
  add("pthreadpool", std::move(pthreadpool), "no pthreadpool.h (apt install libpthreadpool-dev)");
  add("Highway, spins", std::move(highway_spins), "built without --highway");
  add("Highway, sleeps", std::move(highway_blocks), "built without --highway");
  pin_calling_thread_to(cpus[0]);

  const Work nothing{[](void*, int64_t) {}, nullptr};
  for (int64_t visit = 0; visit < visits; ++visit) {
    for (const auto& [name, arm] : arms) {
      let_others_sleep();
      // Highway tries ways of waiting for its first thousands of calls.
      const int64_t uncounted = visit == 0 ? 20'000 : 500;
      print_visit(*arm, {num_threads, nothing, uncounted, dispatches, nullptr}, quoted("arm", name));
    }
  }
}

void run_wait(int num_workers, double shard_us, int64_t visits, int64_t dispatches) {
  const std::vector<int> cpus = allowed_cpus(0);
  if (num_workers < 1 || num_workers > static_cast<int>(cpus.size()))
    fail("WORKERS must be 1 to the CPUs' number");
  // From the last one on, so that the first stay for the dispatcher as long as some are left.
  const int first = static_cast<int>(cpus.size()) - num_workers;
  PoolOptions options = workers_on(cpus, first, num_workers, /*group_each=*/false);
  NamedArms arms;
  arms.emplace_back("parks", make_numa_moe_arm(options, /*repeatable=*/false));
  options.dispatcher_yields = std::numeric_limits<int64_t>::max();
  arms.emplace_back("yields on", make_numa_moe_arm(options, /*repeatable=*/false));

  BusyWork work{static_cast<int64_t>(shard_us * steps_per_microsecond())};
  for (int64_t visit = 0; visit < visits; ++visit) {
    for (const auto& [name, arm] : arms) {
      let_others_sleep();
      print_visit(*arm, {num_workers, work.work(), 5, dispatches, nullptr}, quoted("arm", name));
    }
  }
}

void run_intruder(const std::string& place, int percent, int64_t visits, int64_t dispatches) {
  const std::vector<int> cpus = allowed_cpus(0);
  const int num_cpus = static_cast<int>(cpus.size());
  if (num_cpus < 2) fail("an intruder takes two CPUs");
  if (percent < 1 || percent > 100) fail("PERCENT must be 1 to 100");
  const bool outside = place == "outside";
  if (!outside && place != "worker" && place != "caller") fail("PLACE must be worker, caller or outside");
  // Outside: the first CPU isn't the pool's, and the caller, who only waits, may run anywhere.
  const int num_threads = outside ? num_cpus - 1 : num_cpus;

  PoolOptions options = workers_on(cpus, 1, num_cpus - 1, /*group_each=*/false);
  options.caller_helps = !outside;
  PoolOptions left_alone = options;
  left_alone.late_after_us = -1;
  PoolOptions fifo = options;
  fifo.scheduling = Scheduling::kFifo;
  PoolOptions fixed = workers_on(cpus, 1, num_cpus - 1, /*group_each=*/true);
  fixed.caller_helps = !outside;
  if (!outside) fixed.cpus_per_group.insert(fixed.cpus_per_group.begin(), std::vector<int>{});

  struct IntruderArm {
    std::string name;
    std::unique_ptr<Arm> arm;
    int64_t num_shards;
  };
  std::vector<IntruderArm> arms;
  const int64_t num_tasks = kTasksPerThread * num_threads;
  arms.push_back({"run again", make_numa_moe_arm(options, /*repeatable=*/true), num_tasks});
  arms.push_back({"left alone", make_numa_moe_arm(left_alone, /*repeatable=*/true), num_tasks});
  arms.push_back({"fixed shares", make_numa_moe_arm(fixed, /*repeatable=*/false), num_threads});
  if (real_time_is_permitted()) {
    arms.push_back({"fifo", make_numa_moe_arm(fifo, /*repeatable=*/true), num_tasks});
  } else {
    skip("fifo", "real-time scheduling takes CAP_SYS_NICE, or ulimit -r 1");
  }
  if (!outside) pin_calling_thread_to(cpus[0]);

  const double steps = kDispatchUs * steps_per_microsecond() * num_threads;
  const Intruder intruder(cpus.at(place == "worker" ? 1 : 0), percent);
  for (int64_t visit = 0; visit < visits; ++visit) {
    for (const IntruderArm& arm : arms) {
      BusyWork work{static_cast<int64_t>(steps / static_cast<double>(arm.num_shards))};
      const VisitPlan plan{arm.num_shards, work.work(), 5, dispatches, &intruder};
      intruder.stop();
      let_others_sleep();
      print_visit(*arm.arm, plan, quoted("arm", arm.name) + ", \"intruder\": false");
      intruder.resume();
      let_others_sleep();
      print_visit(*arm.arm, plan, quoted("arm", arm.name) + ", \"intruder\": true");
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::string mode = count > 1 ? arguments[1] : "";
  if (mode == "empty" && count == 5) {
    run_empty(std::atoi(arguments[2]), std::atoll(arguments[3]), std::atoll(arguments[4]));
  } else if (mode == "wait" && count == 6) {
    run_wait(std::atoi(arguments[2]), std::atof(arguments[3]), std::atoll(arguments[4]),
             std::atoll(arguments[5]));
  } else if (mode == "intruder" && count == 6) {
    run_intruder(arguments[2], std::atoi(arguments[3]), std::atoll(arguments[4]), std::atoll(arguments[5]));
  } else {
    fail("see the beginning of pool_speed.cpp for the arguments");
  }
  return 0;
}
