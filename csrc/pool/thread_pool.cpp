#include "pool/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "pool/arguments.h"
#include "pool/duration_histogram.h"
#include "pool/late_jobs.h"
#include "pool/late_tasks.h"
#include "pool/membership.h"
#include "pool/phase_sequencer.h"
#include "pool/spin.h"
#include "pool/stall_points.h"
#include "pool/worker.h"

namespace numa_moe {
namespace {

// Idle workers yield so often before they park where they may not spin, see ThreadPool::workers_spin().
constexpr int64_t kYieldsInsteadOfSpinning = 8;

// Longer spins than this are the same as endless ones; it keeps deadlines within the clock's range.
constexpr int64_t kLongestSpinUs = int64_t{1} << 40;

int count_workers(const PoolOptions& options) {
  std::size_t count = 0;
  for (const auto& cpus : options.cpus_per_group) count += cpus.size();
  return static_cast<int>(count);
}

std::vector<int> workers_per_group(const PoolOptions& options) {
  std::vector<int> counts;
  for (const auto& cpus : options.cpus_per_group) counts.push_back(static_cast<int>(cpus.size()));
  return counts;
}

// Threads started in its scope never handle a signal: those for the process (Ctrl-C) go to the program's
// own threads. Signals that a thread's own instructions raise stay open, so that a crash handler such as
// Python's faulthandler still runs.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) {
      sigdelset(&blocked, signal);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// A task waits for this job, so its thread can't wait for the pool: other threads may be waiting for that
// task.
void run_inline(Job& job, const std::vector<Phase>& phases, int thread) {
  for (std::size_t phase = 0; phase < phases.size(); ++phase) {
    const std::vector<int32_t>& counts = phases[phase].tasks_per_group;
    for (std::size_t group = 0; group < counts.size(); ++group) {
      for (int32_t index = 0; index < counts[group]; ++index) {
        const Task task{static_cast<int>(phase), static_cast<int>(group), index, thread};
        job.run_task(task);
        if (phases[phase].repeatable) job.commit_task(task);
      }
    }
  }
}

}  // namespace

class ThreadPool::Implementation {
 public:
  explicit Implementation(PoolOptions options);
  ~Implementation();
  Implementation(const Implementation&) = delete;
  Implementation& operator=(const Implementation&) = delete;

  void run(Job& job) { run(job, nullptr); }
  void run(std::shared_ptr<Job> job);
  std::size_t release_late_jobs();

  const PoolOptions& options() const { return options_; }
  int num_workers() const { return num_workers_; }
  bool workers_spin() const { return workers_spin_; }
  PoolCounters counters() const;
  std::vector<SiteStatistics> statistics() const { return sequencer_.statistics(); }
  std::vector<WorkerState> worker_states() const;

 private:
  void start_workers();
  void release_workers();
  void join_workers();
  bool every_worker_has_its_own_cpu() const;
  void run(Job& job, std::shared_ptr<Job> owner);
  void dispatch(Job& job, const std::vector<Phase>& phases);
  template <typename Condition>
  void wait_until(Condition condition, int64_t& yields_left, int64_t late_after_us);
  template <typename Condition>
  void park_until(Condition condition);

  const PoolOptions options_;
  const int num_workers_;
  PhaseSequencer sequencer_;
  WorkerContext context_;
  bool workers_spin_ = false;
  std::vector<Worker> workers_;
  LateJobs late_jobs_;  // under the mutex

