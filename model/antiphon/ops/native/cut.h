// Selection without sorting: finds the last entry of the smallest set of entries whose masses reach a target.
//
// The caller orders entries by a key, the smallest first, and keeps entries until their masses reach a target.
// Masses are integers, so that sums are exact: the result depends on keys and masses alone, neither on the order of the
// entries nor on the way they are searched. A rank, a float that grows with the key, puts each entry into one of 2,048
// buckets; only the bucket in which the target is reached is searched, digit by digit of the key. For any distribution of
// ranks this takes at most one pass over that bucket for each eleven bits of the key: three for 32 bits, six for 64.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "workspace.h"

namespace antiphon {

// First entries whose masses reach a target: all entries of smaller keys, and those of the last key before index `end`.
template <typename Key>
struct Cut {
  Key last;
  int64_t end;
};

// Key of a float: a larger float has a smaller key, and both zeros have the same key. The float must not be NaN.
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

// Key of a double that is not negative: a smaller double has a smaller key. The double must not be NaN.
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
  // Finds the key at which the masses of `count` entries, in order of their keys, reach target_of(total mass). This
  // must be 1 to that total.
  // buckets: bucket of each entry's rank. Ranks must not fall as keys rise, unless no rank is a number.
  // Throws std::runtime_error when the workspace refuses memory.
  template <typename KeyAt, typename MassAt, typename TargetOf>
  static Cut<Key> Find(const int32_t* buckets, int64_t count, const KeyAt& key_at, const MassAt& mass_at,
                       const TargetOf& target_of) {
    int64_t sums[kBuckets] = {}, others[kBuckets] = {}, total = 0;  // two arrays, since neighbours often share a bucket
    int64_t index = 0;
    for (; index + 1 < count; index += 2) {
      sums[buckets[index]] += mass_at(index);
      others[buckets[index + 1]] += mass_at(index + 1);
    }
    if (index < count) sums[buckets[index]] += mass_at(index);
    for (int64_t bucket = 0; bucket < kBuckets; ++bucket) total += sums[bucket] += others[bucket];
    int64_t missing = target_of(total);
    const auto bucket = static_cast<int32_t>(FindBucket(sums, &missing));
    const Scratch<int32_t> members(static_cast<size_t>(count));
    const int64_t found = ListBucket(buckets, count, bucket, members.data());
    const Scratch<Entry> entries(static_cast<size_t>(found));
    for (int64_t at = 0; at < found; ++at) {
      const int32_t member = members[static_cast<size_t>(at)];
      entries[static_cast<size_t>(at)] = {key_at(member), mass_at(member)};
    }
    Cut<Key> cut{FindLastKey(entries.data(), found, &missing), 0};
    for (int64_t at = 0; at < found && missing > 0; ++at) {
      const int32_t member = members[static_cast<size_t>(at)];
      if (key_at(member) != cut.last) continue;
      missing -= mass_at(member);
      cut.end = member + 1;
    }
    return cut;
  }

 private:
  struct Entry {
    Key key;
    int64_t mass;
  };
  static constexpr int kDigit = 11;  // bits
  static constexpr int64_t kBuckets = 1 << kDigit;  // their sums, 16 KiB, fit into the L1 cache
  static_assert(kBuckets == kRankBuckets, "ranks and digits share the sums");
  static constexpr int64_t kMaxSorted = 64;  // up to this number of entries, sorting is faster than counting

  // Writes the indices of one bucket's entries, rising, and returns their number. Tests sixteen entries at once, since
  // few match.
  static int64_t ListBucket(const int32_t* buckets, int64_t count, int32_t wanted, int32_t* members) {
    constexpr int64_t kBlock = 16;
    int64_t found = 0;
    for (int64_t first = 0; first < count; first += kBlock) {
      const int64_t end = std::min(first + kBlock, count);
      int32_t is_any = end - first < kBlock;
      if (is_any == 0) {
        for (int64_t index = first; index < first + kBlock; ++index) is_any |= buckets[index] == wanted;
      }
      for (int64_t index = is_any != 0 ? first : end; index < end; ++index) {
        if (buckets[index] == wanted) members[found++] = static_cast<int32_t>(index);
      }
    }
    return found;
  }

  // Finds the bucket in which the sums reach `missing`, and subtracts the sums before it.
  static int64_t FindBucket(const int64_t* sums, int64_t* missing) {
    int64_t bucket = 0;
    for (; bucket < kBuckets - 1 && sums[bucket] < *missing; ++bucket) *missing -= sums[bucket];
    return bucket;
  }

  // Finds the last key among entries of one bucket, and subtracts the masses of smaller keys from
  // `missing`. Overwrites the entries.
  static Key FindLastKey(Entry* entries, int64_t count, int64_t* missing) {
    for (int shift = 8 * static_cast<int>(sizeof(Key)); shift > 0 && count > kMaxSorted;) {
      shift = std::max(shift - kDigit, 0);
      const auto digit = [shift](const Entry& entry) { return static_cast<int64_t>(entry.key >> shift & (kBuckets - 1)); };
      int64_t sums[kBuckets] = {};
      for (const Entry* entry = entries; entry < entries + count; ++entry) sums[digit(*entry)] += entry->mass;
      const int64_t wanted = FindBucket(sums, missing);
      count = std::remove_if(entries, entries + count, [&](const Entry& one) { return digit(one) != wanted; }) - entries;
    }
    if (count > kMaxSorted) return entries[0].key;  // all entries have this key
    std::sort(entries, entries + count, [](const Entry& a, const Entry& b) { return a.key < b.key; });
    return FindInSorted(entries, count, missing);
  }

  static Key FindInSorted(const Entry* entries, int64_t count, int64_t* missing) {
    int64_t index = 0;
    for (int64_t first = 0; first < count; first = index) {
      int64_t mass = 0;
      for (; index < count && entries[index].key == entries[first].key; ++index) mass += entries[index].mass;
      if (mass >= *missing) return entries[first].key;
      *missing -= mass;
    }
    return entries[count - 1].key;  // not reached: the masses of all entries are at least the target
  }
};

}  // namespace antiphon
