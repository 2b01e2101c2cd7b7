// y = x / sqrt(mean(x^2) + eps) * w, row by row. One accumulator walks a row upwards and one fixed tree adds its lanes,
// so that a row's statistics depend on nothing but the row.
#ifndef LANES

#include "common.h"
#define SOURCE "rms_norm.cpp"
#include "each_isa.h"

using namespace foldspec;

// x and y [rows, width] packed fp32; w [width].
EXPORT void foldspec_rms_norm(
    const float* x, const float* w, float* y, int64_t rows, int64_t width, float eps, int isa) {
  CALL(isa, rms_norm(x, w, y, rows, width, eps));
}

#else

namespace foldspec {
namespace LANES {

static void rms_norm(const float* x, const float* w, float* y, int64_t rows, int64_t width, float eps) {
  const int64_t whole = width / W * W;
  const int rest = static_cast<int>(width - whole);
  for (int64_t r = 0; r < rows; r++, x += width, y += width) {
    V squares = zero();
    for (int64_t i = 0; i < whole; i += W) squares = fma(load(x + i), load(x + i), squares);
    if (rest) squares = fma(load(x + whole, rest), load(x + whole, rest), squares);
    const V scale = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps));
    for (int64_t i = 0; i < whole; i += W) store(y + i, mul(mul(load(x + i), scale), load(w + i)));
    if (rest) store(y + whole, mul(mul(load(x + whole, rest), scale), load(w + whole, rest)), rest);
  }
}

}  // namespace LANES
}  // namespace foldspec

#endif
