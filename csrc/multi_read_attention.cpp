// Multi-read attention (foldspec/kernels/multi_read_attention): rows of a block read runs of cache slots; the reads of
// a row are merged by mass ** exponent.
//
// A row's result is made of pieces that depend on nothing but the row and the entries it sees: blocks of BLOCK columns
// and chunks of CHUNK columns, both counted from column 0 of the read's entry sequence. Inside a block every score is
// one sum over the head's width, in order; blocks follow one another in order (online softmax); chunks are worked on by
// any thread and merged in order. So the other rows, the cut into runs, and the number of threads never change a bit.
// What a row does not see is never multiplied: it may be NaN.
#ifndef LANES

#include "common.h"

namespace foldspec {

constexpr int BLOCK = 64, CHUNK = 1024, SLAB = 32;  // columns, columns, rows worked on at a time

// Room for floats that begins with a cache line: vectors that straddle two take twice as long.
inline float* aligned(int64_t floats) {
  return static_cast<float*>(std::aligned_alloc(64, (sizeof(float) * floats + 64) / 64 * 64));
}

// The entries of one read: `runs` pairs (first slot, count); strides in floats, the last axis is packed.
struct Entries {
  const float* data;
  int64_t slot_stride, head_stride;
  const int64_t* runs;
  int64_t run_count;
};

// One read. q [rows, heads, key width] packed; first and last [rows].
struct Read {
  const float* q;
  Entries keys, values;
  const int64_t *first, *last;
  float scale, exponent;
};

struct Shape {
  int64_t rows, heads, kv_heads, key_width, value_width;
  int64_t group() const { return heads / kv_heads; }
};

// Softmax state of one query over one chunk, or of several merged: top score, sum of exp(score - top).
struct Mass {
  float top, sum;
};

// Walks the slots of an entry sequence upwards.
class Cursor {
 public:
  Cursor(const Entries& entries, int64_t column) : entries_(entries) {
    while (run_ < entries.run_count && column >= start_ + entries.runs[2 * run_ + 1]) {
      start_ += entries.runs[2 * run_ + 1];
      run_++;
    }
  }
  const float* at(int64_t column) {  // columns must not go down
    while (column >= start_ + entries_.runs[2 * run_ + 1]) {
      start_ += entries_.runs[2 * run_ + 1];
      run_++;
    }
    return entries_.data + (entries_.runs[2 * run_] + column - start_) * entries_.slot_stride;
  }

 private:
  const Entries& entries_;
  int64_t run_ = 0, start_ = 0;
};

}  // namespace foldspec

#define SOURCE "multi_read_attention.cpp"
#include "each_isa.h"

using namespace foldspec;

// out [rows, heads, value width] and lse [reads, rows, heads], both packed fp32.
EXPORT void foldspec_multi_read_attention(
    const Read* reads, int64_t read_count, int64_t rows, int64_t heads, int64_t kv_heads, int64_t key_width,
    int64_t value_width, float* out, float* lse, int threads, int isa) {
  const Shape shape = {rows, heads, kv_heads, key_width, value_width};
  CALL(isa, multi_read_attention(reads, read_count, shape, out, lse, threads));
}

#else

namespace foldspec {
namespace LANES {

constexpr int BLOCK_VECTORS = BLOCK / W;
constexpr int QUERIES = 4;  // queries of a register tile

LANES_INLINE int64_t vectors(int64_t width) { return (width + W - 1) / W; }

// Asks memory for the rows that come next, one every few steps of the work at hand: asked for all at once they would
// fill the processor's list of misses, and the work would wait.
struct Ahead {
  const float* const* rows;
  int count, width;  // of rows, floats of each
  int every;         // steps to a row
  int row = 0, wait = 0;

