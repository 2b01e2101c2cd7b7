// y[m][n] = sum_k x[m][k] * w[n][k] + bias[n], fp32 arithmetic over weights held as fp32 or bf16.
//
// Every element has one accumulator vector that walks k upwards in steps of W, a zero-padded last step, and one fixed
// tree over its lanes: the same operations whatever the number of rows, the tile it falls into, and the thread. Weights
// stay as in the checkpoint, [N, K] row-major: a tile reads a few whole rows, each once and with prefetch at the speed
// of memory (SmolLM2's 538 MB in 17 ms on a Zen 5 core), so that a packed copy could win nothing.
#ifndef LANES

#include "common.h"
#define SOURCE "linear.cpp"
#include "each_isa.h"

using namespace foldspec;

// x [M, K] and y [M, N] packed fp32; w [N, K] packed, bf16 if `half`; bias [N] fp32 or null.
EXPORT void foldspec_linear(
    const float* x, const void* w, const float* bias, float* y, int64_t M, int64_t N, int64_t K, int half, int threads,
    int isa) {
  if (half) CALL(isa, linear(x, static_cast<const bf16*>(w), bias, y, M, N, K, threads));
  else CALL(isa, linear(x, static_cast<const float*>(w), bias, y, M, N, K, threads));
}

EXPORT int foldspec_runs_here(int isa) { return runs_here(isa); }

#else

namespace foldspec {
namespace LANES {

// R rows of x against C rows of w; `ahead` is how far on in w lies what to ask memory for meanwhile, or 0.
template <int R, int C, class T>
static void tile(const float* x, const T* w, const float* bias, float* y, int64_t K, int64_t ldy, int64_t ahead) {
  V sum[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sum[r][c] = zero();
  int64_t k = 0;
  for (; k + W <= K; k += W) {
    V b[C];
    for (int c = 0; c < C; c++) {
      b[c] = load(w + c * K + k);
      if (ahead) __builtin_prefetch(w + c * K + k + ahead);
    }
    for (int r = 0; r < R; r++) {
      const V a = load(x + r * K + k);
      for (int c = 0; c < C; c++) sum[r][c] = fma(a, b[c], sum[r][c]);
    }
  }
  if (k < K) {
    const int rest = static_cast<int>(K - k);
    V b[C];
    for (int c = 0; c < C; c++) b[c] = load(w + c * K + k, rest);
    for (int r = 0; r < R; r++) {
      const V a = load(x + r * K + k, rest);
      for (int c = 0; c < C; c++) sum[r][c] = fma(a, b[c], sum[r][c]);
    }
  }
  float flat[(R * C + 3) / 4 * 4];
  for (int i = 0; i < R * C; i += 4) {
    const int last = R * C - 1;
    const auto at = [&](int j) { return sum[std::min(j, last) / C][std::min(j, last) % C]; };
    sums(at(i), at(i + 1), at(i + 2), at(i + 3), flat + i);
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) y[r * ldy + c] = bias ? flat[r * C + c] + bias[c] : flat[r * C + c];
}

// R rows of x against `count` rows of w.
template <int R, class T>
static void strip(
    const float* x, const T* w, const float* bias, float* y, int64_t K, int64_t ldy, int64_t count,
    bool fresh) {
  // as many columns as fill the registers, so that enough sums are under way to hide the latency of each
  constexpr int wide = ROWS == 8 ? (R == 2 ? 8 : R <= 6 ? 4 : 3) : (R == 1 ? 8 : R == 2 ? 4 : 3);
  // Rows of w are too short for the hardware to see them coming. What the first tile of rows meets comes from memory:
  // it asks for the columns some 16 kB on. The tiles after it find the band in the cache. For 8 rows that is 26 ms in
  // place of 38 (the same weights and core).
  const int64_t step = wide * K, far = 16384 / static_cast<int64_t>(sizeof(T));
  const int64_t ahead = fresh && step > 0 ? step * ((far + step - 1) / step) : 0;
  int64_t n = 0;
  for (; n + wide <= count; n += wide) tile<R, wide>(x, w + n * K, bias ? bias + n : nullptr, y + n, K, ldy, ahead);
  for (; n < count; n++) tile<R, 1>(x, w + n * K, bias ? bias + n : nullptr, y + n, K, ldy, 0);
}

template <class T>
static void rows(
    int count, const float* x, const T* w, const float* bias, float* y, int64_t K, int64_t ldy, int64_t columns,
    bool fresh) {
  switch (count) {
#define ROW_CASE(r) case r: strip<r>(x, w, bias, y, K, ldy, columns, fresh); break
    ROW_CASE(1); ROW_CASE(2); ROW_CASE(3); ROW_CASE(4);
#if defined(LANES_AVX512)
    ROW_CASE(5); ROW_CASE(6); ROW_CASE(7); ROW_CASE(8);
#endif
#undef ROW_CASE
  }
}

template <class T>
static void linear(
    const float* x, const T* w, const float* bias, float* y, int64_t M, int64_t N, int64_t K, int threads) {
  // A part is a band of w that stays in the inner cache while the row tiles pass over it; 24 suits every tile width.
  const int64_t band = 24, tiles = (M + ROWS - 1) / ROWS;
  const int64_t bands = (N + band - 1) / band;
  // a helper is worth waking for some 100 microseconds of work
  const int64_t step = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, band * K * std::min<int64_t>(M, 4)));
  Pool::here().run((bands + step - 1) / step, threads, [&](int64_t part) {
    for (int64_t b = part * step; b < std::min(bands, (part + 1) * step); b++) {
      const int64_t n = b * band, count = std::min(band, N - n);
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t m = M * t / tiles, end = M * (t + 1) / tiles;  // tiles of nearly equal height
        rows(static_cast<int>(end - m), x + m * K, w + n * K, bias ? bias + n : nullptr, y + m * N + n, K, N, count,
             t == 0);
      }
    }
  });
}

}  // namespace LANES
}  // namespace foldspec

#endif
