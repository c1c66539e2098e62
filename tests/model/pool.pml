/* The thread pool's waiting and waking (csrc/pool), for Spin. Run by check.py, which sets the macros below.

   One process per thread. A step is one access to memory that threads share, or one system call; names are
   those of the code. Memory is an array of cells, and each thread has a store buffer of three entries:
   - plain, relaxed and release stores go into the buffer, from where they reach memory at any later moment,
     in any order unless they are to the same cell; a thread reads its own buffered stores;
   - read-modify-writes that release, and system calls, drain the buffer first;
   - relaxed read-modify-writes act on memory and leave the buffer alone. (Their cell's own entries go first.)

   So covered: x86, and of weaker machines that stores are delayed and overtake each other, also across
   a read-modify-write that doesn't release. Where the code needs sequential consistency (a read-modify-write
   of one word, then a load of another, in the caller that helps and in the openers), the mutation lets
   the load come first, as ARM may.
   Not covered: loads that overtake loads or claims, that is, every missing acquire, which is for
   ThreadSanitizer (tests/cpp/pool/MUTATIONS.md). Nor: reads of values that never were in memory at once (no stale
   reads but those of a store buffer), compare_exchange_weak failing for no reason, wakes for no reason (they
   would hide lost ones), the wrap of epochs, exceptions, several callers, the pool's start.
   Spins and yields are looks without effect: a thread may park whatever it last saw. */

#ifndef N
#define N 1              /* groups */
#endif
#ifndef W
#define W 1              /* workers per group */
#endif
#ifndef K
#define K 1              /* dispatches, one after the other */
#endif
#ifndef T
#define T 1              /* most tasks of a group in a phase, up to 3 */
#endif
#ifndef PHASES
#define PHASES 1
#endif
#ifndef POOL_BARRIER
#define POOL_BARRIER 1   /* what ends the phases but the last: 1 a barrier of the pool, 0 of the group */
#endif
#ifndef HELP
#define HELP 0           /* the caller helps group 0 */
#endif
#ifndef CALLER_ALONE
#define CALLER_ALONE 0   /* group 0 has no workers */
#endif
#ifndef SHAPE
#define SHAPE 0          /* 0: T tasks everywhere. 1: phase 0 in the last group, phase 1 in group 0. */
#endif

#if SHAPE == 0
#define NUM_TASKS(phase, group) T
#define TOTAL_TASKS(phase) (N * T)
#else
#define TOTAL_TASKS(phase) T
#define NUM_TASKS(phase, group) \
  (((phase) == 0 && (group) == N - 1) || ((phase) == 1 && (group) == 0) -> T : 0)
#endif
#define ENDS_WITH_POOL_BARRIER(phase) ((phase) + 1 == PHASES || POOL_BARRIER)

#define WORKERS ((N - CALLER_ALONE) * W)
#define THREADS (1 + WORKERS)
#define DISPATCHER 0

/* Memory. Cell 0 is what an empty buffer entry names. */
#define STOP 1
#define JOB 2                                   /* job_ and phases_ */
#define COMPLETION 3
#define GROUPS_LEFT 4
#define CLAIM(group) (5 + (group))
#define DESCRIPTION(group) (5 + N + (group))    /* Group: job, phase, num_tasks */
#define UNFINISHED(group) (5 + 2 * N + (group))
#define OUTPUT(group, index) (5 + 3 * N + (group) * T + (index))  /* what a task writes */
#define CELLS (5 + 3 * N + N * T)
byte memory[CELLS];

/* ClaimWord: epoch, sleepers' bit, unclaimed. */
#define WORD(epoch, tasks) ((epoch) * 8 + (tasks))
#define EPOCH(word) ((word) / 8)
#define SLEEPERS 4
#define HAS_SLEEPERS(word) (((word) & SLEEPERS) != 0)
#define UNCLAIMED(word) ((word) & 3)

/* CompletionSignal. */
#define COMPLETE 0
#define RUNNING 1
#define ASLEEP 2

/* A description also says which job and phase: also what the tasks write. */
#define ABOUT(job, phase) ((job) * PHASES + (phase) + 1)
#define JOB_OF(description) (((description) - 1) / PHASES)
#define PHASE_OF(description) (((description) - 1) % PHASES)

