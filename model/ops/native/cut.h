// The end of a set that is kept, found without sorting: a selection by buckets over keys and integer masses.
//
// Whoever selects orders entries by a key, the smallest first, and keeps entries until their masses reach a target.
// Masses are integers, so that sums are exact: the end depends on keys and masses alone, not on the order of the entries
// nor on the way they are searched. A rank, a float that grows with the key, puts each entry into one of 2,048 buckets;
// only the bucket in which the target is reached is looked into, digit by digit of the key. However the ranks lie, that
// takes one pass over that bucket for each eleven bits of the key at most: three for 32 bits, six for 64.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "workspace.h"

namespace antiphon {

// The first entries whose masses reach a target.
template <typename Key>
struct Cut {
  Key last;         // key of the last entry that is kept
  int64_t missing;  // mass that entries of this very key must bring; above 0, at most what they have
};

// Key of a float: the largest float first, and one key for both zeros. Not for NaN.
inline uint32_t DescendingKey(float value) {
  const float positive_zero = value + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &positive_zero, sizeof(bits));
  return bits ^ (~static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) & 0x7fffffffu);
}

inline float ValueOfKey(uint32_t key) {
  const uint32_t bits = key ^ (~static_cast<uint32_t>(static_cast<int32_t>(key) >> 31) & 0x7fffffffu);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Key of a double that is not negative: the smallest first. Not for NaN.
inline uint64_t AscendingKey(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline double ValueOfKey(uint64_t key) {
  double value;
  std::memcpy(&value, &key, sizeof(value));
  return value;
}

template <typename Key>
class Cutter {
 public:
  // Finds where the smallest of `count` keys reach target_of(total mass), which must be 1 to that total.
  // ranks: 0 or more, never falling as keys rise, or none of them a number; best where few are 32 or more.
  // Throws std::runtime_error when the workspace refuses memory.
  template <typename KeyAt, typename MassAt, typename TargetOf>
  static Cut<Key> Find(const float* ranks, int64_t count, const KeyAt& key_at, const MassAt& mass_at,
                       const TargetOf& target_of) {
    const Scratch<int32_t> buckets(static_cast<size_t>(count));
    for (int64_t index = 0; index < count; ++index) {
      buckets[static_cast<size_t>(index)] = static_cast<int32_t>(std::min(kLastBucket, ranks[index] * kBucketsPerRank));
    }
    int64_t sums[kBuckets] = {}, total = 0;
    for (int64_t index = 0; index < count; ++index) sums[buckets[static_cast<size_t>(index)]] += mass_at(index);
    for (const int64_t sum : sums) total += sum;
    int64_t missing = target_of(total);
    const int64_t bucket = Reach(sums, &missing);
    const Scratch<Entry> entries(static_cast<size_t>(count));
    int64_t found = 0;
    ForEachEqual(buckets.data(), count, static_cast<int32_t>(bucket), [&](int64_t index) {
      entries[static_cast<size_t>(found++)] = {key_at(index), mass_at(index)};
    });
    return Refine(entries.data(), found, missing);
  }

 private:
  struct Entry {
    Key key;
    int64_t mass;
  };
  static constexpr int kDigit = 11;  // bits; the sums of a digit, 16 KiB, stay in the first cache
  static constexpr int64_t kBuckets = 1 << kDigit;
  static constexpr float kBucketsPerRank = 64.0f, kLastBucket = kBuckets - 1;
  static constexpr int64_t kFew = 64;  // entries that are sorted sooner than counted

  // Calls body(index) for each of `count` values that is `wanted`. Looks at sixteen at once: few are.
  template <typename Body>
  static void ForEachEqual(const int32_t* values, int64_t count, int32_t wanted, const Body& body) {
    constexpr int64_t kBlock = 16;
    for (int64_t first = 0; first < count; first += kBlock) {
      const int64_t end = std::min(first + kBlock, count);
      int32_t is_any = end - first < kBlock;
      if (is_any == 0) {
        for (int64_t index = first; index < first + kBlock; ++index) is_any |= values[index] == wanted;
      }
      for (int64_t index = is_any != 0 ? first : end; index < end; ++index) {
        if (values[index] == wanted) body(index);
      }
    }
  }

  // Finds the bucket in which the sums reach `missing`, and takes those before it off it.
  static int64_t Reach(const int64_t* sums, int64_t* missing) {
    int64_t bucket = 0;
    for (; bucket < kBuckets - 1 && sums[bucket] < *missing; ++bucket) *missing -= sums[bucket];
    return bucket;
  }

  // Finds the end among entries of one bucket. Reorders and overwrites them.
  static Cut<Key> Refine(Entry* entries, int64_t count, int64_t missing) {
    for (int shift = 8 * static_cast<int>(sizeof(Key)); shift > 0 && count > kFew;) {
      shift = std::max(shift - kDigit, 0);
      const auto digit = [shift](const Entry& entry) { return static_cast<int64_t>(entry.key >> shift & (kBuckets - 1)); };
      int64_t sums[kBuckets] = {};
      for (const Entry* entry = entries; entry < entries + count; ++entry) sums[digit(*entry)] += entry->mass;
      const int64_t wanted = Reach(sums, &missing);
      count = std::remove_if(entries, entries + count, [&](const Entry& one) { return digit(one) != wanted; }) - entries;
    }
    if (count > kFew) return {entries[0].key, missing};  // all have this key
    std::sort(entries, entries + count, [](const Entry& a, const Entry& b) { return a.key < b.key; });
    return Walk(entries, count, missing);
  }

  static Cut<Key> Walk(const Entry* entries, int64_t count, int64_t missing) {
    int64_t index = 0;
    for (int64_t first = 0; first < count; first = index) {
      int64_t mass = 0;
      for (; index < count && entries[index].key == entries[first].key; ++index) mass += entries[index].mass;
      if (mass >= missing) return {entries[first].key, missing};
      missing -= mass;
    }
    return {entries[count - 1].key, missing};  // not reached: the masses of all entries are at least the target
  }
};

}  // namespace antiphon
