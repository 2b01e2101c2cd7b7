// y = f(gate) * up, element by element, f of a SwiGLU or a GeGLU. torch gives the last elements of a range another exp
// or tanh than the others, so that a row's bits depend on the rows around it; here every element goes the same way.
#ifndef LANES

#include "common.h"
#define SOURCE "gate_mul.cpp"
#include "each_isa.h"

using namespace foldspec;

// gate and up [rows, width] fp32, `step` floats from row to row; y [rows, width] packed. gelu: 0 for silu.
EXPORT void foldspec_gate_mul(
    const float* gate, const float* up, float* y, int64_t rows, int64_t width, int64_t gate_step, int64_t up_step,
    int gelu, int threads, int isa) {
  if (gelu) {
    CALL(isa, gate_mul<true>(gate, up, y, rows, width, gate_step, up_step, threads));
  } else {
    CALL(isa, gate_mul<false>(gate, up, y, rows, width, gate_step, up_step, threads));
  }
}

#else

namespace foldspec {
namespace LANES {

// Both are gate / (1 + exp(-s)): of silu s = gate; of gelu, since (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)),
// s = 2 sqrt(2 / pi) (gate + 0.044715 gate^3).
template <bool GELU>
LANES_INLINE V gate_mul_one(V gate, V up) {
  V power;
  if constexpr (GELU) power = mul(gate, fma(all(-0.07135481627f), mul(gate, gate), all(-1.595769122f)));
  else power = mul(gate, all(-1.0f));
  return mul(div(gate, add(all(1.0f), exp(power))), up);
}

template <bool GELU>
static void gate_mul(
    const float* gate, const float* up, float* y, int64_t rows, int64_t width, int64_t gate_step, int64_t up_step,
    int threads) {
  const int64_t band = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, width));  // rows
  Pool::here().run((rows + band - 1) / band, threads, [&](int64_t part) {
    for (int64_t r = part * band; r < std::min(rows, (part + 1) * band); r++) {
      const float *g = gate + r * gate_step, *u = up + r * up_step;
      float* to = y + r * width;
      int64_t i = 0;
      for (; i + W <= width; i += W) store(to + i, gate_mul_one<GELU>(load(g + i), load(u + i)));
      if (i < width) {
        const int rest = static_cast<int>(width - i);
        store(to + i, gate_mul_one<GELU>(load(g + i, rest), load(u + i, rest)), rest);
      }
    }
  });
}

}  // namespace LANES
}  // namespace foldspec

#endif