byte buffered_cell[THREADS * 3];
byte buffered_value[THREADS * 3];
bool in_kernel[THREADS];   /* queued by futex_wait */

/* Only for the assertions. */
bool dispatching;          /* between a job's start and the return from run() */
byte current_job;
byte published[N];         /* the phase that the group has open */
byte ran[N];               /* bit i: task i of that phase was run */
byte tasks_run;            /* in this job */
byte tasks_run_in[PHASES];
byte written[N * T];       /* what the tasks wrote last, wherever it is by now */
bool announced[N];         /* a worker announced its sleep since the opening */
bool dispatcher_waits;     /* between the announcement of its sleep and the end of the wait */
byte completion_wakes;     /* in this job */
byte exited;

/* The rest is to be used inside d_step. */
inline flush(thread) {
  memory[buffered_cell[(thread) * 3]] = buffered_value[(thread) * 3];
  remove_first(thread)
}
inline remove_first(thread) {
  buffered_cell[(thread) * 3] = buffered_cell[(thread) * 3 + 1];
  buffered_value[(thread) * 3] = buffered_value[(thread) * 3 + 1];
  remove_second(thread)
}
inline remove_second(thread) {
  buffered_cell[(thread) * 3 + 1] = buffered_cell[(thread) * 3 + 2];
  buffered_value[(thread) * 3 + 1] = buffered_value[(thread) * 3 + 2];
  remove_third(thread)
}
inline remove_third(thread) {
  buffered_cell[(thread) * 3 + 2] = 0;
  buffered_value[(thread) * 3 + 2] = 0
}
inline drain() { flush(me); flush(me); flush(me) }
inline store(cell, value) {
  if :: buffered_cell[me * 3 + 2] != 0 -> flush(me) :: else fi;
  if
  :: buffered_cell[me * 3] == 0 -> buffered_cell[me * 3] = cell; buffered_value[me * 3] = value
  :: else ->
    if
    :: buffered_cell[me * 3 + 1] == 0 -> buffered_cell[me * 3 + 1] = cell; buffered_value[me * 3 + 1] = value
    :: else -> buffered_cell[me * 3 + 2] = cell; buffered_value[me * 3 + 2] = value
    fi
  fi
}
inline load(cell, result) {
  result = memory[cell];
  if :: buffered_cell[me * 3] == cell -> result = buffered_value[me * 3] :: else fi;
  if :: buffered_cell[me * 3 + 1] == cell -> result = buffered_value[me * 3 + 1] :: else fi;
  if :: buffered_cell[me * 3 + 2] == cell -> result = buffered_value[me * 3 + 2] :: else fi
}
/* Before a read-modify-write of the cell. */
inline release(cell) { drain() }
inline relaxed(cell) {
  if
  :: buffered_cell[me * 3] == cell || buffered_cell[me * 3 + 1] == cell ||
       buffered_cell[me * 3 + 2] == cell -> drain()
  :: else
  fi
}

/* Takes a thread's stores to memory. */
proctype StoreBuffer(byte thread) {
end:
  do
  :: d_step { buffered_cell[thread * 3] != 0 -> flush(thread) }
  :: d_step {
      buffered_cell[thread * 3 + 1] != 0 && buffered_cell[thread * 3 + 1] != buffered_cell[thread * 3] ->
      memory[buffered_cell[thread * 3 + 1]] = buffered_value[thread * 3 + 1];
      remove_second(thread)
    }
  :: d_step {
      buffered_cell[thread * 3 + 2] != 0 && buffered_cell[thread * 3 + 2] != buffered_cell[thread * 3] &&
        buffered_cell[thread * 3 + 2] != buffered_cell[thread * 3 + 1] ->
      memory[buffered_cell[thread * 3 + 2]] = buffered_value[thread * 3 + 2];
      remove_third(thread)
    }
  od
}

#define FIRST_WORKER(group) (1 + ((group) - CALLER_ALONE) * W)

/* ClaimWord::wake */
inline wake_group(group) {
  d_step {
#ifndef NO_WORKER_WAKE
    if
    :: CALLER_ALONE && (group) == 0
    :: else ->
      in_kernel[FIRST_WORKER(group)] = false;
#if W > 1
      in_kernel[FIRST_WORKER(group) + 1] = false;
#endif
    fi;
#endif
    drain()
  }
}

