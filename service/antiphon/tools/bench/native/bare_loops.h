// The bare loops of every instruction set.
#pragma once

#include <cstdint>

namespace antiphon {

constexpr int64_t kReadBytes = 256;  // `read` reads a multiple of it

// The multiply-adds of products with weights of 8 and 4 bits, and of float32 sums, on registers alone; null in portable
// code. They return their number, a multiple of `rounds`.
struct BareLoops {
  int64_t (*dot)(int64_t rounds);
  int64_t (*nibble)(int64_t rounds);
  int64_t (*fma)(int64_t rounds);
  // Reads bytes in order, a multiple of kReadBytes; returns the bits that are set in any 32-bit word.
  uint32_t (*read)(const uint8_t* from, int64_t bytes);
};

// Under the names of the tables of kernels.
extern const BareLoops portable;
#if defined(__x86_64__)
extern const BareLoops avx2, avxvnni, avx512, amx;
#elif defined(__aarch64__)
extern const BareLoops dotprod, i8mm;
#endif

}  // namespace antiphon
