// The gated delta rule, row by row (foldspec/kernels/gated_delta): S <- d S; r = beta (v - S^T k); S <- S + k r^T;
// y = S^T q. A head's matrix stays in cache over all rows, so that going row by row costs little beside a layer's
// products, and a row's bits depend on nothing but the rows before it.
#ifndef LANES

#include "common.h"
#define SOURCE "gated_delta.cpp"
#include "each_isa.h"

using namespace foldspec;

// q and k [n, key_heads, key_width], v [n, value_heads, value_width], `step` floats from row to row, heads packed;
// g and beta [n, value_heads]; matrix [value_heads, key_width, value_width]; keys, updates, decays of `room` recorded
// rows; y as v, packed. `kept` recorded rows are folded into the matrix, then the rows but the last min(n, room), which
// are recorded.
EXPORT void foldspec_gated_delta(
    const float* q, int64_t q_step, const float* k, int64_t k_step, const float* v, int64_t v_step, const float* g,
    const float* beta, float* matrix, float* keys, float* updates, float* decays, float* y, int64_t n, int64_t kept,
    int64_t room, int64_t key_heads, int64_t key_width, int64_t value_heads, int64_t value_width, int threads, int isa) {
  CALL(isa, gated_delta(q, q_step, k, k_step, v, v_step, g, beta, matrix, keys, updates, decays, y, n, kept, room,
                        key_heads, key_width, value_heads, value_width, threads));
}

#else

namespace foldspec {
namespace LANES {

// x over its length, times `factor`.
static void normalised(const float* x, float* to, int64_t width, float factor) {
  const int64_t whole = width / W * W;
  const int rest = static_cast<int>(width - whole);
  V squares = zero();
  for (int64_t i = 0; i < whole; i += W) squares = fma(load(x + i), load(x + i), squares);
  if (rest) squares = fma(load(x + whole, rest), load(x + whole, rest), squares);
  const V scale = all(factor / std::sqrt(sum(squares) + 1e-6f));
  for (int64_t i = 0; i < whole; i += W) store(to + i, mul(load(x + i), scale));
  if (rest) store(to + whole, mul(load(x + whole, rest), scale), rest);
}

// The columns c .. c+count-1 of a matrix through one recorded row.
LANES_INLINE void advance(float* s, const float* key, V update, V decay, int64_t key_width, int64_t step, int count) {
  for (int64_t i = 0; i < key_width; i++, s += step)
    store(s, fma(all(key[i]), update, mul(load(s, count), decay)), count);
}

static void gated_delta(
    const float* q, int64_t q_step, const float* k, int64_t k_step, const float* v, int64_t v_step, const float* g,
    const float* beta, float* matrix, float* keys, float* updates, float* decays, float* y, int64_t n, int64_t kept,
    int64_t room, int64_t key_heads, int64_t key_width, int64_t value_heads, int64_t value_width, int threads) {
  const int64_t size = key_width * value_width, folded = std::max<int64_t>(0, n - room);
  std::vector<float> key_of(n * key_heads * key_width);  // not yet among the recorded: those are still read
  for (int64_t t = 0; t < n; t++)
    for (int64_t h = 0; h < key_heads; h++)
      normalised(k + t * k_step + h * key_width, &key_of[(t * key_heads + h) * key_width], key_width, 1.0f);
  const float query_scale = 1.0f / std::sqrt(static_cast<float>(key_width));
  Pool::here().run(value_heads, threads, [&](int64_t h) {
    const int64_t key_head = h / (value_heads / key_heads);
    std::vector<float> work, query(key_width);
    float* s = matrix + h * size;
    for (int64_t j = 0; j < kept; j++) {
      const float* key = keys + (j * key_heads + key_head) * key_width;
      const float* update = updates + (j * value_heads + h) * value_width;
      const V decay = all(decays[j * value_heads + h]);
      for (int64_t c = 0; c < value_width; c += W) {
        const int count = static_cast<int>(std::min<int64_t>(W, value_width - c));
        advance(s + c, key, load(update + c, count), decay, key_width, value_width, count);
      }
    }
    for (int64_t t = 0; t < n; t++) {
      if (t == folded) {  // from here on rows may be taken back
        work.assign(s, s + size);
        s = work.data();
      }
      const int64_t row = t * value_heads + h;
      const float* key = &key_of[(t * key_heads + key_head) * key_width];
      normalised(q + t * q_step + key_head * key_width, query.data(), key_width, query_scale);
      const float decay = std::exp(g[row]);
      if (t >= folded) decays[(t - folded) * value_heads + h] = decay;
      for (int64_t c = 0; c < value_width; c += W) {
        const int count = static_cast<int>(std::min<int64_t>(W, value_width - c));
        V known = zero(), read = zero();
        const float* old = s + c;
        for (int64_t i = 0; i < key_width; i++, old += value_width)
          known = fma(mul(load(old, count), all(decay)), all(key[i]), known);
        const V wanted = load(v + t * v_step + h * value_width + c, count);
        const V update = mul(all(beta[row]), add(wanted, mul(known, all(-1.0f))));
        advance(s + c, key, update, all(decay), key_width, value_width, count);
        const float* now = s + c;
        for (int64_t i = 0; i < key_width; i++, now += value_width)
          read = fma(load(now, count), all(query[i]), read);
        store(y + row * value_width + c, read, count);
        if (t >= folded) store(updates + ((t - folded) * value_heads + h) * value_width + c, update, count);
      }
    }
  });
  std::copy(key_of.begin() + folded * key_heads * key_width, key_of.end(), keys);
}

}  // namespace LANES
}  // namespace foldspec

#endif
