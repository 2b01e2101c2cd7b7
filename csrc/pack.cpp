// Rows of a checkpoint's matrix into the panels that csrc/linear.cpp reads (foldspec/kernels/pack/reference.py), with
// bf16 widened to fp32 on the way where weights are held so.
//
// Numbers are moved and nothing is computed, so one code serves all instruction sets: vectors of 16 bytes, which every
// CPU of these architectures has. What is read is hoped to lie in the inner cache, and is read once.
#include "common.h"

using namespace foldspec;

namespace {

constexpr int64_t PANEL = 16;  // as panels.py has it
constexpr int64_t LINE = 64;   // bytes of a cache line

template <class T>
struct Block {  // so many rows and columns are transposed in registers
  typedef T Vector __attribute__((vector_size(16)));
  static constexpr int SIZE = 16 / sizeof(T);
};

// One number of a, one of b, and so on: the lower halves, or the upper ones.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(a){__VA_ARGS__})
#endif
using Shorts = Block<uint16_t>::Vector;
using Words = Block<uint32_t>::Vector;
inline Shorts low(Shorts a, Shorts b) { return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Shorts high(Shorts a, Shorts b) { return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
inline Words low(Words a, Words b) { return SHUFFLE(a, b, 0, 4, 1, 5); }
inline Words high(Words a, Words b) { return SHUFFLE(a, b, 2, 6, 3, 7); }

// Eight bf16, or four numbers that stay as they are.
inline void put(Shorts x, uint16_t* to) { std::memcpy(to, &x, sizeof x); }
inline void put(Words x, uint32_t* to) { std::memcpy(to, &x, sizeof x); }
inline void put(Shorts x, uint32_t* to) {
  for (int i = 0; i < 8; i++) to[i] = static_cast<uint32_t>(x[i]) << 16;
}

inline void put(uint16_t x, uint16_t* to) { *to = x; }
inline void put(uint32_t x, uint32_t* to) { *to = x; }
inline void put(uint16_t x, uint32_t* to) { *to = static_cast<uint32_t>(x) << 16; }

// A square block of a panel: SIZE rows, `width` apart, of SIZE columns. Interleaving the upper half of the rows with the
// lower half, log2(SIZE) times, transposes it.
template <class T, class H>
inline void transpose(const T* from, int64_t width, H* to) {
  constexpr int N = Block<T>::SIZE;
  typename Block<T>::Vector x[N], y[N];
  for (int i = 0; i < N; i++) std::memcpy(&x[i], from + i * width, sizeof x[i]);
  for (int done = 1; done < N; done *= 2) {
    for (int i = 0; i < N / 2; i++) {
      y[2 * i] = low(x[i], x[i + N / 2]);
      y[2 * i + 1] = high(x[i], x[i + N / 2]);
    }
    std::memcpy(x, y, sizeof x);
  }
  for (int i = 0; i < N; i++) put(x[i], to + i * PANEL);
}

template <class T, class H>
void panel(const T* from, int64_t height, int64_t width, H* to) {
  constexpr int64_t N = Block<T>::SIZE, COLUMNS = LINE / sizeof(T);
  const int64_t whole = height == PANEL ? width / N * N : 0;
  // Rows may lie a power of two apart, and then share one set of the innermost cache, which holds 8 lines or more: so
  // no more than 8 rows at a time, and all of a line while it is there.
  for (int64_t begin = 0; begin < whole; begin += COLUMNS)
    for (int64_t r = 0; r < PANEL; r += N)
      for (int64_t k = begin; k < std::min(whole, begin + COLUMNS); k += N)
        transpose(from + r * width + k, width, to + k * PANEL + r);
  for (int64_t k = whole; k < width; k++)
    for (int64_t r = 0; r < height; r++) put(from[r * width + k], to + k * height + r);
}

template <class T, class H>
void pack(const T* from, int64_t rows, int64_t width, H* to) {
  for (int64_t r = 0; r < rows; r += PANEL) panel(from + r * width, std::min(PANEL, rows - r), width, to + r * width);
}

}  // namespace

// from and to [rows, width] of numbers of so many bytes: 2 and 2, 4 and 4, or 2 (bf16) and 4 (fp32).
EXPORT void foldspec_pack(const void* from, void* to, int64_t rows, int64_t width, int bytes, int held) {
  const auto shorts = static_cast<const uint16_t*>(from);
  if (bytes == 4) pack(static_cast<const uint32_t*>(from), rows, width, static_cast<uint32_t*>(to));
  else if (held == 2) pack(shorts, rows, width, static_cast<uint16_t*>(to));
  else pack(shorts, rows, width, static_cast<uint32_t*>(to));
}
