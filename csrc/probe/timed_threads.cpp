#include "probe/timed_threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "pool/affinity.h"

namespace numa_moe {
namespace {

using Clock = std::chrono::steady_clock;

// Where the threads wait for each other. Spinning starts them within a microsecond of one another; yielding
// now and then lets more threads than CPUs through.
class StartLine {
 public:
  explicit StartLine(int num_threads) : num_threads_(num_threads) {}

  // Returns false when someone called give_up(). The lap-th wait (from 1) ends when all threads have come to
  // it: a count that only grows can't be mistaken for that of another lap.
  bool wait(int lap) {
    // Release: what a thread wrote in its last lap is visible to those that pass this line (acquire below).
    arrived_.fetch_add(1, std::memory_order_acq_rel);
    const int64_t expected = int64_t{num_threads_} * lap;
    for (int64_t spins = 1; arrived_.load(std::memory_order_acquire) < expected; ++spins) {
      if (given_up_.load(std::memory_order_relaxed)) return false;
      if (spins % 1024 == 0) std::this_thread::yield();
    }
    return !given_up_.load(std::memory_order_relaxed);
  }

  // A flag that guards no data: relaxed.
  void give_up() { given_up_.store(true, std::memory_order_relaxed); }

 private:
  const int num_threads_;
  std::atomic<int64_t> arrived_{0};
  std::atomic<bool> given_up_{false};
};

void pin(int cpu) {
  const int error = pin_calling_thread(cpu);
  // A sandbox may say yes and do nothing: what counts is what the kernel reads back.
  if (error == 0 && allowed_cpus(0) == std::vector<int>{cpu}) return;
  throw std::system_error(error != 0 ? error : ENOTSUP, std::generic_category(),
                          "cpus: can't pin a thread to CPU " + std::to_string(cpu));
}

void check(int num_threads, const std::vector<int>& cpus, int repeats) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads must be at least 1, got " + std::to_string(num_threads));
  }
  if (!cpus.empty() && cpus.size() != static_cast<std::size_t>(num_threads)) {
    throw std::invalid_argument("cpus must be empty or name one CPU per thread (" +
                                std::to_string(num_threads) + "), got " + std::to_string(cpus.size()));
  }
  if (repeats < 1) throw std::invalid_argument("repeats must be at least 1, got " + std::to_string(repeats));
}

}  // namespace

std::vector<double> time_threads(int num_threads, const std::vector<int>& cpus, int repeats,
                                 const std::function<void(int thread)>& work) {
  check(num_threads, cpus, repeats);
  struct Lap {
    Clock::time_point start;
    Clock::time_point end;
  };
  std::vector<std::vector<Lap>> laps(num_threads, std::vector<Lap>(repeats));
  StartLine start_line(num_threads);
  std::mutex mutex;
  std::exception_ptr first_error;

  const auto run = [&](int thread) {
    try {
      if (!cpus.empty()) pin(cpus[thread]);
      for (int repeat = 0; repeat < repeats; ++repeat) {
        if (!start_line.wait(repeat + 1)) return;
        laps[thread][repeat].start = Clock::now();
        work(thread);
        laps[thread][repeat].end = Clock::now();
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (first_error == nullptr) first_error = std::current_exception();
      start_line.give_up();
    }
  };

  std::vector<std::thread> threads;
  threads.reserve(num_threads);
  try {
    for (int thread = 0; thread < num_threads; ++thread) threads.emplace_back(run, thread);
  } catch (const std::system_error&) {
    start_line.give_up();
    for (std::thread& thread : threads) thread.join();
    throw;
  }
  for (std::thread& thread : threads) thread.join();
  if (first_error != nullptr) std::rethrow_exception(first_error);

  std::vector<double> seconds;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    Clock::time_point start = laps[0][repeat].start;
    Clock::time_point end = laps[0][repeat].end;
    for (const std::vector<Lap>& of_thread : laps) {
      start = std::min(start, of_thread[repeat].start);
      end = std::max(end, of_thread[repeat].end);
    }
    seconds.push_back(std::chrono::duration<double>(end - start).count());
  }
  return seconds;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace numa_moe
