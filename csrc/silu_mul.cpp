// y = gate / (1 + exp(-gate)) * up, element by element. torch's silu gives the last elements of a range another exp
// than the others, so that a row's bits depend on the rows around it; here every element goes the same way.
#ifndef LANES

#include "common.h"
#define SOURCE "silu_mul.cpp"
#include "each_isa.h"

using namespace foldspec;

// gate, up, y: `count` packed fp32 values each.
EXPORT void foldspec_silu_mul(const float* gate, const float* up, float* y, int64_t count, int threads, int isa) {
  CALL(isa, silu_mul(gate, up, y, count, threads));
}

#else

namespace foldspec {
namespace LANES {

LANES_INLINE V silu_mul_one(V gate, V up) {
  return mul(div(gate, add(all(1.0f), exp(mul(gate, all(-1.0f))))), up);
}

static void silu_mul(const float* gate, const float* up, float* y, int64_t count, int threads) {
  const int64_t band = 1 << 14;
  Pool::here().run((count + band - 1) / band, threads, [&](int64_t part) {
    int64_t i = part * band;
    const int64_t end = std::min(count, i + band);
    for (; i + W <= end; i += W) store(y + i, silu_mul_one(load(gate + i), load(up + i)));
    if (i < end) {
      const int rest = static_cast<int>(end - i);
      store(y + i, silu_mul_one(load(gate + i, rest), load(up + i, rest)), rest);
    }
  });
}

}  // namespace LANES
}  // namespace foldspec

#endif
