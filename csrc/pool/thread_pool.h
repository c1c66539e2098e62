// A thread pool of pinned workers in groups, one group per NUMA node.
//
// A job is a sequence of phases. In each phase every group has its own tasks, numbered from 0, which
// only the workers of that group claim. A phase ends with a barrier: either each group goes on by
// itself (Barrier::kGroup) or all groups wait for each other (Barrier::kPool). The last phase always
// ends with all groups done, and run() then returns.
//
// A thread that loses its CPU to another program in the middle of a task would keep everybody waiting for as
// long as the scheduler likes. Tasks of phases that are declared repeatable are therefore run again by a
// thread of the group that has nothing else to do; whoever is first commits the result.
//
// The pool knows nothing of what the tasks compute.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pool/scheduling.h"

namespace numa_moe {

enum class Barrier : uint8_t {
  kGroup,  // a group starts its next phase as soon as its own tasks are finished
  kPool,   // no group starts its next phase before every group has finished this one
};

// Sites that statistics can tell apart, see Job::site().
inline constexpr int kMostSites = 512;

struct Phase {
  std::vector<int32_t> tasks_per_group;  // one count per group, each >= 0
  Barrier barrier = Barrier::kPool;      // what ends this phase
  // Tasks may be run several times, at once, also after the job is complete; see Job.
  bool repeatable = false;
};

struct Task {
  int phase;      // index into Job::phases()
  int group;      // the group that claimed the task
  int32_t index;  // 0 <= index < phases()[phase].tasks_per_group[group]
  int thread;     // who runs it: 0 <= thread < num_threads(); never two tasks at once on one thread
};

// What to run. Must outlive the call to run(); phases() may not change meanwhile.
class Job {
 public:
  virtual ~Job() = default;
  virtual const std::vector<Phase>& phases() const = 0;
  // On some thread of the task's group. What it throws ends the job early (tasks not yet started are
  // skipped) and is thrown again, the first one only, by ThreadPool::run(). Called once per task; of a
  // repeatable phase perhaps more often, with another Task::thread. Then it writes nothing but memory of
  // that thread's own, and reads nothing that changes while the job exists.
  virtual void run_task(const Task& task) = 0;
  // For repeatable phases: makes known what run_task() computed last on this thread. Called once per task,
  // right after a run_task() that has thrown nothing.
  virtual void commit_task(const Task& /*task*/) {}
  // Where in the program the job comes from, such as a layer: 0 <= site() < kMostSites. Statistics are kept
  // for each site; the last is for whatever has none of its own.
  virtual int site() const { return kMostSites - 1; }
};

struct PoolOptions {
  // One worker per entry; a CPU number, or -1: unpinned. A group may be empty only if it is group 0 and
  // the caller helps.
  std::vector<std::vector<int>> cpus_per_group;
  bool caller_helps = false;  // the thread in run() claims tasks too (of group 0)
  int64_t worker_spin_us = 50;  // how long an idle worker spins before it parks, microseconds
  int64_t dispatcher_spin_us = 20;  // how long a wait in run() spins before it yields, microseconds
  int64_t dispatcher_yields = 512;  // how often run() yields, all its waits together, before it parks
  // A thread that has waited for so long for another one's task runs it again; -1: never. Only threads that
  // spin do, see workers_spin().
  int64_t late_after_us = 50;
  Scheduling scheduling = Scheduling::kNormal;  // of workers that could be pinned
  bool collect_statistics = true;  // see ThreadPool::statistics()
};

// Running totals since the pool started. Reading them is safe at any time.
struct PoolCounters {
  uint64_t dispatches = 0;  // calls of run(), without those from inside tasks
  uint64_t dispatcher_spins = 0;  // waits of run() that ended while spinning
  uint64_t dispatcher_yields = 0;  // calls of sched_yield in run()
  uint64_t dispatcher_parks = 0;  // futex waits of run()
  uint64_t worker_parks = 0;  // futex waits of workers
  uint64_t wakes_sent = 0;  // futex wake calls, both directions
  uint64_t wakes_skipped = 0;  // openings of a group's phase, and completions, that found nobody asleep
  uint64_t late_tasks = 0;  // tasks that were run again
  uint64_t late_tasks_won = 0;  // those of them that were finished earlier than by who had started them
};

struct WorkerState {
  int group;
  int requested_cpu;  // from PoolOptions, or -1
  std::vector<int> allowed;  // the worker's affinity mask, read back from the kernel
  int pin_error;  // errno of the pinning call, 0 when it succeeded or none was asked for
  int thread_id;  // kernel thread id
  Scheduling scheduling;  // read back from the kernel
  int scheduling_error;  // errno of the call that set it, 0 when it succeeded or none was made

  // Whether it can run on the requested CPU alone: the call that pins may report success and do nothing.
  bool pinned() const { return allowed.size() == 1 && allowed.front() == requested_cpu; }
};

// How often durations came up, by size.
struct Durations {
  std::vector<uint64_t> counts;  // per bucket of duration_histogram.h
  int64_t max_ns = 0;

  static Durations of(const class DurationHistogram& histogram);
};

// Running totals of one thread at one site, since the pool started.
struct SiteStatistics {
  int site = 0;
  int thread = 0;  // as in Task; -1: of the jobs as a whole
  uint64_t tasks = 0;  // that the thread has run
  uint64_t late_tasks = 0;  // of those, the ones that another thread has run again and finished earlier
  uint64_t busy_ns = 0;  // time that they took
  // Of a thread: per job, the part of its time in which the thread had nothing to do. A job is counted when
  // the thread comes to the next one, and not at all if it sleeps through the whole of that. Of the jobs as a
  // whole: how long they took.
  Durations durations;
};

class ThreadPool {
 public:
  // Starts the workers and waits until every one has tried to pin itself (see workers()). The calling
  // thread's own affinity and signal mask stay as they are. Throws std::invalid_argument on a group
  // without threads or an option out of range, std::system_error when a thread can't be started.
  explicit ThreadPool(PoolOptions options);
  // Waits for a running job, then joins the workers. Not in a forked child, where they don't exist, and
  // not from inside a task.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Runs a job and returns when all its tasks are finished; everything they wrote is then visible to
  // the caller. Several threads may call at once: their jobs run one after the other. A call from
  // inside a task of this pool runs the whole job at once on the calling thread, phase by phase, tasks of
  // all groups, under the number of the thread that it interrupts. Throws std::invalid_argument if the
  // phases don't fit the groups or are repeatable (before any task runs), and what a task threw.
  void run(Job& job);
  // The same for jobs with repeatable phases. The job is kept for as long as a late thread may still be in
  // one of its tasks, and let go by the next run(), release_late_jobs() or the end of the pool.
  void run(std::shared_ptr<Job> job);
  // Lets go of jobs whose late threads have left. Returns how many must be kept on.
  std::size_t release_late_jobs();

  int num_groups() const;
  int num_workers() const;
  int num_threads() const;  // workers, plus one if the caller helps
  int threads_in_group(int group) const;  // who can claim the group's tasks, the caller included
  const PoolOptions& options() const;

  // Idle workers spin only if each was pinned, alone, to its CPU: elsewhere a spinning thread takes the
  // CPU from one that works, and they yield a few times and park instead.
  bool workers_spin() const;

  PoolCounters counters() const;
  // Where something was counted, by thread and site. Safe at any time; not one moment's: numbers that are
  // read late are newer.
  std::vector<SiteStatistics> statistics() const;
  std::vector<WorkerState> workers() const;  // affinity read back at the time of the call

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace numa_moe
