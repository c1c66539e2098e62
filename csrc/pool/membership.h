// Which pools the calling thread runs tasks for, and as which thread: how a pool recognises a call from
// inside one of its own tasks.
#pragma once

namespace numa_moe {

// On the stack of a worker for all its life, of a caller that helps while it is in run(). They nest when a
// task of one pool calls another pool.
class Membership {
 public:
  Membership(const void* pool, int thread) : pool_(pool), thread_(thread), outer_(innermost_) {
    innermost_ = this;
  }
  ~Membership() { innermost_ = outer_; }
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  // The calling thread's number in the pool, or -1.
  static int thread_in(const void* pool) {
    for (const Membership* membership = innermost_; membership != nullptr; membership = membership->outer_) {
      if (membership->pool_ == pool) return membership->thread_;
    }
    return -1;
  }

 private:
  static inline thread_local const Membership* innermost_ = nullptr;

  const void* const pool_;
  const int thread_;
  const Membership* const outer_;
};

}  // namespace numa_moe
