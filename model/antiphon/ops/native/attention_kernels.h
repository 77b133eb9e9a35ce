// Attention of one head: packed sequences (encoder) and paged caches (decoder). Included by one file per instruction
// set; simd.h lists the rules for such files.
//
// Neither kernel holds a whole score matrix: the packed kernel holds the scores of sixteen queries, the paged kernel
// those of one query. The order of every sum depends on the row's own length and positions only.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "tiles.h"

namespace antiphon {
namespace {

// Keys whose scores are computed at once, and sixteens of a head's width whose values are mixed at once for how many
// queries: as many sums as fit into the registers.
#if defined(__AVX512F__)
constexpr int kScoreKeys = 8, kMixVectors = 4, kMixQueries = 6;
#elif defined(__AVX2__) || defined(__ARM_NEON)
constexpr int kScoreKeys = 6, kMixVectors = 1, kMixQueries = 6;
#else
constexpr int kScoreKeys = 3, kMixVectors = 1, kMixQueries = 3;
#endif

ANTIPHON_INLINE float BiasOf(const ScoreBias& bias, int64_t distance) {
  float value = 0.0f;
  if (bias.table != nullptr) {
    const int64_t low = distance < -bias.reach ? -bias.reach : distance;
    value = bias.table[(low > bias.reach ? bias.reach : low) + bias.reach];
  }
  return value - bias.slope * static_cast<float>(distance < 0 ? -distance : distance);
}

ANTIPHON_INLINE bool HasBias(const ScoreBias& bias) { return bias.table != nullptr || bias.slope != 0.0f; }

// tile[d][16]: sixteen query vectors side by side, scaled; lanes beyond the sequence are 0.
ANTIPHON_INLINE void PackQueries(const PackedHead& head, int64_t first, float* tile) {
  const int64_t count = head.length - first < kQueryTile ? head.length - first : kQueryTile;
  for (int64_t d = 0; d < head.width; d += kLanes) {
    const int part = static_cast<int>(head.width - d < kLanes ? head.width - d : kLanes);
    F32 rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      rows[lane] = lane < count ? LoadPart(head.query + (first + lane) * head.stride + d, part) * head.scale : F32{};
    }
    Transpose(rows);
    for (int row = 0; row < part; ++row) Store(tile + (d + row) * kLanes, rows[row]);
  }
}

// Scores of the tile's queries for `Keys` keys, beginning at `key`: [Keys][16].
template <int Keys>
ANTIPHON_INLINE void ScoreKeys(const PackedHead& head, int64_t key, const float* tile, float* scores) {
  const float* from = head.key + key * head.kv_stride;
  F32 sums[Keys];
#pragma GCC unroll 16
  for (int k = 0; k < Keys; ++k) sums[k] = F32{};
  for (int64_t d = 0; d < head.width; ++d) {
    const F32 queries = Load(tile + d * kLanes);
#pragma GCC unroll 16
    for (int k = 0; k < Keys; ++k) sums[k] = Fma(queries, Splat(from[k * head.kv_stride + d]), sums[k]);
  }
#pragma GCC unroll 16
  for (int k = 0; k < Keys; ++k) Store(scores + (key + k) * kLanes, sums[k]);
}

// Scores of the tile's queries for `keys` keys: [keys][16].
ANTIPHON_INLINE void ScoreAll(const PackedHead& head, int64_t keys, const float* tile, float* scores) {
  ForTiles(keys, kScoreKeys, [&](int64_t key, int count) {
    WithHeight<kScoreKeys>(count, [&](auto constant) {
      ScoreKeys<decltype(constant)::value>(head, key, tile, scores);
    });
  });
}

ANTIPHON_INLINE int64_t RowOf(const RelativeScores& relative, int64_t distance) {
  const int64_t low = distance < -relative.reach ? -relative.reach : distance;
  return relative.rows[(low > relative.reach ? relative.reach : low) + relative.reach];
}

void SpreadQueries(const PackedHead& head, const float* from, float* to) {
  const RelativeScores& relative = head.relative;
  for (int64_t column = 0; column < relative.columns; column += kLanes) {
    for (int64_t d = 0; d < head.width; d += kLanes) {
      const int part = static_cast<int>(head.width - d < kLanes ? head.width - d : kLanes);
      F32 rows[kLanes];
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t row = RowOf(relative, relative.lowest + column + lane);
        rows[lane] = LoadPart(from + row * relative.stride + d, part) * head.scale;
      }
      Transpose(rows);
      for (int row = 0; row < part; ++row) Store(to + (d + row) * relative.columns + column, rows[row]);
    }
  }
}

