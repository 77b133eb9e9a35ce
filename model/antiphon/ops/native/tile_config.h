// Configuration of the AMX tiles. simd.h lists the rules for files that include it.
#pragma once

#include <cstdint>

namespace antiphon {
namespace {

constexpr int64_t kTileRows = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Sums in tiles 0..3, activations in 4 and 5, weights in 6 and 7.
void Configure(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_per_row[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kTileRows);
  }
  // GCC declares that _tile_loadconfig reads 8 of the 64 bytes, so the compiler may leave the others unwritten. It
  // declares no memory that _tile_loadd reads: "memory" makes the compiler write the activations before this point.
  __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");
}

}  // namespace
}  // namespace antiphon