  inline __attribute__((always_inline)) void step() {
    if (--wait > 0) return;
    wait = every;
    if (row >= count) return;
    const float* next = rows[row++];
    for (int i = 0; i < width; i += 16) __builtin_prefetch(next + i);
  }
};

// keys[0 .. count-1] -> turned[i * BLOCK + j]; columns beyond `count` are zeros up to a whole vector.
static void turn(const float* const* keys, int count, int64_t width, float* turned, Ahead& ahead) {
  const int padded = static_cast<int>(vectors(count)) * W;
  int j = 0;
  for (; j + SQUARE <= count; j += SQUARE) {
    int64_t i = 0;
    for (; i + SQUARE <= width; i += SQUARE) {
      transpose(keys + j, i, turned + i * BLOCK + j, BLOCK);
      for (int t = 0; t < SQUARE; t += 8) ahead.step();
    }
    for (; i < width; i++)
      for (int t = 0; t < SQUARE; t++) turned[i * BLOCK + j + t] = keys[j + t][i];
  }
  for (; j < count; j++)
    for (int64_t i = 0; i < width; i++) turned[i * BLOCK + j] = keys[j][i];
  for (; j < padded; j++)
    for (int64_t i = 0; i < width; i++) turned[i * BLOCK + j] = 0;
}

// scores[r][j] = q_r . key_j for R queries and C vectors of columns.
template <int R, int C>
static void score_tile(const float* const* q, const float* turned, int64_t width, float* scores, Ahead& ahead) {
  V sum[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sum[r][c] = zero();
  Ahead next = ahead;
  for (int64_t i = 0; i < width; i++) {
    next.step();
    V key[C];
    for (int c = 0; c < C; c++) key[c] = load(turned + i * BLOCK + c * W);
    for (int r = 0; r < R; r++) {
      const V a = all(q[r][i]);
      for (int c = 0; c < C; c++) sum[r][c] = fma(a, key[c], sum[r][c]);
    }
  }
  ahead = next;
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(scores + r * BLOCK + c * W, sum[r][c]);
}

template <int R>
static void score(const float* const* q, const float* turned, int64_t width, int used, float* scores, Ahead& ahead) {
  constexpr int C = ROWS == 8 ? 4 : 2;
  int c = 0;
  for (; c + C <= used; c += C) score_tile<R, C>(q, turned + c * W, width, scores + c * W, ahead);
  for (; c < used; c++) score_tile<R, 1>(q, turned + c * W, width, scores + c * W, ahead);
}

// Scores of one query over a block -> exp(scale * score - top), 0 outside columns low .. high-1; `mass` takes them in.
// Returns what earlier sums must be multiplied by.
static float soften(float* scores, int low, int high, int used, float scale, Mass& mass) {
  static const float index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const V lane = load(index), none = all(-INFINITY), unit = all(scale);
  V top = none;
  for (int c = 0; c < used; c++) {
    const V column = add(lane, all(static_cast<float>(c * W)));
    V s = mul(load(scores + c * W), unit);
    s = where_less(column, all(static_cast<float>(low)), none, s);
    s = where_less(column, all(static_cast<float>(high)), s, none);
    store(scores + c * W, s);
    top = max(top, s);
  }
  const float new_top = std::max(mass.top, largest(top));
  V sum_of = zero();
  for (int c = 0; c < used; c++) {
    const V s = load(scores + c * W);
    const V p = where_less(none, s, exp(add(s, all(-new_top))), where_less(s, zero(), zero(), s));  // NaN stays
    store(scores + c * W, p);
    sum_of = add(sum_of, p);
  }
  float shrink = mass.top == new_top ? 1.0f : 0.0f;
  if (shrink == 0 && mass.top != -INFINITY) {
    float lanes[W];
    store(lanes, exp(all(mass.top - new_top)));
    shrink = lanes[0];
  }
  mass = {new_top, mass.sum * shrink + sum(sum_of)};
  return shrink;
}

// out[r] += sum_j p[r][j] * value_j over columns low .. high-1, for R queries and C vectors of the value's width, the
// last of them `rest` lanes wide.
template <int R, int C>
static void weigh_tile(
    const float* p, const float* const* values, int low, int high, float* const* out, int64_t at, int rest,
    Ahead& ahead) {
  V sum[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sum[r][c] = load(out[r] + at + c * W);
  Ahead next = ahead;
  for (int j = low; j < high; j++) {
    next.step();
    V value[C];
    for (int c = 0; c < C; c++)
      value[c] = c + 1 < C || rest == W ? load(values[j] + at + c * W) : load(values[j] + at + c * W, rest);
    for (int r = 0; r < R; r++) {
      const V a = all(p[r * BLOCK + j]);
      for (int c = 0; c < C; c++) sum[r][c] = fma(a, value[c], sum[r][c]);
    }
  }
  ahead = next;
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out[r] + at + c * W, sum[r][c]);
}

template <int R>
static void weigh(
    const float* p, const float* const* values, int low, int high, float* const* out, int64_t width, Ahead& ahead) {
  constexpr int C = ROWS == 8 ? 4 : 2;
  const int64_t used = vectors(width);
  const int rest = static_cast<int>(width - (used - 1) * W);
  int64_t c = 0;
  for (; c + C <= used; c += C) weigh_tile<R, C>(p, values, low, high, out, c * W, c + C == used ? rest : W, ahead);
  for (; c < used; c++) weigh_tile<R, 1>(p, values, low, high, out, c * W, c + 1 == used ? rest : W, ahead);
}

// A row's share low .. high-1 of the block that begins at column `begin`.
LANES_INLINE void share(const Read& read, int64_t row, int64_t begin, int& low, int& high) {
  low = static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(BLOCK, read.first[row] - begin)));
  high = static_cast<int>(std::max<int64_t>(low, std::min<int64_t>(BLOCK, read.last[row] - begin)));
}

// One kv head's part of a block: addresses of its rows, `shift` floats on in every slot.
LANES_INLINE void shifted(const float* const* slots, int64_t shift, const float** rows) {
  for (int j = 0; j < BLOCK; j++) rows[j] = slots[j] + shift;
}

// Queries rows x group of one kv head over one block of columns that begins at `column`; `keys` and `values` are its
// rows. Adds to out [queries][padded width] and mass
// [queries].
static void block(
    const Read& read, const Shape& shape, int64_t row0, int64_t rows, int64_t kv_head, int64_t column, int high,
    const float* turned, const float* const* values, Ahead& ahead, float* out, Mass* mass) {
  const int64_t group = shape.group(), queries = rows * group, padded = vectors(shape.value_width) * W;
  const int used = static_cast<int>(vectors(high));
  float scores[QUERIES * BLOCK];
  for (int64_t i = 0; i < queries; i += QUERIES) {
    const int count = static_cast<int>(std::min<int64_t>(QUERIES, queries - i));
    const float* q[QUERIES];
    float* to_out[QUERIES];
    int lows[QUERIES], highs[QUERIES];
    bool alike = true, any = false;
    for (int r = 0; r < count; r++) {
      const int64_t row = row0 + (i + r) / group, head = kv_head * group + (i + r) % group;
      q[r] = read.q + (row * shape.heads + head) * shape.key_width;
      to_out[r] = out + (i + r) * padded;
      share(read, row, column, lows[r], highs[r]);
      alike = alike && lows[r] == lows[0] && highs[r] == highs[0];
      any = any || lows[r] < highs[r];
    }
    if (!any) continue;
    switch (count) {
      case 4: score<4>(q, turned, shape.key_width, used, scores, ahead); break;
      case 3: score<3>(q, turned, shape.key_width, used, scores, ahead); break;
      case 2: score<2>(q, turned, shape.key_width, used, scores, ahead); break;
      default: score<1>(q, turned, shape.key_width, used, scores, ahead);
    }
    for (int r = 0; r < count; r++) {
      if (lows[r] >= highs[r]) continue;
      const float shrink = soften(scores + r * BLOCK, lows[r], highs[r], used, read.scale, mass[i + r]);
      if (shrink != 1.0f)
        for (int64_t c = 0; c < padded; c += W) store(to_out[r] + c, mul(load(to_out[r] + c), all(shrink)));
    }
    // rows that see different columns go one by one: nothing that one of them does not see is multiplied for it
    if (alike && count > 1) {
      switch (count) {
        case 4: weigh<4>(scores, values, lows[0], highs[0], to_out, shape.value_width, ahead); break;
        case 3: weigh<3>(scores, values, lows[0], highs[0], to_out, shape.value_width, ahead); break;
        default: weigh<2>(scores, values, lows[0], highs[0], to_out, shape.value_width, ahead);
      }
    } else {
      for (int r = 0; r < count; r++) {
        
        weigh<1>(scores + r * BLOCK, values, lows[r], highs[r], to_out + r, shape.value_width, ahead);
      }
    }
  }
}

// Queries rows x group of kv heads head0 .. head0+heads-1 over one chunk: out [heads][queries][padded width] and mass
// [heads][queries]. The heads take turns block by block, so that memory is read in the order in which it lies.
static void chunk(
    const Read& read, const Shape& shape, int64_t row0, int64_t rows, int64_t head0, int64_t heads, int64_t begin,
    float* turned, float* out, Mass* mass) {
  const int64_t queries = rows * shape.group(), padded = vectors(shape.value_width) * W;
  std::memset(out, 0, sizeof(float) * heads * queries * padded);
  for (int64_t i = 0; i < heads * queries; i++) mass[i] = {-INFINITY, 0};
  // slots of this block and of the next, two places each
  const float *key_slots[2][BLOCK], *value_slots[2][BLOCK];
  int64_t seen_first = INT64_MAX, seen_last = 0;
  for (int64_t r = row0; r < row0 + rows; r++) {
    if (read.first[r] >= read.last[r]) continue;
    seen_first = std::min(seen_first, read.first[r]);
    seen_last = std::max(seen_last, read.last[r]);
  }
  const int64_t from = std::max(begin, seen_first / BLOCK * BLOCK), to = std::min(begin + CHUNK, seen_last);
  if (from >= to) return;
  const int64_t start = std::max(from, seen_first);
  Cursor key_at(read.keys, start), value_at(read.values, start);
  // What any row sees of a block; columns that no row sees get a row that some row does, and are masked.
  const auto find = [&](int64_t column, const float** keys, const float** values) {
    const int low = static_cast<int>(std::max<int64_t>(0, start - column));
    const int high = static_cast<int>(std::min<int64_t>(BLOCK, to - column));
    for (int j = low; j < high; j++) {
      keys[j] = key_at.at(column + j);
      values[j] = value_at.at(column + j);
    }
    std::fill(keys, keys + low, keys[low]);
    std::fill(keys + high, keys + BLOCK, keys[high - 1]);
    std::fill(values, values + low, values[low]);
    std::fill(values + high, values + BLOCK, values[high - 1]);
    return high;
  };
  // The 2 * BLOCK slots of the next block are spread over the steps of this one, in the order in which they lie: every
  // tile of queries takes as many steps as a key is wide, and one for each column.
  const int64_t steps = heads * ((queries + QUERIES - 1) / QUERIES) * (shape.key_width + BLOCK);
  const int every = static_cast<int>(std::max<int64_t>(1, steps / (2 * BLOCK)));
  const int64_t span = heads * std::max(shape.key_width, shape.value_width);  // the heads, which lie packed in a cache
  int high = find(from, key_slots[0], value_slots[0]), next_high = 0, now = 0;
  for (int64_t column = from; column < to; column += BLOCK, high = next_high, now ^= 1) {
    const bool more = column + BLOCK < to;
    if (more) next_high = find(column + BLOCK, key_slots[now ^ 1], value_slots[now ^ 1]);
    const float* coming[2 * BLOCK];
    if (more) {
      shifted(key_slots[now ^ 1], head0 * read.keys.head_stride, coming);
      shifted(value_slots[now ^ 1], head0 * read.values.head_stride, coming + BLOCK);
    }
    Ahead ahead = {coming, more ? 2 * BLOCK : 0, static_cast<int>(span), every};
    for (int64_t h = 0; h < heads; h++) {
      const int64_t key_shift = (head0 + h) * read.keys.head_stride, value_shift = (head0 + h) * read.values.head_stride;
      const float *keys[BLOCK], *values[BLOCK];
      shifted(key_slots[now], key_shift, keys);
      shifted(value_slots[now], value_shift, values);
      turn(keys, high, shape.key_width, turned, ahead);
      block(read, shape, row0, rows, head0 + h, column, high, turned, values, ahead, out + h * queries * padded,
            mass + h * queries);
    }
  }
}

// Merge the chunks of each read of one query, in order, then the reads: out [value width], lse of each read.
static void merge(
    const Read* reads, int64_t read_count, const int64_t* chunks, const float* const* out, const Mass* const* mass,
    int64_t out_step, int64_t mass_step, int64_t width, float* result, float* lse, int64_t lse_step, float* scratch) {
  float top = -INFINITY;
  for (int64_t i = 0; i < read_count; i++) {
    Mass whole = {-INFINITY, 0};
    for (int64_t c = 0; c < chunks[i]; c++) whole.top = std::max(whole.top, mass[i][c * mass_step].top);
    float* into = scratch + i * width;
    std::fill(into, into + width, 0.0f);
    for (int64_t c = 0; c < chunks[i]; c++) {
      const Mass part = mass[i][c * mass_step];
      if (part.sum == 0) continue;  // it sees nothing of this chunk (NaN is not 0)
      const float weight = std::exp(part.top - whole.top);
      whole.sum += part.sum * weight;
      const float* from = out[i] + c * out_step;
      for (int64_t d = 0; d < width; d++) into[d] += from[d] * weight;
    }
    const bool empty = whole.sum == 0;
    for (int64_t d = 0; d < width && !empty; d++) into[d] /= whole.sum;
    lse[i * lse_step] = empty ? -INFINITY : whole.top + std::log(whole.sum);
    top = std::max(top, reads[i].exponent * lse[i * lse_step]);
  }
  if (read_count == 1) {
    std::copy(scratch, scratch + width, result);
    return;
  }
  std::fill(result, result + width, 0.0f);
  float total = 0;
  for (int64_t i = 0; i < read_count; i++)
    if (lse[i * lse_step] != -INFINITY) total += std::exp(reads[i].exponent * lse[i * lse_step] - top);
  for (int64_t i = 0; i < read_count; i++) {
    if (lse[i * lse_step] == -INFINITY) continue;
    const float weight = std::exp(reads[i].exponent * lse[i * lse_step] - top) / total;
    for (int64_t d = 0; d < width; d++) result[d] += weight * scratch[i * width + d];
  }
}

static void multi_read_attention(
    const Read* reads, int64_t read_count, const Shape& shape, float* out, float* lse, int threads) {
  const int64_t group = shape.group(), padded = vectors(shape.value_width) * W, kv_heads = shape.kv_heads;
  for (int64_t row0 = 0; row0 < shape.rows; row0 += SLAB) {
    const int64_t rows = std::min<int64_t>(SLAB, shape.rows - row0), queries = rows * group;
    // the chunks that any row of the slab sees: a row sees nothing of those beyond its own
    std::vector<int64_t> first_chunk(read_count), chunks(read_count), offset(read_count + 1, 0);
    for (int64_t i = 0; i < read_count; i++) {
      int64_t low = INT64_MAX, high = 0;
      for (int64_t r = row0; r < row0 + rows; r++) {
        if (reads[i].first[r] >= reads[i].last[r]) continue;
        low = std::min(low, reads[i].first[r]);
        high = std::max(high, reads[i].last[r]);
      }
      first_chunk[i] = low < high ? low / CHUNK : 0;
      chunks[i] = low < high ? (high + CHUNK - 1) / CHUNK - first_chunk[i] : 0;
      offset[i + 1] = offset[i] + chunks[i];
    }
    // of each (chunk, kv head): sums [queries][padded] and mass [queries]
    const int64_t parts = offset[read_count], sums_step = queries * padded;
    std::vector<float> sums_of(kv_heads * parts * sums_step);
    std::vector<Mass> mass_of(kv_heads * parts * queries);
    // a unit of work is a chunk, or one head of it where chunks are too few for the threads
    const int64_t heads = threads <= 1 || parts >= 4 * threads ? kv_heads : 1, shares = kv_heads / heads;
    Pool::here().run(parts * shares, threads, [&](int64_t unit) {
      const int64_t part = unit / shares, head = unit % shares, at = part * kv_heads + head;
      int64_t i = 0;
      while (part >= offset[i + 1]) i++;
      const std::unique_ptr<float, void (*)(void*)> turned(aligned(shape.key_width * BLOCK), std::free);
      chunk(reads[i], shape, row0, rows, head, heads, (first_chunk[i] + part - offset[i]) * CHUNK, turned.get(),
            sums_of.data() + at * sums_step, mass_of.data() + at * queries);
    });
    std::vector<float> scratch(read_count * shape.value_width);
    std::vector<const float*> from(read_count);
    std::vector<const Mass*> mass(read_count);
    for (int64_t head = 0; head < kv_heads; head++) {
      for (int64_t query = 0; query < queries; query++) {
        for (int64_t i = 0; i < read_count; i++) {
          from[i] = sums_of.data() + (offset[i] * kv_heads + head) * sums_step + query * padded;
          mass[i] = mass_of.data() + (offset[i] * kv_heads + head) * queries + query;
        }
        const int64_t at = (row0 + query / group) * shape.heads + head * group + query % group;
        merge(reads, read_count, chunks.data(), from.data(), mass.data(), kv_heads * sums_step, kv_heads * queries, shape.value_width,
              out + at * shape.value_width, lse + at, shape.rows * shape.heads, scratch.data());
      }
    }
  }
}

}  // namespace LANES
}  // namespace foldspec

#endif
