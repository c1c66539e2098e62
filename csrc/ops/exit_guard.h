// What becomes of calls on other threads when the interpreter ends.
//
// Before Python 3.14, a daemon thread that comes back from C++ after finalisation has begun is ended by the
// interpreter in the middle of C++ frames that may not throw, and the process aborts. So once
// the process is about to exit, a call on any thread but the exiting one doesn't come back at all: it
// sleeps until the process is gone.
#pragma once

namespace numa_moe {

// Called by the thread that runs Python's atexit handlers.
void begin_process_exit();

// In an op, as the last thing: declare one at the top. Its destructor sleeps forever when the process is
// exiting and this isn't the exiting thread.
class ExitGuard {
 public:
  ExitGuard() = default;
  ~ExitGuard();
  ExitGuard(const ExitGuard&) = delete;
  ExitGuard& operator=(const ExitGuard&) = delete;
};

}  // namespace numa_moe
