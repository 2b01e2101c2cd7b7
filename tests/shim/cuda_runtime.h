// Runs CUDA sources on a CPU, unchanged: found before CUDA's own header of this name. One fiber a thread, one block at a
// time; __syncthreads and the warp exchanges are where a thread gives way to others. With `shim_order` the threads run in
// another random order each time, which shows what a missing barrier spoils; a barrier that some threads of a block do not
// reach ends the process. Not here: asynchronous copies, atomics, and what the memory model lets a GPU do besides.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static  // of one block, since there is one at a time
#define LAUNCH(kernel, grid, stream, ...) shim::launch(grid, foldspec::THREADS, [&] { kernel(__VA_ARGS__); })

using std::isfinite;
using std::max;
using std::min;

typedef void* cudaStream_t;
typedef int cudaError_t;
inline cudaError_t cudaGetLastError() { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace shim {

enum Wait { RUNS, AT_BLOCK, AT_WARP, DONE };

constexpr int WARP = 32, STACK = 64 << 10;

struct Fiber {
  std::vector<char> stack = std::vector<char>(STACK);
  Wait wait = RUNS;
#if defined(__x86_64__)
  void* at = nullptr;
#else
  ucontext_t at;
#endif
};

inline std::vector<Fiber> fibers;
inline std::function<void()> body;
inline dim3 block_index, grid_size;
inline int now;  // the thread that runs
inline unsigned order_seed;
inline uint64_t exchanged[1024];

#if defined(__x86_64__)
inline void* scheduler;

// ucontext asks the kernel for the signal mask at each switch, which takes twenty times as long.
extern "C" void foldspec_shim_switch(void** save, void* to);
asm(R"(
.text
.weak foldspec_shim_switch
.type foldspec_shim_switch,@function
foldspec_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size foldspec_shim_switch,.-foldspec_shim_switch
)");

inline void leave() { foldspec_shim_switch(&fibers[now].at, scheduler); }
inline void enter(Fiber& fiber) { foldspec_shim_switch(&scheduler, fiber.at); }
#else
inline ucontext_t scheduler;

inline void leave() { swapcontext(&fibers[now].at, &scheduler); }
inline void enter(Fiber& fiber) { swapcontext(&scheduler, &fiber.at); }
#endif

inline void give_way(Wait wait) {
  fibers[now].wait = wait;
  leave();
}

inline void start() {
  body();
  give_way(DONE);
}

inline void prepare(Fiber& fiber) {
  fiber.wait = RUNS;
#if defined(__x86_64__)
  auto** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(fiber.stack.data() + STACK) & ~uintptr_t{63});
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(start);
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber.at = top;
#else
  getcontext(&fiber.at);
  fiber.at.uc_stack.ss_sp = fiber.stack.data();
  fiber.at.uc_stack.ss_size = STACK;
  fiber.at.uc_link = nullptr;
  makecontext(&fiber.at, start, 0);
#endif
}

// Lets the threads from `begin` on go if all that are not done wait alike.
inline bool release(int begin, int end, Wait wait) {
  bool any = false;
  for (int t = begin; t < end; t++) {
    if (fibers[t].wait == DONE) continue;
    if (fibers[t].wait != wait) return false;
    any = true;
  }
  for (int t = begin; t < end; t++)
    if (fibers[t].wait == wait) fibers[t].wait = RUNS;
  return any;
}

inline void run_block(int threads) {
  for (int t = 0; t < threads; t++) prepare(fibers[t]);
  std::vector<int> order(threads);
  for (int t = 0; t < threads; t++) order[t] = t;
  for (;;) {
    if (order_seed)
      for (int i = threads - 1; i > 0; i--) {
        order_seed = order_seed * 1664525u + 1013904223u;
        std::swap(order[i], order[(order_seed >> 8) % (i + 1)]);
      }
    for (int t : order)
      if (fibers[t].wait == RUNS) enter(fibers[now = t]);
    bool moved = false;
    for (int w = 0; w < threads; w += WARP) moved |= release(w, min(threads, w + WARP), AT_WARP);
    if (moved || release(0, threads, AT_BLOCK)) continue;
    for (const Fiber& fiber : fibers)
      if (fiber.wait != DONE) {
        std::fputs("shim: a barrier that not all threads of the block reach\n", stderr);
        std::abort();
      }
    return;
  }
}

template <class F>
void launch(dim3 grid, int threads, F kernel) {
  grid_size = grid;
  body = kernel;
  fibers.resize(threads);
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = 0; x < grid.x; x++) {
      block_index = dim3(x, y);
      run_block(threads);
    }
}

// What lane `from` of this thread's warp holds.
template <class X>
X exchange(X mine, int from) {
  static_assert(sizeof(X) <= sizeof(uint64_t));
  std::memcpy(&exchanged[now], &mine, sizeof(X));
  give_way(AT_WARP);
  X theirs;
  std::memcpy(&theirs, &exchanged[now / WARP * WARP + from], sizeof(X));
  give_way(AT_WARP);
  return theirs;
}

}  // namespace shim

extern "C" __attribute__((visibility("default"))) void shim_order(unsigned seed) { shim::order_seed = seed; }

#define threadIdx (dim3(shim::now))
#define blockIdx (shim::block_index)
#define gridDim (shim::grid_size)

inline void __syncthreads() { shim::give_way(shim::AT_BLOCK); }

template <class X>
X __shfl_xor_sync(unsigned, X mine, int apart) {
  return shim::exchange(mine, shim::now % shim::WARP ^ apart);
}
