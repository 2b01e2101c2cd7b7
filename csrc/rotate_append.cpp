// Rotates the queries and keys of new rows to their positions, and stores keys and values in the slots of a cache:
// pairs (i, i + half) of every head, a' = a cos - b sin, b' = b cos + a sin; what lies behind the pairs stays.
#ifndef LANES

#include "common.h"

namespace foldspec {

// Rows of several heads: `step` floats from row to row, heads packed.
struct Rows {
  const float* data;
  int64_t step, heads, width;
};

}  // namespace foldspec

#define SOURCE "rotate_append.cpp"
#include "each_isa.h"

using namespace foldspec;

// q, k, v [rows, heads, width]; cos and sin [rows, half], `angle_step` floats from row to row. Row r goes to slots[r] of
// keys [slots, k heads, d] and values [slots, v heads, width], packed; rotated [rows, q heads, d] packed.
EXPORT void foldspec_rotate_append(
    const Rows* q, const Rows* k, const Rows* v, const float* cos, const float* sin, int64_t angle_step,
    int64_t half, const int64_t* slots, int64_t rows, float* keys, float* values, float* rotated, int isa) {
  CALL(isa, rotate_append(*q, *k, *v, cos, sin, angle_step, half, slots, rows, keys, values, rotated));
}

#else

namespace foldspec {
namespace LANES {

static void rotate(
    const float* x, const float* cos, const float* sin, int64_t half, int64_t heads, int64_t width, float* y) {
  for (int64_t h = 0; h < heads; h++, x += width, y += width) {
    for (int64_t i = 0; i < half; i += W) {
      const int n = static_cast<int>(std::min<int64_t>(W, half - i));
      const V a = n == W ? load(x + i) : load(x + i, n), b = n == W ? load(x + half + i) : load(x + half + i, n);
      const V c = n == W ? load(cos + i) : load(cos + i, n), s = n == W ? load(sin + i) : load(sin + i, n);
      store(y + i, add(mul(a, c), mul(mul(b, s), all(-1.0f))), n);
      store(y + half + i, add(mul(b, c), mul(a, s)), n);
    }
    std::memcpy(y + 2 * half, x + 2 * half, sizeof(float) * (width - 2 * half));
  }
}

static void rotate_append(
    const Rows& q, const Rows& k, const Rows& v, const float* cos, const float* sin, int64_t angle_step,
    int64_t half, const int64_t* slots, int64_t rows, float* keys, float* values, float* rotated) {
  for (int64_t r = 0; r < rows; r++, cos += angle_step, sin += angle_step) {
    rotate(q.data + r * q.step, cos, sin, half, q.heads, q.width, rotated + r * q.heads * q.width);
    rotate(k.data + r * k.step, cos, sin, half, k.heads, k.width, keys + slots[r] * k.heads * k.width);
    std::memcpy(values + slots[r] * v.heads * v.width, v.data + r * v.step, sizeof(float) * v.heads * v.width);
  }
}

}  // namespace LANES
}  // namespace foldspec

#endif
