// Another process that computes on one CPU for a share of the time.
#pragma once

#include <sys/types.h>

// Starts stopped.
class Intruder {
 public:
  // busy_percent: 1 to 100, of periods of 10 ms.
  Intruder(int cpu, int busy_percent);
  ~Intruder();
  Intruder(const Intruder&) = delete;
  Intruder& operator=(const Intruder&) = delete;

  void resume() const;
  void stop() const;
  double cpu_us() const;  // CPU time since its start

 private:
  pid_t process_;
};