// Scores of the tile's queries against `count` position keys, beginning at row `from`: relative.scores [count][16].
ANTIPHON_INLINE void ScorePositions(const PackedHead& head, int64_t from, int64_t count, const float* tile) {
  PackedHead rows = head;
  rows.key = head.relative.keys + from * head.relative.stride;
  rows.kv_stride = head.relative.stride;
  ScoreAll(rows, count, tile, head.relative.scores);
}

// Adds the products of `Keys` keys with position queries to their scores; the queries are first .. first + 15.
template <int Keys>
ANTIPHON_INLINE void AddPositionQueries(const PackedHead& head, int64_t first, int64_t key, float* scores) {
  const RelativeScores& relative = head.relative;
  const float* from = head.key + key * head.kv_stride;
  const float* queries = relative.queries + (first - key - relative.lowest);
  F32 sums[Keys];
#pragma GCC unroll 16
  for (int k = 0; k < Keys; ++k) sums[k] = F32{};
  for (int64_t d = 0; d < head.width; ++d) {
#pragma GCC unroll 16
    for (int k = 0; k < Keys; ++k) {
      sums[k] = Fma(Load(queries + d * relative.columns - k), Splat(from[k * head.kv_stride + d]), sums[k]);
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < Keys; ++k) Store(scores + (key + k) * kLanes, Load(scores + (key + k) * kLanes) + sums[k]);
}

// to[lane] += scores[offsets[lane] + lane]
ANTIPHON_INLINE void AddDiagonal(const float* scores, const int32_t* offsets, float* to) {
  float added[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) added[lane] = scores[offsets[lane] + lane];
  Store(to, Load(to) + Load(added));
}

// Adds the scores of relative positions to those of `count` queries and all keys: scores [keys][16].
ANTIPHON_INLINE void AddPositions(const PackedHead& head, int64_t first, int64_t count, int64_t keys, const float* tile,
                                  float* scores) {
  const RelativeScores& relative = head.relative;
  if (relative.keys != nullptr) {
    const int64_t low = first - (keys - 1), lowest = RowOf(relative, low);
    ScorePositions(head, lowest, RowOf(relative, first + count - 1) - lowest + 1, tile);
    // Offsets of the scores of each distance, looked up once for all keys; lanes beyond the sequence read the first.
    for (int64_t index = 0; index < keys - 1 + kLanes; ++index) {
      const bool is_met = index < keys - 1 + count;
      relative.offsets[index] = is_met ? static_cast<int32_t>((RowOf(relative, low + index) - lowest) * kLanes) : 0;
    }
    for (int64_t key = 0; key < keys; ++key) {
      AddDiagonal(relative.scores, relative.offsets + (keys - 1 - key), scores + key * kLanes);
    }
  }
  if (relative.queries != nullptr) {
    ForTiles(keys, kScoreKeys, [&](int64_t key, int height) {
      WithHeight<kScoreKeys>(height, [&](auto constant) {
        AddPositionQueries<decltype(constant)::value>(head, first, key, scores);
      });
    });
  }
}

// Limits a key's sixteen scores and adds bias and mask; query lanes are at positions first .. first + 15.
ANTIPHON_INLINE F32 Adjusted(const PackedHead& head, int64_t first, int64_t key, F32 scores) {
  if (head.cap != 0.0f) scores = Capped(scores, head.cap);
  if (HasBias(head.bias)) {
    float added[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) added[lane] = BiasOf(head.bias, key - first - lane);
    scores += Load(added);
  }
  if (head.causal) {
    const auto earliest = static_cast<int32_t>(key - first);  // lanes below it precede the key
    scores = Select(Iota() < earliest, Splat(-kInfinity), scores);
  }
  return scores;
}

// scores [keys][16] -> exp(score - largest), lane by lane; returns 1 / sum.
ANTIPHON_INLINE F32 SoftmaxLanes(const PackedHead& head, int64_t first, int64_t keys, float* scores) {
  F32 largest = Splat(-kInfinity), sum = {};
  const bool is_plain = !head.causal && !HasBias(head.bias) && head.cap == 0.0f;
  for (int64_t key = 0; key < keys; ++key) {
    F32 score = Load(scores + key * kLanes);
    if (!is_plain) {
      score = Adjusted(head, first, key, score);
      Store(scores + key * kLanes, score);
    }
    largest = Max(score, largest);
  }
  for (int64_t key = 0; key < keys; ++key) {
    const F32 weight = Exp(Load(scores + key * kLanes) - largest);
    Store(scores + key * kLanes, weight);
    sum += weight;
  }
  return 1.0f / sum;
}

// out[lane][d ..] of `Queries` lanes and `Vectors` vectors of head width; `part` floats of the last vector.
template <int Queries, int Vectors>
ANTIPHON_INLINE void MixValues(const PackedHead& head, int64_t keys, const float* scores, const float* inverse,
                               int64_t first, int64_t lane, int64_t d, int part) {
  F32 sums[Queries][Vectors];
#pragma GCC unroll 16
  for (int q = 0; q < Queries; ++q) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) sums[q][v] = F32{};
  }
  for (int64_t key = 0; key < keys; ++key) {
    const float* from = head.value + key * head.kv_stride + d;
    F32 values[Vectors];
#pragma GCC unroll 16
    for (int v = 0; v < Vectors - 1; ++v) values[v] = Load(from + v * kLanes);
    values[Vectors - 1] = LoadPart(from + (Vectors - 1) * kLanes, part);
#pragma GCC unroll 16
    for (int q = 0; q < Queries; ++q) {
      const F32 weight = Splat(scores[key * kLanes + lane + q]);
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) sums[q][v] = Fma(weight, values[v], sums[q][v]);
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < Queries; ++q) {
    float* to = head.out + (first + lane + q) * head.out_stride + d;
    const float factor = inverse[lane + q];
#pragma GCC unroll 16
    for (int v = 0; v < Vectors - 1; ++v) Store(to + v * kLanes, sums[q][v] * factor);
    StorePart(to + (Vectors - 1) * kLanes, sums[q][Vectors - 1] * factor, part);
  }
}

