// One arm's turn: so many dispatches in a row, what each took, and what they cost.
#pragma once

#include <string>

#include "arm.h"
#include "intruder.h"

struct VisitPlan {
  int64_t num_shards = 0;
  Work work;
  int64_t uncounted = 0;   // dispatches before
  int64_t dispatches = 0;  // dispatches that are measured
  const Intruder* intruder = nullptr;  // who else computes, if anyone
};

// Prints a line of JSON: the members that are given, wall_us of every dispatch, user_us and system_us of the
// process per dispatch, the pool's counters per dispatch, and intruder_us, the CPU time of the intruder.
void print_visit(Arm& arm, const VisitPlan& plan, const std::string& members);

// Long enough for the threads of every pool to have gone to sleep.
void let_others_sleep();
