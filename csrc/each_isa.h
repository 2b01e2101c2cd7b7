// Includes SOURCE once for every instruction set of this architecture, each time in a namespace of that name and with
// the compiler allowed to use its instructions. SOURCE then sees LANES defined and gives its kernels alone.
//
// GCC and clang spell "the functions from here on may use these instructions" differently.
#define FOLDSPEC_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define BEGIN_TARGET(t) FOLDSPEC_PRAGMA(clang attribute push(__attribute__((target(t))), apply_to = function))
#define END_TARGET FOLDSPEC_PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(t) FOLDSPEC_PRAGMA(GCC push_options) FOLDSPEC_PRAGMA(GCC target(t))
#define END_TARGET FOLDSPEC_PRAGMA(GCC pop_options)
#endif

#if defined(__x86_64__)
BEGIN_TARGET("avx512f,avx2,fma")
#define LANES avx512
#define LANES_AVX512
#include "lanes.h"
#include SOURCE
#undef LANES
#undef LANES_AVX512
END_TARGET
BEGIN_TARGET("avx2,fma")
#define LANES avx2
#define LANES_AVX2
#include "lanes.h"
#include SOURCE
#undef LANES
#undef LANES_AVX2
END_TARGET
#elif defined(__aarch64__)
#define LANES neon
#define LANES_NEON
#include "lanes.h"
#include SOURCE
#undef LANES
#undef LANES_NEON
#endif
#define LANES portable
#define LANES_PORTABLE
#include "lanes.h"
#include SOURCE
#undef LANES
#undef LANES_PORTABLE

// CALL(isa, f(x)): f of the namespace that `isa` names.
#if defined(__x86_64__)
#define CALL(isa, f)                         \
  do {                                       \
    if ((isa) == AVX512) avx512::f;          \
    else if ((isa) == AVX2) avx2::f;         \
    else portable::f;                        \
  } while (0)
#elif defined(__aarch64__)
#define CALL(isa, f)                         \
  do {                                       \
    if ((isa) == NEON) neon::f;              \
    else portable::f;                        \
  } while (0)
#else
#define CALL(isa, f) portable::f
#endif