/* CompletionSignal::wake */
inline wake_dispatcher() {
  d_step {
    drain();
#ifndef NO_DISPATCHER_WAKE
    in_kernel[DISPATCHER] = false
#endif
  }
}

#ifdef OPENING_WITHOUT_RELEASE
#define open_order(cell, tasks) if :: (tasks) > 0 -> relaxed(cell) :: else -> drain() fi
#else
#define open_order(cell, tasks) drain()
#endif
#ifdef OPENING_KEEPS_SLEEPERS
#define KEPT_SLEEPERS (value & SLEEPERS)
#else
#define KEPT_SLEEPERS 0
#endif
#ifdef EPOCH_NOT_ADVANCED
#define NEXT_EPOCH EPOCH(value)
#else
#define NEXT_EPOCH (EPOCH(value) + 1)
#endif
#ifdef TASKS_NOT_RESET
#define RESET_TASKS(tasks) (EPOCH(value) == 0 -> (tasks) : UNCLAIMED(value))
#else
#define RESET_TASKS(tasks) (tasks)
#endif

/* ClaimWord::open. The epoch's relaxed load is part of the exchange: nobody else changes it. */
inline open_claims(group, tasks, about) {
#ifdef OPENING_BY_STORE
  d_step { load(CLAIM(group), value); sleepers = HAS_SLEEPERS(value) };
  d_step { store(CLAIM(group), WORD(NEXT_EPOCH, tasks)); drain(); opened(group, about) };
#else
  d_step {
    open_order(CLAIM(group), tasks);
    value = memory[CLAIM(group)];
    sleepers = HAS_SLEEPERS(value);
#ifdef EVERY_OPENING_WAKES
    sleepers = true;
#endif
    memory[CLAIM(group)] = WORD(NEXT_EPOCH, RESET_TASKS(tasks)) | KEPT_SLEEPERS;
    assert(!sleepers || announced[group]);   /* a wake only if somebody may sleep */
    opened(group, about)
  };
#endif
#ifdef SLEEPERS_OVERLOOKED
  sleepers = false;
#endif
  if :: sleepers -> wake_group(group) :: else fi;
  sleepers = false
}
inline opened(group, about) {
  published[group] = about;
  ran[group] = 0;
  announced[group] = false;
  value = 0
}

#ifdef RECALL_LOOKS_EARLY
#define early_look_at_completion() d_step { load(COMPLETION, look) }
#define late_look_at_completion() skip
#else
#define early_look_at_completion() skip
#define late_look_at_completion() d_step { load(COMPLETION, look) }
#endif

/* PhaseSequencer::open, CompletionSignal::recall */
inline open(group, ph) {
  d_step {
    load(JOB, value);
    assert(dispatching && value == current_job);
    about = ABOUT(value, ph);
    store(DESCRIPTION(group), about);
    store(UNFINISHED(group), NUM_TASKS(ph, group));
    value = 0
  };
#if HELP
  if :: (group) == 0 -> early_look_at_completion() :: else fi;
#endif
  open_claims(group, NUM_TASKS(ph, group), about);
#if HELP && !defined(NO_RECALL)
  if
  :: (group) == 0 ->
    late_look_at_completion();
    if
    :: look == ASLEEP ->
      d_step {
        relaxed(COMPLETION);
        look = memory[COMPLETION];
        if :: look == ASLEEP -> assert(dispatcher_waits); memory[COMPLETION] = RUNNING :: else fi
      };
      if :: look == ASLEEP -> wake_dispatcher() :: else fi
    :: else
    fi;
    look = 0
  :: else
  fi;
#endif
  about = 0
}

#ifdef REPORT_AND_ARRIVAL_WITHOUT_RELEASE
#define REPORT_WITHOUT_RELEASE
#define arrival_order relaxed
#else
#define arrival_order release
#endif
#ifdef FIRST_GROUP_FOR_ALL
#define LAST_TO_ARRIVE true
#else
#define LAST_TO_ARRIVE (memory[GROUPS_LEFT] == 0)
#endif

