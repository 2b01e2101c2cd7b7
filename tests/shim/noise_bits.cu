// The words of noise.cuh for many counters, as a kernel makes them.
#include <cuda_runtime.h>

#include "noise.cuh"

namespace foldspec {

constexpr int THREADS = 256;

// counters [n, 6]: pair, position, anchor, step and purpose, low and high word of the key; words [n, 4].
__global__ void noise_bits(const int64_t* counters, int64_t n, int64_t* words) {
  for (int64_t i = blockIdx.x * THREADS + threadIdx.x; i < n; i += static_cast<int64_t>(gridDim.x) * THREADS) {
    const int64_t* c = counters + 6 * i;
    const Words w = philox(c[0], c[1], c[2], c[3], c[4], c[5]);
    for (int k = 0; k < 4; k++) words[4 * i + k] = w.word[k];
  }
}

}  // namespace foldspec

extern "C" __attribute__((visibility("default"))) void foldspec_noise_bits(
    const int64_t* counters, int64_t n, int64_t* words) {
  LAUNCH(foldspec::noise_bits, dim3(8), nullptr, counters, n, words);
}