// Outputs of `count` queries in columns d .. of the head, as many as `Vectors` vectors have; returns the next column.
template <int Vectors>
ANTIPHON_INLINE int64_t MixColumns(const PackedHead& head, int64_t keys, const float* scores, const float* inverse,
                                   int64_t first, int64_t count, int64_t d) {
  const int64_t left = head.width - d - (Vectors - 1) * kLanes;
  const int part = static_cast<int>(left < kLanes ? left : kLanes);
  ForTiles(count, kMixQueries, [&](int64_t lane, int height) {
    WithHeight<kMixQueries>(height, [&](auto constant) {
      MixValues<decltype(constant)::value, Vectors>(head, keys, scores, inverse, first, lane, d, part);
    });
  });
  return d + Vectors * kLanes;
}

void PackedAttention(const PackedHead& head, int64_t first, float* scores, float* tile) {
  const int64_t count = head.length - first < kQueryTile ? head.length - first : kQueryTile;
  const int64_t keys = head.causal ? first + count : head.length;
  PackQueries(head, first, tile);
  ScoreAll(head, keys, tile, scores);
  if (head.relative.rows != nullptr) AddPositions(head, first, count, keys, tile, scores);
  float inverse[kLanes];
  Store(inverse, SoftmaxLanes(head, first, keys, scores));
  for (int64_t d = 0; d < head.width;) {
    if (kMixVectors >= 4 && head.width - d >= 4 * kLanes) {
      d = MixColumns<4>(head, keys, scores, inverse, first, count, d);
    } else if (kMixVectors >= 2 && head.width - d >= 2 * kLanes) {
      d = MixColumns<2>(head, keys, scores, inverse, first, count, d);
    } else {
      d = MixColumns<1>(head, keys, scores, inverse, first, count, d);
    }
  }
}

