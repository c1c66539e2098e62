// A thread pool under measurement: ours with some options, or another one.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

// What a dispatch runs: a function pointer, since std::function would cost every arm the same extra call.
struct Work {
  void (*run_shard)(void* context, int64_t shard) = nullptr;
  void* context = nullptr;

  void operator()(int64_t shard) const { run_shard(context, shard); }
};

class Arm {
 public:
  virtual ~Arm() = default;

  // Runs shards 0 to num_shards - 1, each once, and returns when all are done.
  virtual void run(int64_t num_shards, const Work& work) = 0;

  // Around each visit: a pool that spins only between two calls, as Highway's, starts and stops here.
  virtual void begin_visit() {}
  virtual void end_visit() {}

  // Running totals of the pool's own counters, by name. Empty for those that have none.
  virtual std::map<std::string, uint64_t> counters() const { return {}; }
};

// Ends the program where that fails.
void pin_calling_thread_to(int cpu);

// Other pools: of that many threads, the caller included. Null where the library wasn't found at build time.
std::unique_ptr<Arm> make_openmp_arm(int num_threads);
std::unique_ptr<Arm> make_parallel_for_arm(int num_threads);
std::unique_ptr<Arm> make_pthreadpool_arm(int num_threads);
// spins: between the calls of a visit, instead of sleeping.
std::unique_ptr<Arm> make_highway_arm(int num_threads, bool spins);
