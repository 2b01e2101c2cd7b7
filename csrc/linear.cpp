// y[m][n] = sum_k x[m][k] * w[n][k] + bias[n] + plus[m][n], fp32 arithmetic over weights held as fp32 or bf16.
//
// Weights are packed (foldspec/kernels/linear/panels.py): panels of PANEL rows of w, each panel stored as [K][PANEL], the
// last one as narrow as what is left. A vector then holds one k of several outputs, every output has one lane that walks
// k upwards, and no sum crosses lanes: the same operations whatever the number of rows, the tile a row falls into, and
// the thread. Memory is read in a few long streams. Over rows as in the checkpoint, with sums across lanes, eight rows
// took 1.44 times one on a Zen 5 core; scripts/measure_verify.py has what a whole pass takes now.
#ifndef LANES

#include "common.h"

namespace foldspec {

constexpr int PANEL = 16;  // as panels.py has it; a multiple of every W

}  // namespace foldspec

#define SOURCE "linear.cpp"
#include "each_isa.h"

using namespace foldspec;

// x [M, K], y and plus [M, N] packed fp32; w [N, K] in panels, bf16 if `half`; bias [N] fp32; bias and plus may be null.
EXPORT void foldspec_linear(
    const float* x, const void* w, const float* bias, const float* plus, float* y, int64_t M, int64_t N, int64_t K,
    int half, int threads, int isa) {
  if (half) CALL(isa, linear(x, static_cast<const bf16*>(w), bias, plus, y, M, N, K, threads));
  else CALL(isa, linear(x, static_cast<const float*>(w), bias, plus, y, M, N, K, threads));
}

EXPORT int foldspec_runs_here(int isa) { return runs_here(isa); }

#else

namespace foldspec {
namespace LANES {

constexpr int VECTORS = PANEL / W;  // of a panel
// Products of so many k are added up apart, then the sums: in one long chain of additions rounding errors pile up. The
// sums so far lie in y, in the innermost cache. A multiple of the steps in a cache line.
constexpr int64_t CHAIN = 192;

// R rows of x against C whole panels. With `fresh` panels it asks memory for the C panels that follow, step by step.
template <int R, int C, class T>
static void tile(const float* x, const T* w, float* y, int64_t K, int64_t ldy, bool fresh) {
  constexpr int PER_LINE = 64 / (PANEL * sizeof(T));  // steps of k in one cache line
  V sum[R][C * VECTORS];
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    V b[C * VECTORS];
    for (int c = 0; c < C * VECTORS; c++) b[c] = load(w + (c / VECTORS * K + k) * PANEL + c % VECTORS * W);
    for (int r = 0; r < R; r++) {
      const V a = all(x[r * K + k]);
      for (int c = 0; c < C * VECTORS; c++) sum[r][c] = fma(a, b[c], sum[r][c]);
    }
  };
  int64_t k = 0;
  do {  // at least once: a sum over nothing is zero
    const bool first = k == 0;
    const int64_t end = std::min(K, k + CHAIN);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C * VECTORS; c++) sum[r][c] = zero();
    for (; k + PER_LINE <= end; k += PER_LINE) {
      if (fresh)
        for (int c = 0; c < C; c++) __builtin_prefetch(w + ((c + C) * K + k) * PANEL);
      for (int i = 0; i < PER_LINE; i++) step(k + i);
    }
    for (; k < end; k++) step(k);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C * VECTORS; c++) {
        float* to = y + r * ldy + c * W;
        store(to, first ? sum[r][c] : add(load(to), sum[r][c]));
      }
  } while (k < K);
}

// R rows of x against the last panel, of `narrow` < PANEL columns.
template <int R, class T>
static void tail(const float* x, const T* w, float* y, int64_t K, int64_t ldy, int narrow) {
  for (int v = 0; v * W < narrow; v++) {
    const int n = std::min(W, narrow - v * W);
    int64_t k = 0;
    do {
      const bool first = k == 0;
      const int64_t end = std::min(K, k + CHAIN);
      V sum[R];
      for (int r = 0; r < R; r++) sum[r] = zero();
      for (; k < end; k++) {
        const T* at = w + k * narrow + v * W;
        const V b = n == W ? load(at) : load(at, n);
        for (int r = 0; r < R; r++) sum[r] = fma(all(x[r * K + k]), b, sum[r]);
      }
      for (int r = 0; r < R; r++) {
        float* to = y + r * ldy + v * W;
        store(to, first ? sum[r] : add(load(to, n), sum[r]), n);
      }
    } while (k < K);
  }
}

// R rows of x against `count` columns that begin with a panel.
template <int R, class T>
static void strip(const float* x, const T* w, float* y, int64_t K, int64_t ldy, int64_t count, bool fresh) {
  // as many panels as fill the registers, so that enough sums are under way to hide the latency of each
  constexpr int C = ROWS == 8 ? (R <= 6 ? 4 : 3) : (R == 1 && VECTORS == 2 ? 3 : 1);
  int64_t n = 0;
  for (; n + C * PANEL <= count; n += C * PANEL) tile<R, C>(x, w + n * K, y + n, K, ldy, fresh);
  for (; n + PANEL <= count; n += PANEL) tile<R, 1>(x, w + n * K, y + n, K, ldy, fresh);
  if (n < count) tail<R>(x, w + n * K, y + n, K, ldy, static_cast<int>(count - n));
}

template <class T>
static void rows(
    int count, const float* x, const T* w, float* y, int64_t K, int64_t ldy, int64_t columns, bool fresh) {
  switch (count) {
#define ROW_CASE(r) case r: strip<r>(x, w, y, K, ldy, columns, fresh); break
    ROW_CASE(1); ROW_CASE(2); ROW_CASE(3); ROW_CASE(4);
#if defined(LANES_AVX512)
    ROW_CASE(5); ROW_CASE(6); ROW_CASE(7); ROW_CASE(8);
#endif
#undef ROW_CASE
  }
}

template <class T>
static void linear(
    const float* x, const T* w, const float* bias, const float* plus, float* y, int64_t M, int64_t N, int64_t K,
    int threads) {
  // A part is a band of w that stays in the inner cache (512 kB) while the row tiles pass over it; 12 panels at most,
  // which every tile width divides.
  const int64_t panel = std::max<int64_t>(1, K * PANEL * static_cast<int64_t>(sizeof(T)));
  const int64_t band = PANEL * std::min<int64_t>(12, std::max<int64_t>(4, (1 << 19) / panel));
  const int64_t bands = (N + band - 1) / band, tiles = (M + ROWS - 1) / ROWS;
  // a helper is worth waking for some 100 microseconds of work
  const int64_t step = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, band * K * std::min<int64_t>(M, 4)));
  Pool::here().run((bands + step - 1) / step, threads, [&](int64_t part) {
    for (int64_t b = part * step; b < std::min(bands, (part + 1) * step); b++) {
      const int64_t n = b * band, count = std::min(band, N - n);
      for (int64_t t = 0; t < tiles; t++) {
        const int64_t m = M * t / tiles, end = M * (t + 1) / tiles;  // tiles of nearly equal height
        rows(static_cast<int>(end - m), x + m * K, w + n * K, y + m * N + n, K, N, count, t == 0);
      }
      for (int64_t m = 0; m < M && (bias || plus); m++) {
        float* to = y + m * N + n;
        if (bias)
          for (int64_t i = 0; i < count; i++) to[i] += bias[n + i];
        if (plus)
          for (int64_t i = 0; i < count; i++) to[i] += plus[m * N + n + i];
      }
    }
  });
}

}  // namespace LANES
}  // namespace foldspec

#endif
