// Every acceptance rule over a batch of blocks; what it computes is foldspec/kernels/verify/reference.py.
//
// Torch-free: Python hands over addresses and a stream (foldspec/kernels/verify/cuda.py). Rows are read in chunks, a
// block of threads each:
//
//   peaks     argmax and max of each row: all that greedy decoding needs
//   totals    sum of exponentials of each row's law and of each draft's, and what a rule asks besides
//   mixtures  argmax of (1 - lambda) p + lambda q, for the one rule that takes it
//   decide    one block a request: which drafts stand, and where the token after them comes from
//   draw      the deciding row of each request: the largest of log mass + noise
//   pick      its chunks, put together
//
// Laws are in float64 and logits are rounded as foldspec/laws.py rounds them: with the same noise, the same decisions.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "noise.cuh"
#include "reduce.cuh"

#ifdef __CUDACC__
#define LAUNCH(kernel, grid, stream, ...) kernel<<<grid, THREADS, 0, stream>>>(__VA_ARGS__)
#endif

namespace foldspec {

constexpr int CHUNK = 4096, HALVINGS = 100;
constexpr double NEGLIGIBLE = 1e-12;  // as in foldspec/laws.py

enum Kind { EXACT, MATCH, LINEAR, LENIENCE, CACTUS, TYPICAL, UNVERIFIED, FORCED };
enum Divergence { TAYLOR, CHI2, TV, EXACT_KL };

// Of one chunk of a row: the sum of exp(s - top), and of something else that a rule asks for.
struct Sum {
  double top, sum, also;
};

struct Draft {
  double times;
  int32_t stands, outside, instead, finite;
};

// Where the token of a request comes from: `token` if it is known, else a draw from row `slot`.
struct Ruling {
  double total, q_total, times, peak;
  int64_t position;
  int32_t slot, token, residual;
};

struct Tail {
  Best<double> own, residual;
  double left;
};

// As Blocks of foldspec/kernels/verify: R requests, D drafts, V ids.
struct Verify {
  const void* logits;
  const int64_t *first, *counts, *drafts, *positions, *keys;
  const double *temperatures, *shares;
  const float* floor;
  const int64_t* last;
  const void* q;
  const int64_t *q_rows, *forced;
  int64_t* found;  // [R, 3 + D]: accepted, token, sound, outside
  void* room;      // foldspec_verify_room bytes
  int64_t step, vocabulary, requests, most, q_count;
  double leniency, factor;
  int32_t bf16, q_wide, kind, divergence, relaxed, mixture, greedy, mass;

  // The room's parts.
  Best<float>* peaks;
  Sum* sums;
  Best<double>* drawn;
  Draft* by_draft;
  Ruling* rulings;
  Tail* tails;

  __host__ __device__ int chunks() const { return static_cast<int>((vocabulary + CHUNK - 1) / CHUNK); }
  __host__ __device__ int64_t slots() const { return requests * (most + 1); }
};

__device__ inline float number(float x) { return x; }
__device__ inline float number(__nv_bfloat16 x) { return __bfloat162float(x); }

// Logits of one row as its law has them.
template <class T>
struct Row {
  const T* x;
  double temperature, peak;
  const float* floor;
  int64_t last;

  __device__ Row(const Verify& v, int64_t request, int64_t place, double peak)
      : temperature(v.temperatures[request]), peak(peak) {
    const int64_t row = v.first[request] + place;
    x = static_cast<const T*>(v.logits) + row * v.step;
    floor = temperature > 0 && v.floor != nullptr ? v.floor + row : nullptr;
    last = floor != nullptr ? v.last[row] : 0;
  }

  // Processed, and at temperature 0 as it is; -inf for an id that is filtered out.
  __device__ double operator[](int64_t id) const {
    const double raw = number(x[id]);
    if (!(temperature > 0)) return raw;
    const float s = static_cast<float>((raw - peak) / temperature);
    return floor == nullptr || s > *floor || (s == *floor && id <= last) ? s : -INFINITY;
  }

