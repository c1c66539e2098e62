// What one thread of the pool has done at each site: written by itself alone, read by any.
//
// A thread that leaves a job doesn't know yet how long the others will take. So it settles a job when it
// comes to the next one, whose opening tells how long the one before took: what it hasn't spent on tasks it
// has waited.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <vector>

#include "pool/duration_histogram.h"
#include "pool/padded.h"
#include "pool/thread_counters.h"
#include "pool/thread_pool.h"

namespace numa_moe {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// What the opening of a job tells of the one before.
struct FinishedJob {
  uint32_t number;
  int site;
  int64_t duration_ns;
};

class alignas(kSharingDistance) ThreadStatistics {
 public:
  ThreadStatistics() = default;
  ThreadStatistics(const ThreadStatistics&) = delete;
  ThreadStatistics& operator=(const ThreadStatistics&) = delete;
  ~ThreadStatistics() {
    for (const auto& record : sites_) delete record.load(std::memory_order_relaxed);
  }

  // By the thread, at its first task of a job: whether it is that.
  bool is_in(uint32_t job) const { return job == job_; }
  // Then: settles the job before. Throws nothing: without memory it counts nothing.
  void enter(uint32_t job, int site, const FinishedJob& finished) {
    if (Record* const record = this->record(finished.site)) {
      // One that had nothing to do in it has waited all the time; one that is late in it not at all.
      const int64_t busy_ns = finished.number == job_ ? busy_ns_ : 0;
      record->durations.add(std::max(int64_t{0}, finished.duration_ns - busy_ns));
    }
    job_ = job;
    site_ = site;
    busy_ns_ = 0;
  }

  // By the thread: it has spent so long on so many tasks of the job that it is in.
  void worked(int64_t ns, int64_t tasks) {
    busy_ns_ += ns;
    if (Record* const record = this->record(site_)) {
      record->busy_ns.add(static_cast<uint64_t>(ns));
      record->tasks.add(static_cast<uint64_t>(tasks));
    }
  }
  // By the thread: another one has run a task of its again, and was first.
  void was_late() {
    if (Record* const record = this->record(site_)) record->late_tasks.add();
  }

  // Of jobs as a whole, by the thread that has started them.
  void job_took(int site, int64_t ns) {
    if (Record* const record = this->record(site)) record->durations.add(ns);
  }

  // By any thread: what there is of each site.
  void append_to(std::vector<SiteStatistics>& all, int thread) const {
    for (int site = 0; site < kMostSites; ++site) {
      // Acquire: the record as it was made.
      const Record* const record = sites_[static_cast<std::size_t>(site)].load(std::memory_order_acquire);
      if (record == nullptr) continue;
      SiteStatistics& statistics = all.emplace_back();
      statistics.site = site;
      statistics.thread = thread;
      statistics.tasks = record->tasks.value();
      statistics.late_tasks = record->late_tasks.value();
      statistics.busy_ns = record->busy_ns.value();
      statistics.durations = Durations::of(record->durations);
    }
  }

 private:
  struct Record {
    Counter tasks;
    Counter late_tasks;
    Counter busy_ns;
    DurationHistogram durations;
  };

  // Made by the thread itself, so that it lies on its node.
  Record* record(int site) {
    if (site < 0) return nullptr;
    std::atomic<Record*>& place = sites_[static_cast<std::size_t>(site)];
    Record* record = place.load(std::memory_order_relaxed);
    if (record == nullptr) {
      record = new (std::nothrow) Record;
      place.store(record, std::memory_order_release);
    }
    return record;
  }

  uint32_t job_ = 0;
  int site_ = -1;
  int64_t busy_ns_ = 0;
  std::array<std::atomic<Record*>, kMostSites> sites_{};
};

}  // namespace numa_moe