/* PhaseSequencer::arrive; `reached` is a phase or NOTHING_TO_DO. */
#define NOTHING_TO_DO 255
inline arrive(ph) {
#ifdef ARRIVAL_BY_STORE
  d_step { drain(); load(GROUPS_LEFT, value) };
  d_step {
    store(GROUPS_LEFT, value - 1);
    if :: value == 1 -> reached = ph :: else -> reached = NOTHING_TO_DO fi;
    value = 0
  }
#else
  d_step {
    arrival_order(GROUPS_LEFT);
    memory[GROUPS_LEFT] = memory[GROUPS_LEFT] - 1;
    if :: LAST_TO_ARRIVE -> reached = ph :: else -> reached = NOTHING_TO_DO fi
  }
#endif
}

/* PhaseSequencer::advance. `ph` is a variable. */
inline advance(group, ph) {
  do
  :: NUM_TASKS(ph, group) > 0 -> open(group, ph); reached = NOTHING_TO_DO; break
  :: NUM_TASKS(ph, group) == 0 && ENDS_WITH_POOL_BARRIER(ph) -> arrive(ph); break
  :: else -> ph++
  od
}

/* PhaseSequencer::complete, CompletionSignal::set_complete */
inline complete() {
#ifdef COMPLETION_BY_STORE
  d_step { load(COMPLETION, look) };
  d_step { drain(); store(COMPLETION, COMPLETE) };
#else
  d_step {
    drain();
    look = memory[COMPLETION];
#ifdef EVERY_COMPLETION_WAKES
    look = ASLEEP;
#endif
    memory[COMPLETION] = COMPLETE;
    if
    :: look == ASLEEP -> completion_wakes++; assert(dispatcher_waits && completion_wakes == 1)
    :: else
    fi
  };
#endif
  if :: look == ASLEEP -> wake_dispatcher() :: else fi;
  look = 0
}

/* PhaseSequencer::open_all */
inline open_all(first) {
  ahead = first;
  do
  :: ahead == PHASES -> complete(); break
  :: else ->
    d_step {
#ifdef COUNTDOWN_NOT_RESET
      if :: ahead == 0 -> store(GROUPS_LEFT, N) :: else fi;
#else
      store(GROUPS_LEFT, N);
#endif
      group = 0
    };
    do
    :: group < N -> phase = ahead; advance(group, phase); group++
    :: else -> break
    od;
    if :: reached == NOTHING_TO_DO -> break :: else -> ahead = reached + 1 fi
  od;
  skip; d_step { ahead = 0; phase = 0; group = 0; reached = 0 }
}

#ifdef STALE_CLAIM
#define CLAIM_SUCCEEDS true
#else
#define CLAIM_SUCCEEDS (memory[CLAIM(mine)] == seen)
#endif
#ifdef REPORT_WITHOUT_RELEASE
#define report_order relaxed
#else
#define report_order release
#endif

/* PhaseSequencer::run_tasks */
inline run_tasks() {
  do
  :: finished = 0;
    do
    :: d_step { load(CLAIM(mine), seen) };
      if :: UNCLAIMED(seen) == 0 -> break :: else fi;
#ifdef CLAIM_BY_STORE
      d_step { store(CLAIM(mine), seen - 1); claimed = true };
#else
      d_step {
        relaxed(CLAIM(mine));
        claimed = CLAIM_SUCCEEDS;
        if :: claimed -> memory[CLAIM(mine)] = memory[CLAIM(mine)] - 1 :: else fi
      };
#endif
      if :: claimed -> run_task(); finished++ :: else fi;
      claimed = false
    od;
    if :: finished == 0 -> break :: else fi;
    d_step { load(DESCRIPTION(mine), about); phase = PHASE_OF(about); about = 0 };
    d_step {
      report_order(UNFINISHED(mine));
      memory[UNFINISHED(mine)] = memory[UNFINISHED(mine)] - finished;
      claimed = memory[UNFINISHED(mine)] == 0   /* all are reported */
    };
    if :: !claimed -> break :: else -> claimed = false fi;
    /* PhaseSequencer::finish_group_phase */
    if
    :: ENDS_WITH_POOL_BARRIER(phase) -> arrive(phase)
    :: else -> phase++; group = mine; advance(group, phase)
    fi;
    if :: reached != NOTHING_TO_DO -> open_all(reached + 1) :: else fi;
    d_step { phase = 0; group = 0; reached = 0 }
  od;
  skip; d_step { seen = 0; finished = 0; phase = 0; claimed = false }
}