  // The largest of these, for an exponential that does not overflow.
  __device__ double top() const { return temperature > 0 ? 0.0 : peak; }
};

__device__ inline double drawn_from(const Verify& v, int64_t row, int64_t id) {
  const int64_t at = row * v.vocabulary + id;
  return v.q_wide ? static_cast<const double*>(v.q)[at] : static_cast<const float*>(v.q)[at];
}

// The row of a draft's law; -1: a point mass.
__device__ inline int64_t q_row(const Verify& v, int64_t request, int64_t place) {
  return v.q_rows == nullptr ? -1 : v.q_rows[request * v.most + place];
}

// The chunks of a row, by a block of threads or by a warp.
template <bool BLOCK, class F>
__device__ inline Best<F> best_of(const Best<F>* parts, int chunks) {
  Best<F> mine = nothing<F>();
  for (int c = BLOCK ? threadIdx.x : threadIdx.x % WARP; c < chunks; c += BLOCK ? THREADS : WARP)
    mine = better(mine, parts[c]);
  return BLOCK ? block_best(mine) : warp_best(mine);
}

// The log-sum-exp of a row; `also` gets the second sum, where every chunk has the same top.
template <bool BLOCK>
__device__ inline double total_of(const Sum* parts, int chunks, double* also) {
  const int begin = BLOCK ? threadIdx.x : threadIdx.x % WARP, step = BLOCK ? THREADS : WARP;
  Best<double> top = nothing<double>();
  for (int c = begin; c < chunks; c += step) top = better(top, Best<double>{parts[c].top, c});
  const double most = (BLOCK ? block_best(top) : warp_best(top)).value;
  double sum = 0.0, second = 0.0;
  for (int c = begin; c < chunks; c += step) {
    sum += parts[c].top == most ? parts[c].sum : parts[c].sum * exp(parts[c].top - most);
    second += parts[c].also;
  }
  sum = BLOCK ? block_sum(sum) : warp_sum(sum);
  second = BLOCK ? block_sum(second) : warp_sum(second);
  if (also != nullptr) *also = second / sum;
  return most + log(sum);
}

template <class T>
__global__ void __launch_bounds__(THREADS) peaks(Verify v) {
  const int64_t slot = blockIdx.y, request = slot / (v.most + 1), place = slot % (v.most + 1);
  if (place > v.counts[request]) return;
  const T* x = static_cast<const T*>(v.logits) + (v.first[request] + place) * v.step;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * CHUNK, end = min(v.vocabulary, begin + CHUNK);
  Best<float> mine = nothing<float>();
#pragma unroll 4
  for (int64_t id = begin + threadIdx.x; id < end; id += THREADS)
    mine = better(mine, Best<float>{number(x[id]), static_cast<int32_t>(id)});
  mine = block_best(mine);
  if (threadIdx.x == 0) v.peaks[slot * v.chunks() + blockIdx.x] = mine;
}

__device__ inline void drafted_totals(const Verify& v, int64_t row, int64_t begin, int64_t end, Sum* into) {
  double top = -INFINITY, sum = 0.0;
  for (int64_t id = begin + threadIdx.x; id < end; id += THREADS) {
    const double s = drawn_from(v, row, id);
    if (s > top) top = s;
  }
  top = block_best(Best<double>{top, 0}).value;
  for (int64_t id = begin + threadIdx.x; id < end; id += THREADS) {
    const double s = drawn_from(v, row, id);
    if (s != -INFINITY) sum += exp(s - top);  // NaN, of a broken drafter, stays
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) *into = Sum{top, sum, 0.0};
}

template <class T>
__global__ void __launch_bounds__(THREADS) totals(Verify v) {
  const int64_t slot = blockIdx.y, begin = static_cast<int64_t>(blockIdx.x) * CHUNK;
  const int64_t end = min(v.vocabulary, begin + CHUNK);
  Sum* into = v.sums + slot * v.chunks() + blockIdx.x;
  if (slot >= v.slots()) return drafted_totals(v, slot - v.slots(), begin, end, into);
  const int64_t request = slot / (v.most + 1), place = slot % (v.most + 1);
  if (place > v.counts[request]) return;
  const Row<T> row(v, request, place, best_of<true>(v.peaks + slot * v.chunks(), v.chunks()).value);
  if (!isfinite(row.peak)) return;
  const int64_t draft = place < v.counts[request] ? v.drafts[request * v.most + place] : -1;
  const double top = row.top();
  double sum = 0.0, also = 0.0;
  Best<double> own = nothing<double>();
  for (int64_t pair = begin / 2 + threadIdx.x; 2 * pair < end; pair += THREADS) {
    double noise[2];
    if (v.kind == MATCH) gumbel(pair, v.positions[request] + place, TARGET, v.keys + 2 * request, noise);
    for (int odd = 0; odd < 2 && 2 * pair + odd < end; odd++) {
      const int64_t id = 2 * pair + odd;
      const double s = row[id];
      if (s == -INFINITY) continue;
      if (v.kind == MATCH) {
        own = better(own, Best<double>{s + noise[odd], static_cast<int32_t>(id)});
        continue;
      }
      const double mass = exp(s - top);
      sum += mass;
      also += v.kind == TYPICAL ? mass * (s - top) : id != draft ? mass : 0.0;
    }
  }
  if (v.kind == MATCH) {
    own = block_best(own);
    if (threadIdx.x == 0) v.drawn[slot * v.chunks() + blockIdx.x] = own;
    return;
  }
  sum = block_sum(sum);
  also = block_sum(also);
  if (threadIdx.x == 0) *into = Sum{top, sum, also};
}

// The sums of a draft's law.
__device__ inline const Sum* q_sums(const Verify& v, int64_t row) { return v.sums + (v.slots() + row) * v.chunks(); }

template <class T>
__global__ void __launch_bounds__(THREADS) mixtures(Verify v) {
  const int64_t request = blockIdx.y / v.most, place = blockIdx.y % v.most, slot = request * (v.most + 1) + place;
  if (place >= v.counts[request] || v.temperatures[request] > 0) return;
  const Row<T> row(v, request, place, best_of<true>(v.peaks + slot * v.chunks(), v.chunks()).value);
  if (!isfinite(row.peak)) return;
  const double total = total_of<true>(v.sums + slot * v.chunks(), v.chunks(), nullptr), share = v.shares[place];
  const int64_t drafted = q_row(v, request, place), draft = v.drafts[request * v.most + place];
  const double q_total = drafted < 0 ? 0.0 : total_of<true>(q_sums(v, drafted), v.chunks(), nullptr);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * CHUNK, end = min(v.vocabulary, begin + CHUNK);
  Best<double> mine = nothing<double>();
  for (int64_t id = begin + threadIdx.x; id < end; id += THREADS) {
    const double q = drafted < 0 ? id == draft : exp(drawn_from(v, drafted, id) - q_total);
    const double mass = (1 - share) * exp(row[id] - total) + share * q;
    mine = better(mine, Best<double>{mass, static_cast<int32_t>(id)});
  }
  mine = block_best(mine);
  if (threadIdx.x == 0) v.drawn[slot * v.chunks() + blockIdx.x] = mine;
}

// g - a of the rule cactus, at most `others`, which is 1 - a.
__device__ inline double raised_by(const Verify& v, double a, double others) {
  const double delta = v.leniency;
  if (!(a > 0) || !(delta > 0)) return 0.0;
  if (v.divergence == TV) return min(others, delta);
  if (v.divergence != EXACT_KL) return min(others, sqrt((v.divergence == TAYLOR ? 2 : 1) * delta * a * others));
  if (!(others > 0) || -log(a) <= delta) return others;
  double low = 0.0, high = others;
  for (int i = 0; i < HALVINGS; i++) {
    const double step = (low + high) / 2;
    double spent = (a + step) * log1p(step / a);
    if (step < others) spent += (others - step) * log1p(-step / others);
    (spent <= delta ? low : high) = step;
  }
  return low;
}

// One warp: draft `place` of a request, all lanes alike.
template <class T>
__device__ inline Draft judged(const Verify& v, int64_t request, int64_t place, Best<float> peak) {
  const int64_t slot = request * (v.most + 1) + place, draft = v.drafts[request * v.most + place];
  const bool warm = v.temperatures[request] > 0, known = draft >= 0 && draft < v.vocabulary;
  const bool top = draft == peak.id;
  Draft d{1.0, 0, 0, warm ? -1 : peak.id, 1};
  if (v.kind == FORCED) {
    d.stands = place < v.forced[request];
    return d;
  }
  if (v.kind == MATCH) {
    d.instead = warm ? best_of<false>(v.drawn + slot * v.chunks(), v.chunks()).id : peak.id;
    d.stands = draft == d.instead;
    return d;
  }
  const bool raw_asked = (v.kind == LENIENCE && v.leniency < 1) || v.mixture;
  double p = top, raw = 0.0, total = 0.0, also = 0.0;
  if (warm || raw_asked) {
    total = total_of<false>(v.sums + slot * v.chunks(), v.chunks(), &also);
    raw = known ? exp(Row<T>(v, request, place, peak.value)[draft] - total) : 0.0;
    if (warm) p = raw;
  }
  d.outside = v.kind != EXACT && p == 0;
  if (v.kind == UNVERIFIED) {
    d.stands = 1;
    return d;
  }
  if (v.kind == EXACT && !warm) {
    d.stands = top;
    return d;
  }
  const int64_t drafted = q_row(v, request, place);
  const double q = drafted < 0 ? 1.0
                   : known     ? exp(drawn_from(v, drafted, draft) - total_of<false>(q_sums(v, drafted), v.chunks(), nullptr))
                               : 0.0;
  double allowed = p;
  if (v.kind == LINEAR) {
    allowed = (1 - v.shares[place]) * p + v.shares[place] * q;
    if (v.mixture && !warm) {
      if (v.shares[place] > 0) d.instead = best_of<false>(v.drawn + slot * v.chunks(), v.chunks()).id;
      allowed = draft == d.instead;
    }
  } else if (v.kind == LENIENCE) {
    allowed = p / v.leniency;
    if (!warm && v.leniency < 1) allowed = top || (known && raw >= v.leniency * exp(peak.value - total));
    if (v.relaxed) d.times = v.leniency;
  } else if (v.kind == CACTUS) {
    const double others = warm && p >= 0.9 ? also : 1 - p, step = raised_by(v, p, others);
    allowed = p + step;
    if (v.relaxed && step < others) d.times = others / (others - step);
  } else if (v.kind == TYPICAL) {
    const double entropy = warm ? total - also : 0.0;
    allowed = p > min(v.leniency, v.factor * exp(-entropy));
    d.instead = peak.id;
  }
  // strictly less: a mass of 0 is refused by a number of 0 too, and NaN by every number
  d.stands = uniform(v.positions[request] + place, ACCEPT, v.keys + 2 * request) * q < allowed;
  return d;
}

// One block a request: as many registers as it needs, or the compiler keeps to 64 and spills.
template <class T>
__global__ void __launch_bounds__(THREADS, 1) decide(Verify v) {
  const int64_t request = blockIdx.x, count = v.counts[request], slots = request * (v.most + 1);
  for (int64_t place = threadIdx.x / WARP; place <= count; place += WARPS) {
    const Best<float> peak = best_of<false>(v.peaks + (slots + place) * v.chunks(), v.chunks());
    Draft d{1.0, 0, 0, peak.id, 0};
    if (isfinite(peak.value)) {
      if (place < count) d = judged<T>(v, request, place, peak);
      else if (v.kind == MATCH && v.temperatures[request] > 0)
        d.instead = best_of<false>(v.drawn + (slots + place) * v.chunks(), v.chunks()).id;
      d.finite = 1;
    }
    if (threadIdx.x % WARP == 0) v.by_draft[slots + place] = d;
  }
  __syncthreads();
  const Draft* drafts = v.by_draft + slots;
  __shared__ int64_t accepted, sound;
  if (threadIdx.x == 0) {
    sound = 0;
    while (sound <= count && drafts[sound].finite) sound++;
    accepted = 0;
    while (accepted < count && drafts[accepted].finite && drafts[accepted].stands) accepted++;
  }
  __syncthreads();
  const int64_t slot = slots + accepted;
  const bool ended = accepted == count, warm = v.temperatures[request] > 0;
  const Best<float> peak = best_of<true>(v.peaks + slot * v.chunks(), v.chunks());
  Ruling r{0.0, 0.0, drafts[accepted].times, peak.value, v.positions[request] + accepted, static_cast<int32_t>(accepted),
           warm ? -1 : peak.id, 0};
  if (v.kind == MATCH) r.token = drafts[accepted].instead;
  else if (v.kind == UNVERIFIED && count > 0) r.token = static_cast<int32_t>(v.drafts[request * v.most + count - 1]);
  else if (v.kind != UNVERIFIED && v.kind != FORCED && !ended) {
    r.token = drafts[accepted].instead;
    r.residual = 1;
  }
  if (accepted >= sound) r.token = 0;  // no token means anything
  if (r.token < 0 && r.residual) {
    r.total = total_of<true>(v.sums + slot * v.chunks(), v.chunks(), nullptr);
    const int64_t drafted = q_row(v, request, accepted);
    if (drafted >= 0) r.q_total = total_of<true>(q_sums(v, drafted), v.chunks(), nullptr);
  }
  int64_t* found = v.found + request * (3 + v.most);
  for (int64_t place = threadIdx.x; place < v.most; place += THREADS)
    found[3 + place] = place < accepted && drafts[place].outside;
  if (threadIdx.x == 0) {
    v.rulings[request] = r;
    found[0] = accepted;
    found[1] = r.token;
    found[2] = sound;
  }
}

template <class T>
__global__ void __launch_bounds__(THREADS) draw(Verify v) {
  const int64_t request = blockIdx.y;
  const Ruling r = v.rulings[request];
  if (r.token >= 0) return;
  const Row<T> row(v, request, r.slot, r.peak);
  const int64_t draft = r.residual ? v.drafts[request * v.most + r.slot] : -1;
  const int64_t drafted = r.residual ? q_row(v, request, r.slot) : -1;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * CHUNK, end = min(v.vocabulary, begin + CHUNK);
  Best<double> own = nothing<double>(), residual = nothing<double>();
  double left = 0.0;
  for (int64_t pair = begin / 2 + threadIdx.x; 2 * pair < end; pair += THREADS) {
    double noise[2];
    gumbel(pair, r.position, r.residual ? RESIDUAL : TARGET, v.keys + 2 * request, noise);
    for (int odd = 0; odd < 2 && 2 * pair + odd < end; odd++) {
      const int64_t id = 2 * pair + odd;
      const double s = row[id];
      own = better(own, Best<double>{s + noise[odd], static_cast<int32_t>(id)});
      if (!r.residual) continue;
      const double q = drafted < 0 ? id == draft : exp(drawn_from(v, drafted, id) - r.q_total);
      const double above = exp(s - r.total) - r.times * q, mass = above < 0 ? 0.0 : above;  // NaN stays
      left += mass;
      if (mass > 0) residual = better(residual, Best<double>{log(mass) + noise[odd], static_cast<int32_t>(id)});
    }
  }
  own = block_best(own);
  residual = block_best(residual);
  left = block_sum(left);
  if (threadIdx.x == 0) v.tails[request * v.chunks() + blockIdx.x] = Tail{own, residual, left};
}

__global__ void __launch_bounds__(THREADS) pick(Verify v) {
  const int64_t request = blockIdx.x;
  const Ruling r = v.rulings[request];
  if (r.token >= 0) return;
  Best<double> own = nothing<double>(), residual = nothing<double>();
  double left = 0.0;
  for (int c = threadIdx.x; c < v.chunks(); c += THREADS) {
    const Tail tail = v.tails[request * v.chunks() + c];
    own = better(own, tail.own);
    residual = better(residual, tail.residual);
    left += tail.left;
  }
  own = block_best(own);
  residual = block_best(residual);
  left = block_sum(left);
  // where nothing is left but rounding, or q is NaN: p itself
  if (threadIdx.x == 0) v.found[request * (3 + v.most) + 1] = r.residual && left > NEGLIGIBLE ? residual.id : own.id;
}

// Gives the room's parts their places; their bytes together.
inline int64_t furnish(Verify* v) {
  const int64_t chunks = v->chunks(), slots = v->slots();
  int64_t used = 0;
  const auto part = [&](auto** place, int64_t count) {
    *place = reinterpret_cast<std::remove_reference_t<decltype(*place)>>(static_cast<char*>(v->room) + used);
    used += (count * static_cast<int64_t>(sizeof(**place)) + 255) / 256 * 256;
  };
  part(&v->peaks, slots * chunks);
  part(&v->by_draft, slots);
  part(&v->rulings, v->requests);
  if (v->mass) {
    part(&v->sums, (slots + v->q_count) * chunks);
    part(&v->drawn, slots * chunks);
    part(&v->tails, v->requests * chunks);
  }
  return used;
}

template <class T>
int run(Verify v, cudaStream_t stream) {
  const unsigned chunks = v.chunks(), slots = static_cast<unsigned>(v.slots()), requests = v.requests;
  LAUNCH(peaks<T>, dim3(chunks, slots), stream, v);
  if (v.mass) LAUNCH(totals<T>, dim3(chunks, slots + static_cast<unsigned>(v.q_count)), stream, v);
  if (v.mixture && v.most > 0) LAUNCH(mixtures<T>, dim3(chunks, requests * static_cast<unsigned>(v.most)), stream, v);
  LAUNCH(decide<T>, dim3(requests), stream, v);
  if (!v.greedy) {
    LAUNCH(draw<T>, dim3(chunks, requests), stream, v);
    LAUNCH(pick, dim3(requests), stream, v);
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace foldspec

#define EXPORT extern "C" __attribute__((visibility("default")))

// Bytes of working memory for these blocks.
EXPORT int64_t foldspec_verify_room(const foldspec::Verify* given) {
  foldspec::Verify v = *given;
  v.room = nullptr;
  return foldspec::furnish(&v);
}

// Launches on the stream and returns at once: 0, or CUDA's number for what is wrong.
EXPORT int foldspec_verify(const foldspec::Verify* given, void* stream) {
  foldspec::Verify v = *given;
  foldspec::furnish(&v);
  const auto on = static_cast<cudaStream_t>(stream);
  return v.bf16 ? foldspec::run<__nv_bfloat16>(v, on) : foldspec::run<float>(v, on);
}

EXPORT const char* foldspec_error(int number) { return cudaGetErrorString(static_cast<cudaError_t>(number)); }