// One row of head values, from `width` floats.
template <typename Element>
ANTIPHON_INLINE void StoreRow(const float* from, int64_t width, Element* to) {
  for (int64_t d = 0; d < width; d += kLanes) {
    const int part = static_cast<int>(width - d < kLanes ? width - d : kLanes);
    StoreElements(to + d, LoadPart(from + d, part), part);
  }
}

template <typename Element>
void AppendPosition(const PagedHead<Element>& head, int64_t position, const float* key, const float* value) {
  const int64_t lane = position % kBlockSize;
  const int64_t padded = (head.width + kLanes - 1) / kLanes * kLanes;
  Element* keys = head.blocks[position / kBlockSize] + head.offset;
  StoreRow(value, head.width, keys + head.values + lane * padded);
  for (int64_t d = 0; d < head.width; d += kLanes) {
    const int part = static_cast<int>(head.width - d < kLanes ? head.width - d : kLanes);
    Element converted[kLanes];
    StoreElements(converted, LoadPart(key + d, part), part);
    for (int i = 0; i < part; ++i) keys[(d + i) * kBlockSize + lane] = converted[i];
  }
}

// Fills one block from its first position on.
template <typename Element>
void FillBlock(const PagedHead<Element>& head, int64_t block, int64_t count, const float* key, const float* value,
               int64_t stride) {
  const int64_t padded = (head.width + kLanes - 1) / kLanes * kLanes;
  Element* keys = head.blocks[block] + head.offset;
  for (int64_t d = 0; d < head.width; d += kLanes) {
    const int part = static_cast<int>(head.width - d < kLanes ? head.width - d : kLanes);
    F32 rows[kLanes];
    for (int64_t row = 0; row < kLanes; ++row) rows[row] = row < count ? LoadPart(key + row * stride + d, part) : F32{};
    Transpose(rows);
    for (int row = 0; row < part; ++row) {
      StoreElements(keys + (d + row) * kBlockSize, rows[row], static_cast<int>(count));
    }
  }
  for (int64_t row = 0; row < count; ++row) {
    StoreRow(value + row * stride, head.width, keys + head.values + row * padded);
  }
}

// Prefetches the next head of the block, which follows in memory and is read next: the keys and values of a full batch
// do not fit into the core's caches (64 rows, 2 cores: 12.0 -> 10.0 ms a step with one thread, 6.0 -> 5.4 with two).
template <typename Element>
ANTIPHON_INLINE void PrefetchNextHead(const Element* at, int64_t width) {
  __builtin_prefetch(at + (width + kLanes - 1) / kLanes * kLanes * kBlockSize, 0, 2);
}