/* The task, with what the job's author may rely on. */
inline run_task() {
  d_step {
    load(DESCRIPTION(mine), about);
    assert(dispatching);                            /* not after run() has returned */
    assert(about == published[mine]);               /* the phase that the group has open */
    assert(JOB_OF(about) == current_job);
    index = NUM_TASKS(PHASE_OF(about), mine) - UNCLAIMED(seen);
    assert((ran[mine] & (1 << index)) == 0);        /* once */
    ran[mine] = ran[mine] | (1 << index);
    look = 0;
    do
    :: look < N * T ->
      if
      :: written[look] != 0 && written[look] < about && (POOL_BARRIER || look / T == mine) ->
        /* What was written in the phases before is visible. */
        load(OUTPUT(0, look), value);
        assert(value == written[look])
      :: else
      fi;
      look++
    :: else -> break
    od;
    if
    :: POOL_BARRIER && PHASE_OF(about) > 0 ->
      assert(tasks_run_in[PHASE_OF(about) - 1] == TOTAL_TASKS(PHASE_OF(about) - 1))
    :: else
    fi;
    store(OUTPUT(mine, index), about);
    written[mine * T + index] = about;
    tasks_run++;
    tasks_run_in[PHASE_OF(about)]++;
    about = 0; look = 0; value = 0; index = 0
  }
}
#define THREAD_VARIABLES \
  byte seen, value, look, about, index, finished, phase, ahead, group, reached; \
  bool sleepers, claimed

/* worker.cpp */
proctype Worker(byte me; byte mine) {
  THREAD_VARIABLES;
  do
  :: /* Worker::wait_for_tasks */
    d_step { load(CLAIM(mine), seen) };
    if
    :: UNCLAIMED(seen) > 0 -> seen = 0; run_tasks()
    :: else ->
      d_step { load(STOP, value) };
      if :: value -> break :: else fi;
      /* ClaimWord::announce_sleeper */
#ifdef ANNOUNCEMENT_BY_STORE
      d_step { store(CLAIM(mine), seen | SLEEPERS); announced[mine] = true; claimed = true };
#elif defined(NO_ANNOUNCEMENT)
      claimed = true;
#else
      d_step {
        if
        :: HAS_SLEEPERS(seen) -> claimed = true
        :: else ->
          relaxed(CLAIM(mine));
#ifdef ANNOUNCEMENT_TO_ANY_EPOCH
          memory[CLAIM(mine)] = memory[CLAIM(mine)] | SLEEPERS; announced[mine] = true; claimed = true
#else
          claimed = memory[CLAIM(mine)] == seen;
          if :: claimed -> memory[CLAIM(mine)] = seen | SLEEPERS; announced[mine] = true :: else fi
#endif
        fi
      };
#endif
      if
      :: claimed ->
        claimed = false;
        d_step { /* ClaimWord::sleep */
          drain();
#ifdef SLEEP_ON_ANY_EPOCH
          in_kernel[me] = true;
#else
          in_kernel[me] = EPOCH(memory[CLAIM(mine)]) == EPOCH(seen);
#endif
          seen = 0
        };
        !in_kernel[me]
      :: else -> seen = 0
      fi
    fi
  od;
  skip; d_step { drain(); exited++ }   /* the end of a thread, for the one that joins it */
}

/* The condition of wait_until and park_until. */
#if HELP
#define look_at_tasks() \
  d_step { if :: !holds -> load(CLAIM(0), value); holds = UNCLAIMED(value) > 0; value = 0 :: else fi }
#else
#define look_at_tasks() skip
#endif
#define look_at_completion() d_step { load(COMPLETION, value); holds = value == COMPLETE; value = 0 }

#ifdef ARM_MISSING
#define arm() skip
#else
#define arm() store(COMPLETION, RUNNING)
#endif

