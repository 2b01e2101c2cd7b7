// The noise of foldspec/noise.py, bit for bit: Philox4x32-10 (Salmon et al., 2011) as a function of what a number is for.
#pragma once

#include <cstdint>

namespace foldspec {

enum Purpose { TARGET = 1, ACCEPT = 2, RESIDUAL = 3 };

struct Words {
  uint32_t word[4];
};

__device__ inline Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u, b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Words{{c0, c1, c2, c3}};
}

// In [0, 1), of 53 bits; never 1.
__device__ inline double uniform(int64_t position, int purpose, const int64_t* key) {
  const Words w = philox(
      0, static_cast<uint32_t>(position), 0, purpose, static_cast<uint32_t>(key[0]), static_cast<uint32_t>(key[1]));
  return static_cast<double>((static_cast<uint64_t>(w.word[0]) << 32 | w.word[1]) >> 11) * 0x1p-53;
}

// The noise of two ids, 2 pair and 2 pair + 1: -log(-log u), with u of 52 bits in the open interval (0, 1).
__device__ inline void gumbel(int64_t pair, int64_t position, int purpose, const int64_t* key, double* noise) {
  const Words w = philox(
      static_cast<uint32_t>(pair), static_cast<uint32_t>(position), 0, purpose, static_cast<uint32_t>(key[0]),
      static_cast<uint32_t>(key[1]));
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    const uint64_t bits = static_cast<uint64_t>(w.word[2 * odd]) << 20 | w.word[2 * odd + 1] >> 12;
    noise[odd] = -log(-log((static_cast<double>(bits) + 0.5) * 0x1p-52));
  }
}

}  // namespace foldspec
