// The process-wide pool and what goes with it.
//
// One runtime serves all layers of a process. It starts on first use, is replaced by configure(), and
// is never destroyed at exit: its threads sleep, and a destructor that joins them while the process is
// being torn down is how programs hang.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "kernels/kernels.h"
#include "moe/workspace.h"
#include "pool/thread_pool.h"

namespace numa_moe {

struct RuntimeOptions {
  PoolOptions pool;
  std::vector<int> node_per_group;  // one per group; -1: memory may lie anywhere
  InstructionSet instruction_set;
};

class Runtime {
 public:
  explicit Runtime(RuntimeOptions options);

  ThreadPool& pool() { return pool_; }
  const RuntimeOptions& options() const { return options_; }
  InstructionSet instruction_set() const { return options_.instruction_set; }

  // One layer computes at a time: hold the lock from planning until the output is written.
  std::mutex& workspace_mutex() { return workspace_mutex_; }
  // One that nobody else holds. Under the lock, and so is letting go of it. There is one, and one more for
  // each layer that a late thread of the pool is still in.
  std::shared_ptr<Workspace> workspace();
  ThreadScratch& thread_scratch(int thread) { return *thread_scratch_[static_cast<size_t>(thread)]; }
  // The layer whose packed gate/up weights begin there, as the pool's statistics number it: in the order of
  // their first calls, and the last number for all that come too late. Under the lock.
  int site_of(const void* gate_up);
  // Where each site's weights begin, or began. Takes the lock.
  std::vector<const void*> sites();
  // Of all scratch. Takes the lock.
  int64_t workspace_bytes();

 private:
  RuntimeOptions options_;
  std::mutex workspace_mutex_;
  std::vector<std::shared_ptr<Workspace>> workspaces_;
  std::unordered_map<const void*, int> sites_;
  std::vector<std::unique_ptr<ThreadScratch>> thread_scratch_;
  ThreadPool pool_;  // the last, so that its threads are gone before what they use
};

// The running runtime; starts one if there is none (first use, or first use after a fork).
std::shared_ptr<Runtime> current_runtime();
// The running runtime or null.
std::shared_ptr<Runtime> running_runtime();
// Makes a runtime the current one. Calls that are under way finish on the old one, which then stops.
void install_runtime(std::shared_ptr<Runtime> runtime);
// What current_runtime() calls when none is running; must call install_runtime(). Without a starter a
// single unpinned group with a thread per CPU that the process may use is started.
void set_runtime_starter(std::function<void()> starter);

}  // namespace numa_moe