/* ThreadPool::Implementation::dispatch */
inline dispatch() {
  d_step {
    dispatching = true; tasks_run = 0; completion_wakes = 0;
    index = 0;
    do :: index < PHASES -> tasks_run_in[index] = 0; index++ :: else -> break od;
    index = 0;
    store(JOB, current_job);
    arm()
  };
  open_all(0);
  do
  :: /* A look that succeeds, at any time of the spins and yields or before. */
#if HELP
    run_tasks();
#endif
    look_at_completion();
    if :: holds -> break :: else fi;
    if :: look_at_completion(); look_at_tasks() :: skip fi;
    if :: holds -> skip :: else -> park() fi;
    holds = false;
#ifdef WAKE_TRUSTED
    if :: trusted -> trusted = false; break :: else fi
#endif
  od;
  skip; d_step {
    holds = false;
    assert(tasks_run == PHASES * TOTAL_TASKS(0));   /* all of them ran */
    do
    :: index < N * T ->
      load(OUTPUT(0, index), value);
      assert(value == written[index]);                /* and what they wrote is visible */
      index++
    :: else -> break
    od;
    index = 0; value = 0;
    dispatching = false
  }
}

/* park_until */
inline park() {
  do
  ::
#ifdef CALLER_LOOKS_EARLY
    holds = false;
    look_at_tasks();
#endif
    /* CompletionSignal::announce_sleep */
#ifdef SLEEP_ANNOUNCED_BY_STORE
    d_step { load(COMPLETION, value) };
    if :: value == COMPLETE -> value = 0; break :: else -> value = 0 fi;
    d_step { store(COMPLETION, ASLEEP); dispatcher_waits = true };
#else
    d_step {
      drain();
      value = memory[COMPLETION];
      if :: value != COMPLETE -> memory[COMPLETION] = ASLEEP; dispatcher_waits = true :: else fi
    };
    if :: value == COMPLETE -> value = 0; break :: else -> value = 0 fi;
#endif
    skip;
#ifdef CALLER_LOOKS_EARLY
    if :: !holds -> look_at_completion() :: else fi;
#elif !defined(NO_SECOND_LOOK)
    look_at_completion(); look_at_tasks();
#endif
    if :: holds -> break :: else fi;
    d_step { /* CompletionSignal::sleep */
      drain();
#ifdef DISPATCHER_SLEEPS_ANYWAY
      in_kernel[DISPATCHER] = true
#else
      in_kernel[DISPATCHER] = memory[COMPLETION] == ASLEEP
#endif
    };
    !in_kernel[DISPATCHER];
#ifdef WAKE_TRUSTED
    trusted = true; break;
#endif
    look_at_completion(); look_at_tasks();
    if :: holds -> break :: else fi
  od;
  skip; d_step { /* CompletionSignal::retract_sleep */
    relaxed(COMPLETION);
#ifdef PARK_FLAG_RESET_OVER_COMPLETION
    memory[COMPLETION] = RUNNING;
#elif !defined(PARK_FLAG_NOT_RESET)
    if :: memory[COMPLETION] == ASLEEP -> memory[COMPLETION] = RUNNING :: else fi;
#endif
    holds = false;
    dispatcher_waits = false
  }
}

#ifdef STOP_AFTER_ROUSING
#define order_to_stop() skip
#define late_order_to_stop() d_step { store(STOP, 1) }
#else
#define order_to_stop() d_step { store(STOP, 1) }
#define late_order_to_stop() skip
#endif

proctype Dispatcher(byte me; byte mine) {
  THREAD_VARIABLES;
  bool holds, trusted;
  do
  :: current_job < K -> dispatch(); current_job++
  :: else -> break
  od;
  /* ~Implementation */
  skip; order_to_stop();
  do
  :: group < N ->
#ifdef ROUSING_WITHOUT_OPENING
    d_step { load(CLAIM(group), value); sleepers = HAS_SLEEPERS(value); value = 0 };
    if :: sleepers -> wake_group(group) :: else fi; sleepers = false;
#else
    open_claims(group, 0, 0);
#endif
    group++
  :: else -> break
  od;
  skip; late_order_to_stop();
  exited == WORKERS;
}

init {
  atomic {
    byte thread, serves, one;
    run StoreBuffer(DISPATCHER);
    run Dispatcher(DISPATCHER, 0);
    thread = 1;
    serves = CALLER_ALONE;
    do
    :: serves < N ->
      one = 0;
      do
      :: one < W -> run StoreBuffer(thread); run Worker(thread, serves); thread++; one++
      :: else -> break
      od;
      serves++
    :: else -> break
    od;
    thread = 0; serves = 0; one = 0
  }
}
