// Loops that show the limits of a processor: of one instruction on registers, without loads, and of loads alone.
// Compiled once for each instruction set, with the name of its loops as ANTIPHON_LOOPS; simd.h lists the rules for such
// files.
//
// Loops on registers have enough chains of additions to hide the latency of the instruction.
#include "bare_loops.h"
#include "simd.h"
#if defined(__AMX_INT8__)
#include "kernels.h"
#include "tile_config.h"
#endif

namespace antiphon {
namespace {

#if defined(__AVX512VNNI__)

constexpr int kBareChains = 24;

// A step: one instruction of a product, which adds kWork products.
struct BareDotStep {
  typedef __m512i Register;
  static constexpr int64_t kWork = 64;
  static ANTIPHON_INLINE __m512i Add(__m512i sums, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sums, a, b); }
};
typedef BareDotStep BareNibbleStep;

struct BareFmaStep {
  typedef __m512 Register;
  static constexpr int64_t kWork = 16;
  static ANTIPHON_INLINE __m512 Add(__m512 sums, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sums); }
};

#elif defined(__AVX2__)

constexpr int kBareChains = 12;

#if defined(__AVXVNNI__)
struct BareDotStep {
  typedef __m256i Register;
  static constexpr int64_t kWork = 32;
  static ANTIPHON_INLINE __m256i Add(__m256i sums, __m256i a, __m256i b) {
    return _mm256_dpbusd_avx_epi32(sums, a, b);
  }
};
typedef BareDotStep BareNibbleStep;
#else
// Steps of integers take two instructions: products in 16 bits for weights of 8 bits, in 8 bits for weights of 4 bits.
struct BareDotStep {
  typedef __m256i Register;
  static constexpr int64_t kWork = 16;
  static ANTIPHON_INLINE __m256i Add(__m256i sums, __m256i a, __m256i b) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
  }
};
struct BareNibbleStep {
  typedef __m256i Register;
  static constexpr int64_t kWork = 32;
  static ANTIPHON_INLINE __m256i Add(__m256i sums, __m256i a, __m256i b) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(a, b));
  }
};
#endif

struct BareFmaStep {
  typedef __m256 Register;
  static constexpr int64_t kWork = 8;
  static ANTIPHON_INLINE __m256 Add(__m256 sums, __m256 a, __m256 b) { return _mm256_fmadd_ps(a, b, sums); }
};

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr int kBareChains = 24;

struct BareNibbleStep {
  typedef int8x16_t Register;
  static constexpr int64_t kWork = 16;
  static ANTIPHON_INLINE int8x16_t Add(int8x16_t sums, int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s32(vdotq_s32(vreinterpretq_s32_s8(sums), a, b));
  }
};
#if defined(__ARM_FEATURE_MATMUL_INT8)
struct BareDotStep {
  typedef int8x16_t Register;
  static constexpr int64_t kWork = 32;
  static ANTIPHON_INLINE int8x16_t Add(int8x16_t sums, int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s32(vmmlaq_s32(vreinterpretq_s32_s8(sums), a, b));
  }
};
#else
typedef BareNibbleStep BareDotStep;
#endif

struct BareFmaStep {
  typedef float32x4_t Register;
  static constexpr int64_t kWork = 4;
  static ANTIPHON_INLINE float32x4_t Add(float32x4_t sums, float32x4_t a, float32x4_t b) { return vfmaq_f32(sums, a, b); }
};

#endif

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)

#if defined(__AVX2__)
#define ANTIPHON_HIDDEN "+v"
#else
#define ANTIPHON_HIDDEN "+w"
#endif

// The empty assembly hides the values of its operands from the compiler, which could otherwise compute the sums itself,
// or a product only once for all chains.
template <typename Step>
int64_t BareLoop(int64_t rounds) {
  typename Step::Register a = {}, b = {}, chains[kBareChains];
#pragma GCC unroll 24
  for (int chain = 0; chain < kBareChains; ++chain) chains[chain] = typename Step::Register{};
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int chain = 0; chain < kBareChains; ++chain) {
      asm volatile("" : ANTIPHON_HIDDEN(a), ANTIPHON_HIDDEN(b));
      chains[chain] = Step::Add(chains[chain], a, b);
      asm volatile("" : ANTIPHON_HIDDEN(chains[chain]));
    }
  }
  return rounds * kBareChains * Step::kWork;
}

#endif

uint32_t BareRead(const uint8_t* from, int64_t bytes) {
  constexpr int kVectors = static_cast<int>(kReadBytes / sizeof(U32));
  U32 found[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) found[v] = U32{};
  for (int64_t byte = 0; byte < bytes; byte += kReadBytes) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) found[v] |= LoadAs<U32>(from + byte + v * static_cast<int>(sizeof(U32)));
  }
  return Reduce((found[0] | found[1]) | (found[2] | found[3]), [](auto a, auto b) ANTIPHON_BODY { return a | b; });
}

#if defined(__AMX_INT8__)

// Sums of zeros, without loads.
int64_t BareTiles(int64_t rounds) {
  Configure(kTileRows);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_release();
  return rounds * 4 * kTileRows * kPanel * kDepth;
}

constexpr BareLoops kLoops = {BareTiles, BareLoop<BareNibbleStep>, BareLoop<BareFmaStep>, BareRead};

#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)

constexpr BareLoops kLoops = {BareLoop<BareDotStep>, BareLoop<BareNibbleStep>, BareLoop<BareFmaStep>, BareRead};

#else

// Portable code has no instruction of its own.
constexpr BareLoops kLoops = {nullptr, nullptr, nullptr, BareRead};

#endif

}  // namespace

const BareLoops ANTIPHON_LOOPS = kLoops;

}  // namespace antiphon