  std::mutex dispatching_;              // held while a job runs
  ThreadCounters dispatcher_counters_;  // written under the mutex
};

ThreadPool::Implementation::Implementation(PoolOptions options)
    : options_((check_options(options), std::move(options))),
      num_workers_(count_workers(options_)),
      sequencer_(workers_per_group(options_), options_.caller_helps, options_.collect_statistics),
      context_(this, sequencer_, num_workers_, options_.scheduling),
      workers_(static_cast<std::size_t>(num_workers_)) {
  try {
    start_workers();
    context_.placed.wait();
    workers_spin_ = every_worker_has_its_own_cpu();
  } catch (...) {
    const auto missing = std::count_if(workers_.begin(), workers_.end(),
                                       [](const Worker& worker) { return !worker.started(); });
    context_.placed.count_down(missing);
    context_.placed.wait();
    context_.stop.store(true, std::memory_order_relaxed);  // published by the latch
    release_workers();
    join_workers();
    throw;
  }
  context_.spin_us = workers_spin_ ? std::min(options_.worker_spin_us, kLongestSpinUs) : 0;
  context_.late_after_us = context_.spin_us > 0 ? options_.late_after_us : -1;
  context_.yields = workers_spin_ || options_.worker_spin_us == 0 ? 0 : kYieldsInsteadOfSpinning;
  release_workers();
}

void ThreadPool::Implementation::start_workers() {
  const SignalsBlocked signals_blocked;
  int index = 0;
  for (std::size_t group = 0; group < options_.cpus_per_group.size(); ++group) {
    int index_in_group = 0;
    for (const int cpu : options_.cpus_per_group[group]) {
      try {
        workers_[static_cast<std::size_t>(index)].start(context_, static_cast<int>(group), index_in_group,
                                                        index, cpu);
      } catch (const std::system_error& error) {
        throw std::system_error(error.code(), "can't start worker " + std::to_string(index + 1) + " of " +
                                                  std::to_string(num_workers_));
      }
      ++index;
      ++index_in_group;
    }
  }
}

// The groups' state goes where their first workers have touched the memory.
void ThreadPool::Implementation::release_workers() {
  for (std::size_t group = 0; group < options_.cpus_per_group.size(); ++group) {
    sequencer_.group_page(static_cast<int>(group)).construct();
  }
  context_.may_run.count_down();
}

void ThreadPool::Implementation::join_workers() {
  for (Worker& worker : workers_) {
    if (worker.started()) worker.join();
  }
}

ThreadPool::Implementation::~Implementation() {
  const std::lock_guard lock(dispatching_);
  // Relaxed: rousing a group releases it.
  context_.stop.store(true, std::memory_order_relaxed);
  for (std::size_t group = 0; group < options_.cpus_per_group.size(); ++group) {
    sequencer_.rouse(static_cast<int>(group), dispatcher_counters_);
  }
  join_workers();
}

bool ThreadPool::Implementation::every_worker_has_its_own_cpu() const {
  std::set<int> cpus;
  return std::all_of(workers_.begin(), workers_.end(), [&](const Worker& worker) {
    const WorkerState state = worker.state();
    return state.pinned() && cpus.insert(state.requested_cpu).second;
  });
}

void ThreadPool::Implementation::run(std::shared_ptr<Job> job) {
  Job& what = *job;
  run(what, std::move(job));
}

void ThreadPool::Implementation::run(Job& job, std::shared_ptr<Job> owner) {
  const std::vector<Phase>& phases = job.phases();
  check_phases(phases, static_cast<int>(options_.cpus_per_group.size()), /*may_repeat=*/owner != nullptr);
  if (const int thread = Membership::thread_in(this); thread >= 0) return run_inline(job, phases, thread);
  std::exception_ptr error;
  {
    const std::lock_guard lock(dispatching_);
    late_jobs_.release();
    dispatch(job, phases);
    sequencer_.count_finished_job();
    if (sequencer_.was_visited()) late_jobs_.keep(std::move(owner), sequencer_.slots());
    error = sequencer_.take_error();
  }
  if (error != nullptr) std::rethrow_exception(std::move(error));
}

void ThreadPool::Implementation::dispatch(Job& job, const std::vector<Phase>& phases) {
  dispatcher_counters_.dispatches.add();
  sequencer_.start(job, phases, dispatcher_counters_);

  int64_t yields_left = options_.dispatcher_yields;
  CompletionSignal& completion = sequencer_.completion();
  if (!options_.caller_helps) {
    wait_until([&] { return completion.complete(); }, yields_left, -1);
    return;
  }
  const Membership membership(this, num_workers_);
  const ClaimWord& claim = sequencer_.group(0).claim;
  for (;;) {
    sequencer_.run_tasks(0, num_workers_, dispatcher_counters_);
    if (completion.complete()) return;
    wait_until([&] { return completion.complete() || claim.has_tasks(); }, yields_left,
               context_.late_after_us);
  }
}

template <typename Condition>
void ThreadPool::Implementation::wait_until(Condition condition, int64_t& yields_left,
                                            int64_t late_after_us) {
  const int64_t spin_us = std::min(options_.dispatcher_spin_us, kLongestSpinUs);
  // A helping caller is a thread of group 0, the last.
  if (spin_until(condition, spin_us) || rerun_late_tasks(sequencer_, 0, num_workers_, late_after_us, spin_us,
                                                         condition, dispatcher_counters_)) {
    dispatcher_counters_.dispatcher_spins.add();
    return;
  }
  const YieldResult result = yield_until(condition, yields_left);
  yields_left -= result.yields;
  dispatcher_counters_.dispatcher_yields.add(static_cast<uint64_t>(result.yields));
  if (!result.holds) park_until(condition);
}

template <typename Condition>
void ThreadPool::Implementation::park_until(Condition condition) {
  CompletionSignal& completion = sequencer_.completion();
  for (;;) {
    stall(StallPoint::kBeforeAnnouncement);
    if (!completion.announce_sleep()) return;  // complete
    // Looks again only after the announcement: see CompletionSignal.
    if (condition()) break;
    dispatcher_counters_.dispatcher_parks.add();
    stall(StallPoint::kBeforeSleep);
    completion.sleep();
    if (condition()) break;
  }
  completion.retract_sleep();
}

std::size_t ThreadPool::Implementation::release_late_jobs() {
  const std::lock_guard lock(dispatching_);
  return late_jobs_.release();
}

PoolCounters ThreadPool::Implementation::counters() const {
  PoolCounters totals;
  dispatcher_counters_.add_to(totals);
  for (const Worker& worker : workers_) worker.counters().add_to(totals);
  return totals;
}

std::vector<WorkerState> ThreadPool::Implementation::worker_states() const {
  std::vector<WorkerState> states;
  states.reserve(workers_.size());
  for (const Worker& worker : workers_) states.push_back(worker.state());
  return states;
}

Durations Durations::of(const DurationHistogram& histogram) {
  Durations durations;
  for (int bucket = 0; bucket < kDurationBuckets; ++bucket) {
    durations.counts.push_back(histogram.count(bucket));
  }
  durations.max_ns = histogram.max();
  return durations;
}

ThreadPool::ThreadPool(PoolOptions options)
    : implementation_(std::make_unique<Implementation>(std::move(options))) {}
ThreadPool::~ThreadPool() = default;

void ThreadPool::run(Job& job) { implementation_->run(job); }
void ThreadPool::run(std::shared_ptr<Job> job) { implementation_->run(std::move(job)); }
std::size_t ThreadPool::release_late_jobs() { return implementation_->release_late_jobs(); }

int ThreadPool::num_groups() const { return static_cast<int>(options().cpus_per_group.size()); }
int ThreadPool::num_workers() const { return implementation_->num_workers(); }
int ThreadPool::num_threads() const { return num_workers() + (options().caller_helps ? 1 : 0); }

int ThreadPool::threads_in_group(int group) const {
  const auto& groups = options().cpus_per_group;
  if (group < 0 || group >= num_groups()) {
    throw std::invalid_argument("group must be 0 to " + std::to_string(num_groups() - 1) + ", got " +
                                std::to_string(group));
  }
  const bool with_caller = group == 0 && options().caller_helps;
  return static_cast<int>(groups[static_cast<std::size_t>(group)].size()) + (with_caller ? 1 : 0);
}

const PoolOptions& ThreadPool::options() const { return implementation_->options(); }
bool ThreadPool::workers_spin() const { return implementation_->workers_spin(); }
PoolCounters ThreadPool::counters() const { return implementation_->counters(); }
std::vector<SiteStatistics> ThreadPool::statistics() const { return implementation_->statistics(); }
std::vector<WorkerState> ThreadPool::workers() const { return implementation_->worker_states(); }

}  // namespace numa_moe