// Scores of one block's sixteen positions, in four independent chains of additions.
template <typename Element>
ANTIPHON_INLINE F32 ScoreBlock(const Element* keys, const float* query, int64_t width) {
  F32 sums[4] = {};
  int64_t d = 0;
  for (; width - d >= 4; d += 4) {
    PrefetchNextHead(keys + d * kBlockSize, width);
    PrefetchNextHead(keys + (d + 2) * kBlockSize, width);
    for (int64_t chain = 0; chain < 4; ++chain) {
      sums[chain] = Fma(LoadElements(keys + (d + chain) * kBlockSize), Splat(query[d + chain]), sums[chain]);
    }
  }
  for (; d < width; ++d) sums[0] = Fma(LoadElements(keys + d * kBlockSize), Splat(query[d]), sums[0]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

ANTIPHON_INLINE F32 BlockBias(const ScoreBias& bias, int64_t first, int64_t position) {
  float added[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) added[lane] = BiasOf(bias, first + lane - position);
  return Load(added);
}

// Adds the values of one position, times its weight.
template <typename Element, int Vectors>
ANTIPHON_INLINE void MixPosition(const PagedHead<Element>& head, const Element* values, float weight,
                                 F32 (&sums)[Vectors]) {
#pragma GCC unroll 2
  for (int v = 0; v < Vectors; v += 2) PrefetchNextHead(values + v * kLanes, head.width);
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) sums[v] = Fma(Splat(weight), LoadElements(values + v * kLanes), sums[v]);
}

// out[d ..] of `Vectors` vectors; even and odd positions are added in two independent chains.
template <typename Element, int Vectors>
ANTIPHON_INLINE void MixPages(const PagedHead<Element>& head, int64_t length, int64_t padded, const float* weights,
                              float inverse, int64_t d, int part, float* out) {
  F32 even[Vectors], odd[Vectors];
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) even[v] = odd[v] = F32{};
  for (int64_t first = 0; first < length; first += kBlockSize) {
    const Element* values = head.blocks[first / kBlockSize] + head.offset + head.values + d;
    const int64_t count = length - first < kBlockSize ? length - first : kBlockSize;
    int64_t lane = 0;
    for (; count - lane >= 2; lane += 2) {
      MixPosition(head, values + lane * padded, weights[first + lane], even);
      MixPosition(head, values + (lane + 1) * padded, weights[first + lane + 1], odd);
    }
    if (lane < count) MixPosition(head, values + lane * padded, weights[first + lane], even);
  }
  for (int v = 0; v < Vectors; ++v) {
    const F32 mixed = (even[v] + odd[v]) * inverse;
    StorePart(out + d + v * kLanes, mixed, v == Vectors - 1 ? part : kLanes);
  }
}

template <typename Element>
void PagedAttend(const PagedHead<Element>& head, const float* query, int64_t length, int64_t position,
                 const ScoreBias& bias, float* scores, float* out) {
  F32 largest = Splat(-kInfinity);
  for (int64_t first = 0; first < length; first += kBlockSize) {
    F32 score = ScoreBlock<Element>(head.blocks[first / kBlockSize] + head.offset, query, head.width) * head.scale;
    if (head.cap != 0.0f) score = Capped(score, head.cap);
    if (HasBias(bias)) score += BlockBias(bias, first, position);
    // Positions that were never written can hold any value, also NaN.
    if (length - first < kBlockSize) {
      score = Select(Iota() < static_cast<int32_t>(length - first), score, Splat(-kInfinity));
    }
    Store(scores + first, score);
    largest = Max(score, largest);
  }
  const float top = Largest(largest);
  F32 sum = {};
  for (int64_t first = 0; first < length; first += kBlockSize) {
    const F32 weight = Exp(Load(scores + first) - top);
    Store(scores + first, weight);
    sum += weight;
  }
  const float inverse = 1.0f / Sum(sum);
  const int64_t padded = (head.width + kLanes - 1) / kLanes * kLanes;
  int64_t d = 0;
  for (; head.width - d >= 4 * kLanes; d += 4 * kLanes) {
    MixPages<Element, 4>(head, length, padded, scores, inverse, d, kLanes, out);
  }
  for (; head.width - d >= 2 * kLanes; d += 2 * kLanes) {
    MixPages<Element, 2>(head, length, padded, scores, inverse, d, kLanes, out);
  }
  for (; d < head.width; d += kLanes) {
    const int part = static_cast<int>(head.width - d < kLanes ? head.width - d : kLanes);
    MixPages<Element, 1>(head, length, padded, scores, inverse, d, part, out);
  }
}

}  // namespace
}  // namespace antiphon
