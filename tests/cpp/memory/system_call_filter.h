// Makes chosen system calls of this process fail, as a container's seccomp profile does.
#pragma once

#include <initializer_list>

namespace numa_moe {

// From now on, for good, the given calls of this thread and its children answer with this errno and do
// nothing. For child processes of tests only. Returns whether the kernel accepted the filter.
bool deny_system_calls(std::initializer_list<int> numbers, int error);

}  // namespace numa_moe
