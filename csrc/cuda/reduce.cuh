// Reductions over a block of THREADS threads, each thread of which gets the result.
#pragma once

#include <cmath>
#include <cstdint>

namespace foldspec {

constexpr int THREADS = 256, WARP = 32, WARPS = THREADS / WARP;
constexpr unsigned ALL = 0xffffffffu;

// A value and the id that it belongs to. Of equal ones the lower id is ahead, and NaN is ahead of everything, as in
// torch's argmax.
template <class F>
struct Best {
  F value;
  int32_t id;
};

template <class F>
__device__ inline Best<F> nothing() {
  return Best<F>{static_cast<F>(-INFINITY), 0x7fffffff};
}

template <class F>
__device__ inline Best<F> better(Best<F> a, Best<F> b) {
  if (a.value == b.value) return a.id < b.id ? a : b;
  const bool no_a = a.value != a.value, no_b = b.value != b.value;
  if (no_a || no_b) return no_a && (!no_b || a.id < b.id) ? a : b;
  return a.value > b.value ? a : b;
}

template <class F>
__device__ inline Best<F> warp_best(Best<F> mine) {
#pragma unroll
  for (int apart = WARP / 2; apart; apart >>= 1) {
    const Best<F> other{__shfl_xor_sync(ALL, mine.value, apart), __shfl_xor_sync(ALL, mine.id, apart)};
    mine = better(mine, other);
  }
  return mine;
}

__device__ inline double warp_sum(double x) {
#pragma unroll
  for (int apart = WARP / 2; apart; apart >>= 1) x += __shfl_xor_sync(ALL, x, apart);
  return x;
}

template <class F>
__device__ inline Best<F> block_best(Best<F> mine) {
  __shared__ Best<F> of_warp[WARPS];
  const int lane = threadIdx.x % WARP;
  mine = warp_best(mine);
  if (lane == 0) of_warp[threadIdx.x / WARP] = mine;
  __syncthreads();
  mine = warp_best(lane < WARPS ? of_warp[lane] : nothing<F>());
  __syncthreads();  // the next reduction writes there again
  return mine;
}

__device__ inline double block_sum(double x) {
  __shared__ double of_warp[WARPS];
  const int lane = threadIdx.x % WARP;
  x = warp_sum(x);
  if (lane == 0) of_warp[threadIdx.x / WARP] = x;
  __syncthreads();
  x = warp_sum(lane < WARPS ? of_warp[lane] : 0.0);
  __syncthreads();
  return x;
}

}  // namespace foldspec
