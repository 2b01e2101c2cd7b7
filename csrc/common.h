// What every source here shares: types, the thread pool, and which instruction set this machine runs.
//
// Sources are torch-free C++17 behind extern "C", built into one library at first use (foldspec/kernels/build.py) and
// called through ctypes. They must give a row the same bits whatever the other rows and however many threads: build
// without -ffast-math and with -ffp-contract=off, so that only what is written as a fused multiply-add is one.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace foldspec {

struct bf16 {
  uint16_t bits;
};

// ---- instruction sets: each source is compiled once for every one of them (each_isa.h) -----------------------------

enum Isa { PORTABLE = 0, AVX2 = 1, AVX512 = 2, NEON = 3 };

inline bool runs_here(int isa) {
  switch (isa) {
    case PORTABLE: return true;
#if defined(__x86_64__)
    case AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case AVX512: return __builtin_cpu_supports("avx512f") && runs_here(AVX2);
#elif defined(__aarch64__)
    case NEON: return true;
#endif
    default: return false;
  }
}

// ---- threads -------------------------------------------------------------------------------------------------------

// Runs the parts of a job on the calling thread and on sleeping helpers. Parts are handed out one by one, so that a
// helper that another process has pushed off its core holds up one part only. No OpenMP: torch brings a runtime of its
// own, and two of them on the same cores spin against each other.
class Pool {
 public:
  static Pool& here() {
    static std::mutex guard;
    static Pool* pool = nullptr;
    std::lock_guard<std::mutex> lock(guard);
    // never destroyed, since helpers may outlive main; after a fork they are gone, and a child starts its own
    if (pool == nullptr || pool->owner_ != getpid()) pool = new Pool;
    return *pool;
  }

  // part(i) for every i in 0 .. parts-1, on at most `threads` threads.
  void run(int64_t parts, int threads, const std::function<void(int64_t)>& part) {
    if (threads <= 1 || parts <= 1) {
      for (int64_t i = 0; i < parts; i++) part(i);
      return;
    }
    std::lock_guard<std::mutex> one_job(jobs_);
    const int helpers = static_cast<int>(std::min<int64_t>(threads, parts)) - 1;
    {
      std::lock_guard<std::mutex> lock(state_);
      try {
        for (; started_ < helpers; started_++) std::thread(&Pool::help, this, started_).detach();
      } catch (const std::system_error&) {  // no more threads to be had: those there are do the work
      }
      part_ = &part;
      parts_ = parts;
      wanted_ = helpers;
      next_.store(0);
      job_.fetch_add(1);
    }
    wake_.notify_all();
    work(part, parts);
    std::unique_lock<std::mutex> lock(state_);
    part_ = nullptr;  // a helper that wakes up later finds nothing to do
    idle_.wait(lock, [&] { return busy_ == 0; });
  }

 private:
  void work(const std::function<void(int64_t)>& part, int64_t parts) {
    for (int64_t i; (i = next_.fetch_add(1)) < parts;) part(i);
  }

  void help(int index) {
    uint64_t seen = 0;
    for (;;) {
      // products follow one another within microseconds: look a moment before going to sleep
      for (int i = 0; i < 2000 && job_.load(std::memory_order_relaxed) == seen; i++) pause();
      std::unique_lock<std::mutex> lock(state_);
      wake_.wait(lock, [&] { return job_.load() != seen; });
      seen = job_.load();
      if (part_ == nullptr || index >= wanted_) continue;
      const std::function<void(int64_t)>& part = *part_;
      const int64_t parts = parts_;
      busy_++;
      lock.unlock();
      work(part, parts);
      lock.lock();
      if (--busy_ == 0) idle_.notify_all();
    }
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const pid_t owner_ = getpid();
  std::mutex jobs_, state_;
  std::condition_variable wake_, idle_;
  const std::function<void(int64_t)>* part_ = nullptr;
  int64_t parts_ = 0;
  int wanted_ = 0, busy_ = 0, started_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<uint64_t> job_{0};
};

}  // namespace foldspec
