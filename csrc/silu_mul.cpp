// y = gate / (1 + exp(-gate)) * up, element by element. torch's silu gives the last elements of a range another exp
// than the others, so that a row's bits depend on the rows around it; here every element goes the same way.
#ifndef LANES

#include "common.h"
#define SOURCE "silu_mul.cpp"
#include "each_isa.h"

using namespace foldspec;

// gate and up [rows, width] fp32, `step` floats from row to row; y [rows, width] packed.
EXPORT void foldspec_silu_mul(
    const float* gate, const float* up, float* y, int64_t rows, int64_t width, int64_t gate_step, int64_t up_step,
    int threads, int isa) {
  CALL(isa, silu_mul(gate, up, y, rows, width, gate_step, up_step, threads));
}

#else

namespace foldspec {
namespace LANES {

LANES_INLINE V silu_mul_one(V gate, V up) {
  return mul(div(gate, add(all(1.0f), exp(mul(gate, all(-1.0f))))), up);
}

static void silu_mul(
    const float* gate, const float* up, float* y, int64_t rows, int64_t width, int64_t gate_step, int64_t up_step,
    int threads) {
  const int64_t band = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, width));  // rows
  Pool::here().run((rows + band - 1) / band, threads, [&](int64_t part) {
    for (int64_t r = part * band; r < std::min(rows, (part + 1) * band); r++) {
      const float *g = gate + r * gate_step, *u = up + r * up_step;
      float* to = y + r * width;
      int64_t i = 0;
      for (; i + W <= width; i += W) store(to + i, silu_mul_one(load(g + i), load(u + i)));
      if (i < width) {
        const int rest = static_cast<int>(width - i);
        store(to + i, silu_mul_one(load(g + i, rest), load(u + i, rest)), rest);
      }
    }
  });
}

}  // namespace LANES
}  // namespace foldspec

#endif
