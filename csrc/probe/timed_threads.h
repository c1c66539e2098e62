// Runs the same work on several pinned threads at once and times it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace numa_moe {

// Calls work(thread) on num_threads new threads, all at once, repeats times in a row. Thread i runs on
// cpus[i]; none is pinned when cpus is empty. The calling thread only waits: its affinity stays as it is.
// Returns per repeat the seconds from the first thread's start to the last one's end.
// Throws std::invalid_argument when the arguments don't fit together, std::system_error when a thread can't
// be started or pinned, and whatever work throws first.
std::vector<double> time_threads(int num_threads, const std::vector<int>& cpus, int repeats,
                                 const std::function<void(int thread)>& work);

// Of an odd number of values the middle one, of an even number the upper of the two; values isn't empty.
double median(std::vector<double> values);

}  // namespace numa_moe
