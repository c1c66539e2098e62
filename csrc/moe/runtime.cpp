#include "moe/runtime.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

namespace numa_moe {
namespace {

// Everything global. Leaked, so that no static destructor runs while other threads still compute.
struct Globals {
  std::mutex mutex;
  std::shared_ptr<Runtime> runtime;
  std::function<void()> starter;
};

Globals& globals() {
  static Globals* const instance = [] {
    auto* created = new Globals;
    // The child of a fork has the memory of the pool but not its threads. Taking the mutex around the
    // fork makes the child see a whole shared_ptr; the child then forgets the runtime without running
    // its destructor (which would join threads that don't exist there).
    pthread_atfork([] { globals().mutex.lock(); }, [] { globals().mutex.unlock(); },
                   [] {
                     new std::shared_ptr<Runtime>(std::move(globals().runtime));  // leaked on purpose
                     globals().runtime = nullptr;
                     globals().mutex.unlock();
                   });
    return created;
  }();
  return *instance;
}

RuntimeOptions default_options() {
  const unsigned cpus = std::max(1u, std::thread::hardware_concurrency());  // honours the affinity mask
  RuntimeOptions options;
  options.pool.cpus_per_group = {std::vector<int>(cpus, -1)};
  options.node_per_group = {-1};
  options.instruction_set = supported_instruction_sets().back();
  return options;
}

}  // namespace

Runtime::Runtime(RuntimeOptions options) : options_(std::move(options)), pool_(options_.pool) {
  if (options_.node_per_group.size() != options_.pool.cpus_per_group.size()) {
    throw std::invalid_argument("node_per_group must have one entry per group of workers");
  }
  for (int thread = 0; thread < pool_.num_threads(); ++thread) {
    thread_scratch_.push_back(std::make_unique<ThreadScratch>());
  }
}

std::shared_ptr<Workspace> Runtime::workspace() {
  pool_.release_late_jobs();
  for (const std::shared_ptr<Workspace>& workspace : workspaces_) {
    if (workspace.use_count() == 1) return workspace;
  }
  return workspaces_.emplace_back(std::make_shared<Workspace>(options_.node_per_group));
}

int Runtime::site_of(const void* gate_up) {
  if (const auto found = sites_.find(gate_up); found != sites_.end()) return found->second;
  const auto next = static_cast<int>(sites_.size());
  if (next >= kMostSites - 1) return kMostSites - 1;
  sites_.emplace(gate_up, next);
  return next;
}

std::vector<const void*> Runtime::sites() {
  const std::lock_guard lock(workspace_mutex_);
  std::vector<const void*> begins(sites_.size());
  for (const auto& [begin, site] : sites_) begins[static_cast<size_t>(site)] = begin;
  return begins;
}

int64_t Runtime::workspace_bytes() {
  const std::lock_guard lock(workspace_mutex_);
  int64_t total = 0;
  for (const auto& workspace : workspaces_) total += workspace->bytes();
  for (const auto& scratch : thread_scratch_) total += scratch->bytes();
  return total;
}

std::shared_ptr<Runtime> running_runtime() {
  const std::lock_guard lock(globals().mutex);
  return globals().runtime;
}

void install_runtime(std::shared_ptr<Runtime> runtime) {
  std::shared_ptr<Runtime> previous;
  {
    const std::lock_guard lock(globals().mutex);
    previous = std::exchange(globals().runtime, std::move(runtime));
  }
  // previous stops here, outside of the lock, unless a call still uses it: then with that call.
}

void set_runtime_starter(std::function<void()> starter) {
  const std::lock_guard lock(globals().mutex);
  globals().starter = std::move(starter);
}

std::shared_ptr<Runtime> current_runtime() {
  std::function<void()> starter;
  {
    const std::lock_guard lock(globals().mutex);
    if (globals().runtime != nullptr) return globals().runtime;
    starter = globals().starter;
  }
  if (starter) {
    starter();
  } else {
    auto started = std::make_shared<Runtime>(default_options());
    const std::lock_guard lock(globals().mutex);
    if (globals().runtime == nullptr) globals().runtime = std::move(started);
  }
  auto runtime = running_runtime();
  if (runtime == nullptr) throw std::runtime_error("numa_moe: the runtime did not start");
  return runtime;
}

}  // namespace numa_moe
