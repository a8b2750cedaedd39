// The threads of a step. They go through its phases together: the items of a phase are given out one
// by one, and a phase ends when all its items are done, by any thread. So a thread that the system
// has suspended delays the others only while it has an item, and a thread that wakes up late joins
// the phase that the others have reached.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace disagg {

// Rounds of polling before a thread sleeps: about 30 us inside a step, where the others are nearly
// done, and the same between two steps.
constexpr int SPINS = 1000;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

inline void sleep_while(std::atomic<uint32_t>& value, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT_PRIVATE, seen, nullptr,
          nullptr, 0);
}

inline void wake(std::atomic<uint32_t>& value, int most) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE_PRIVATE, most, nullptr,
          nullptr, 0);
}

struct alignas(64) Phase {
  std::atomic<uint32_t> next{0};
  alignas(64) std::atomic<uint32_t> done{0};
  std::atomic<uint32_t> has_sleepers{0};
};

// One thread's way through the phases of a step.
class Member {
 public:
  Member(Phase* phases, int id, int num_threads)
      : id(id), num_threads(num_threads), phases_(phases) {}

  // Take part in the next phase. `work(item)` is called for some of the items 0 .. num_items - 1.
  template <class Work>
  void phase(uint32_t num_items, Work&& work) {
    Phase& phase = *phases_++;
    uint32_t item;
    while ((item = phase.next.fetch_add(1, std::memory_order_relaxed)) < num_items) {
      work(static_cast<int>(item));
      if (phase.done.fetch_add(1) + 1 == num_items && phase.has_sleepers.load())
        wake(phase.done, INT_MAX);
    }
    for (int i = 0; i < SPINS; ++i) {
      if (phase.done.load(std::memory_order_acquire) == num_items) return;
      relax();
    }
    phase.has_sleepers.store(1);
    for (uint32_t done; (done = phase.done.load()) != num_items;) sleep_while(phase.done, done);
  }

  const int id;
  const int num_threads;

 private:
  Phase* phases_;
};

// Runs programs on the calling thread and on its own threads, which sleep between programs.
class Team {
 public:
  explicit Team(int num_phases)
      : num_phases_(num_phases), phases_(new (std::nothrow) Phase[num_phases]) {}

  ~Team() {
    is_ending_.store(true);
    begun_.fetch_add(1);
    wake(begun_, INT_MAX);
    for (int i = 0; i < num_started_; ++i) pthread_join(threads_[i], nullptr);
    free(threads_);
    delete[] phases_;
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  bool is_usable() const { return phases_ != nullptr; }

  // The number of threads that a step may have, including the caller's; fewer if the system has no
  // more.
  int reserve(int num_threads) {
    while (num_started_ + 1 < num_threads) {
      auto* grown = static_cast<pthread_t*>(
          realloc(threads_, (num_started_ + 1) * sizeof(pthread_t)));
      if (grown == nullptr) break;
      threads_ = grown;
      auto* start = new (std::nothrow) Start{this, num_started_ + 1};
      if (start == nullptr) break;
      if (pthread_create(&threads_[num_started_], nullptr, &Team::begin, start) != 0) {
        delete start;
        break;
      }
      ++num_started_;
    }
    return num_threads < num_started_ + 1 ? num_threads : num_started_ + 1;
  }

  // Waits until no thread is in the step before, so that its data can be changed.
  void clear() {
    for (int i = 0; num_inside_.load() != 0; ++i)
      if (i < SPINS)
        relax();
      else
        sched_yield();
    for (int i = 0; i < num_phases_; ++i) {
      phases_[i].next.store(0, std::memory_order_relaxed);
      phases_[i].done.store(0, std::memory_order_relaxed);
      phases_[i].has_sleepers.store(0, std::memory_order_relaxed);
    }
  }

  // Runs `step.program` on so many threads, at most as many as `reserve` returned. Call `clear` first.
  // Late threads may be in the program until the next `clear`.
  template <class Step>
  void run(int num_threads, Step& step) {
    step_ = &step;
    program_ = [](void* its_step, Member& member) { static_cast<Step*>(its_step)->program(member); };
    num_threads_.store(num_threads);
    is_open_.store(true);
    begun_.fetch_add(1);
    if (num_threads > 1 && num_sleeping_.load() > 0) wake(begun_, INT_MAX);
    Member member(phases_, 0, num_threads);
    program_(step_, member);
    is_open_.store(false);
  }

 private:
  struct Start {
    Team* team;
    int id;
  };

  static void* begin(void* start) {
    Start own = *static_cast<Start*>(start);
    delete static_cast<Start*>(start);
    own.team->serve(own.id);
    return nullptr;
  }

  void serve(int id) {
    uint32_t seen = 0;
    while (true) {
      wait_for_step(seen);
      seen = begun_.load();
      if (is_ending_.load()) return;
      num_inside_.fetch_add(1);
      // Read after it is counted: a step that is open now stays as it is until it has left.
      if (is_open_.load() && id < num_threads_.load()) {
        Member member(phases_, id, num_threads_.load());
        program_(step_, member);
      }
      num_inside_.fetch_sub(1);
    }
  }

  void wait_for_step(uint32_t seen) {
    for (int i = 0; i < SPINS; ++i) {
      if (begun_.load(std::memory_order_acquire) != seen) return;
      relax();
    }
    num_sleeping_.fetch_add(1);
    while (begun_.load() == seen) sleep_while(begun_, seen);
    num_sleeping_.fetch_sub(1);
  }

  const int num_phases_;
  Phase* const phases_;
  void* step_ = nullptr;
  void (*program_)(void* step, Member& member) = nullptr;
  pthread_t* threads_ = nullptr;
  int num_started_ = 0;
  std::atomic<int> num_threads_{1};
  std::atomic<bool> is_ending_{false};
  alignas(64) std::atomic<uint32_t> begun_{0};
  std::atomic<int> num_sleeping_{0};
  alignas(64) std::atomic<int> num_inside_{0};
  std::atomic<bool> is_open_{false};
};

}  // namespace disagg
