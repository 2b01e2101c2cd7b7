// One vector of W floats and what the kernels do with it, for the instruction set that each_isa.h is at. No guard: it
// is included once for each.
namespace foldspec {
namespace LANES {

#define LANES_INLINE static inline __attribute__((always_inline))

#if defined(LANES_AVX512)

using V = __m512;
constexpr int W = 16;
constexpr int ROWS = 8;  // rows of a register tile: 8 x 3 accumulators of 32 registers
LANES_INLINE V zero() { return _mm512_setzero_ps(); }
LANES_INLINE V all(float x) { return _mm512_set1_ps(x); }
LANES_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
LANES_INLINE V load(const bf16* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
LANES_INLINE V load(const float* p, int n) { return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p); }
LANES_INLINE void store(float* p, V x) { _mm512_storeu_ps(p, x); }
LANES_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
LANES_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
LANES_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
LANES_INLINE V div(V a, V b) { return _mm512_div_ps(a, b); }
LANES_INLINE V min(V a, V b) { return _mm512_min_ps(a, b); }
LANES_INLINE V max(V a, V b) { return _mm512_max_ps(a, b); }
LANES_INLINE V where_less(V a, V b, V x, V y) {  // a < b ? x : y
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
LANES_INLINE V nearest(V x) { return _mm512_cvtepi32_ps(_mm512_cvtps_epi32(x)); }
LANES_INLINE V power_of_two(V n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
LANES_INLINE __m256 half(V a) {
  const __m256 low = _mm512_castps512_ps256(a);
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
  return _mm256_add_ps(low, high);
}
LANES_INLINE __m128 quarter(V a) {
  const __m256 h = half(a);
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

#elif defined(LANES_AVX2)

using V = __m256;
constexpr int W = 8;
constexpr int ROWS = 4;  // 4 x 3 accumulators of 16 registers
LANES_INLINE V zero() { return _mm256_setzero_ps(); }
LANES_INLINE V all(float x) { return _mm256_set1_ps(x); }
LANES_INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
LANES_INLINE V load(const bf16* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
LANES_INLINE V load(const float* p, int n) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), index));
}
LANES_INLINE void store(float* p, V x) { _mm256_storeu_ps(p, x); }
LANES_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
LANES_INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
LANES_INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
LANES_INLINE V div(V a, V b) { return _mm256_div_ps(a, b); }
LANES_INLINE V min(V a, V b) { return _mm256_min_ps(a, b); }
LANES_INLINE V max(V a, V b) { return _mm256_max_ps(a, b); }
LANES_INLINE V where_less(V a, V b, V x, V y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
LANES_INLINE V nearest(V x) { return _mm256_cvtepi32_ps(_mm256_cvtps_epi32(x)); }
LANES_INLINE V power_of_two(V n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
LANES_INLINE __m128 quarter(V a) { return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)); }

#elif defined(LANES_NEON)

using V = float32x4_t;
constexpr int W = 4;
constexpr int ROWS = 4;
LANES_INLINE V zero() { return vdupq_n_f32(0); }
LANES_INLINE V all(float x) { return vdupq_n_f32(x); }
LANES_INLINE V load(const float* p) { return vld1q_f32(p); }
LANES_INLINE V load(const bf16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16));
}
LANES_INLINE V load(const float* p, int n) {
  float padded[W] = {};
  for (int i = 0; i < n; i++) padded[i] = p[i];
  return vld1q_f32(padded);
}
LANES_INLINE void store(float* p, V x) { vst1q_f32(p, x); }
LANES_INLINE V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
LANES_INLINE V add(V a, V b) { return vaddq_f32(a, b); }
LANES_INLINE V mul(V a, V b) { return vmulq_f32(a, b); }
LANES_INLINE V div(V a, V b) { return vdivq_f32(a, b); }
LANES_INLINE V min(V a, V b) { return vminq_f32(a, b); }
LANES_INLINE V max(V a, V b) { return vmaxq_f32(a, b); }
LANES_INLINE V where_less(V a, V b, V x, V y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
LANES_INLINE V nearest(V x) { return vrndnq_f32(x); }
LANES_INLINE V power_of_two(V n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}

#else  // plain C++

struct V {
  float lane[8];
};
constexpr int W = 8;
constexpr int ROWS = 4;
#define EACH_LANE(expression)                       \
  V out;                                            \
  for (int i = 0; i < W; i++) out.lane[i] = expression; \
  return out
LANES_INLINE V all(float x) { EACH_LANE(x); }
LANES_INLINE V zero() { return all(0); }
LANES_INLINE V load(const float* p) { EACH_LANE(p[i]); }
LANES_INLINE V load(const bf16* p) {
  V out;
  for (int i = 0; i < W; i++) {
    const uint32_t bits = static_cast<uint32_t>(p[i].bits) << 16;
    std::memcpy(&out.lane[i], &bits, sizeof bits);
  }
  return out;
}
LANES_INLINE V load(const float* p, int n) { EACH_LANE(i < n ? p[i] : 0.0f); }
LANES_INLINE void store(float* p, V x) {
  for (int i = 0; i < W; i++) p[i] = x.lane[i];
}
LANES_INLINE V fma(V a, V b, V c) { EACH_LANE(a.lane[i] * b.lane[i] + c.lane[i]); }
LANES_INLINE V add(V a, V b) { EACH_LANE(a.lane[i] + b.lane[i]); }
LANES_INLINE V mul(V a, V b) { EACH_LANE(a.lane[i] * b.lane[i]); }
LANES_INLINE V div(V a, V b) { EACH_LANE(a.lane[i] / b.lane[i]); }
LANES_INLINE V min(V a, V b) { EACH_LANE(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
LANES_INLINE V max(V a, V b) { EACH_LANE(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
LANES_INLINE V where_less(V a, V b, V x, V y) { EACH_LANE(a.lane[i] < b.lane[i] ? x.lane[i] : y.lane[i]); }
LANES_INLINE V nearest(V x) { EACH_LANE(std::nearbyint(x.lane[i])); }
LANES_INLINE V power_of_two(V n) {
  V out;
  for (int i = 0; i < W; i++) {
    // NaN has no integer, and needs none: what it multiplies is NaN
    const int32_t whole = n.lane[i] == n.lane[i] ? static_cast<int32_t>(n.lane[i]) : 0;
    const uint32_t bits = static_cast<uint32_t>(whole + 127) << 23;
    std::memcpy(&out.lane[i], &bits, sizeof bits);
  }
  return out;
}
#undef EACH_LANE

#endif

// The first n < W bf16 values, zeros after them; nothing beyond is read.
LANES_INLINE V load(const bf16* p, int n) {
  bf16 padded[W] = {};
  for (int i = 0; i < n; i++) padded[i] = p[i];
  return load(padded);
}

// The first n <= W lanes, and nothing beyond.
LANES_INLINE void store(float* p, V x, int n) {
  if (n == W) return store(p, x);
  float lane[W];
  store(lane, x);
  for (int i = 0; i < n; i++) p[i] = lane[i];
}

// Sums of the lanes of four vectors, each by the same tree: halves onto each other, then (0 + 1) + (2 + 3).
#if defined(LANES_AVX512) || defined(LANES_AVX2)
LANES_INLINE void sums(V a, V b, V c, V d, float* out) {
  const __m128 ab = _mm_hadd_ps(quarter(a), quarter(b)), cd = _mm_hadd_ps(quarter(c), quarter(d));
  _mm_storeu_ps(out, _mm_hadd_ps(ab, cd));
}
#elif defined(LANES_NEON)
LANES_INLINE void sums(V a, V b, V c, V d, float* out) {
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}
#else
LANES_INLINE void sums(V a, V b, V c, V d, float* out) {
  const V four[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++) {
    float q[4];
    for (int j = 0; j < 4; j++) q[j] = four[i].lane[j] + four[i].lane[j + 4];
    out[i] = (q[0] + q[1]) + (q[2] + q[3]);
  }
}
#endif
LANES_INLINE float sum(V a) {
  float out[4];
  sums(a, a, a, a, out);
  return out[0];
}
#if defined(LANES_AVX512)
LANES_INLINE float largest(V a) { return _mm512_reduce_max_ps(a); }
#else
LANES_INLINE float largest(V a) {
  float lane[W];
  store(lane, a);
  float top = lane[0];
  for (int i = 1; i < W; i++) top = std::max(top, lane[i]);
  return top;
}
#endif

// rows[j] + at, SQUARE floats each, for SQUARE rows -> to[i * step + j].
#if defined(LANES_AVX512)
constexpr int SQUARE = 16;
LANES_INLINE void transpose(const float* const* rows, int64_t at, float* to, int64_t step) {
  __m512 a[16], b[16];
  for (int j = 0; j < 16; j++) a[j] = load(rows[j] + at);
  for (int j = 0; j < 16; j += 2) {
    b[j] = _mm512_unpacklo_ps(a[j], a[j + 1]);
    b[j + 1] = _mm512_unpackhi_ps(a[j], a[j + 1]);
  }
  for (int j = 0; j < 16; j += 4) {  // a[j + c]: column c of each quarter, of rows j .. j+3
    const __m512d low = _mm512_castps_pd(b[j]), high = _mm512_castps_pd(b[j + 1]);
    const __m512d low2 = _mm512_castps_pd(b[j + 2]), high2 = _mm512_castps_pd(b[j + 3]);
    a[j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, low2));
    a[j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, low2));
    a[j + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high, high2));
    a[j + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high, high2));
  }
  for (int c = 0; c < 4; c++) {  // quarters of the four groups of rows onto their places
    const __m512 even = _mm512_shuffle_f32x4(a[c], a[c + 4], 0x88), odd = _mm512_shuffle_f32x4(a[c], a[c + 4], 0xdd);
    const __m512 even2 = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0x88);
    const __m512 odd2 = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0xdd);
    store(to + c * step, _mm512_shuffle_f32x4(even, even2, 0x88));
    store(to + (c + 4) * step, _mm512_shuffle_f32x4(odd, odd2, 0x88));
    store(to + (c + 8) * step, _mm512_shuffle_f32x4(even, even2, 0xdd));
    store(to + (c + 12) * step, _mm512_shuffle_f32x4(odd, odd2, 0xdd));
  }
}
#elif defined(__x86_64__)
constexpr int SQUARE = 4;
LANES_INLINE void transpose(const float* const* rows, int64_t at, float* to, int64_t step) {
  __m128 a = _mm_loadu_ps(rows[0] + at), b = _mm_loadu_ps(rows[1] + at);
  __m128 c = _mm_loadu_ps(rows[2] + at), d = _mm_loadu_ps(rows[3] + at);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(to, a);
  _mm_storeu_ps(to + step, b);
  _mm_storeu_ps(to + 2 * step, c);
  _mm_storeu_ps(to + 3 * step, d);
}
#else
constexpr int SQUARE = 4;
LANES_INLINE void transpose(const float* const* rows, int64_t at, float* to, int64_t step) {
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) to[i * step + j] = rows[j][at + i];
}
#endif

// exp(x) to about an ulp for x in -87.3 .. 88 (clamped beyond; NaN stays NaN): Cody and Waite's reduction, Cephes'
// polynomial. One function for every lane of every vector: a row's values cannot depend on where the row lies.
LANES_INLINE V exp(V x) {
  x = max(all(-87.33f), min(all(88.0f), x));
  const V n = nearest(mul(x, all(1.44269504088896341f)));
  V r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  V p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), all(1.0f));
  return mul(p, power_of_two(n));
}

}  // namespace LANES
}  // namespace foldspec
