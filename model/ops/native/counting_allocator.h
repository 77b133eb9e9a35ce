// A caching allocator that knows exactly how many bytes its callers hold. Knows nothing of ONNX Runtime.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace antiphon {

// Read across the C boundary: the order is part of it (model/ops/workspace.py).
struct WorkspaceStats {
  uint64_t in_use_bytes;    // asked for and not yet freed, as asked: no rounding, no headers
  uint64_t peak_bytes;      // largest in_use_bytes since the last ResetPeak
  uint64_t reserved_bytes;  // held from the operating system: in use, rounded up, and cached
  uint64_t cached_bytes;    // part of reserved_bytes nobody uses now
  uint64_t limit_bytes;     // bound on reserved_bytes; 0 is none
  uint64_t allocations;     // calls that returned a block
  uint64_t refusals;        // calls that threw
};

// Thread-safe. Blocks are aligned to 64 bytes, readable 64 bytes past their end, and not cleared.
//
// Freed blocks wait in lists by size class, eight classes to a power of two, until they hold kMaxCachedBytes together;
// what exceeds that goes back to the operating system at once, so one long request does not inflate the server for good.
class CountingAllocator {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr uint64_t kMaxCachedBytes = 64ull << 20;

  ~CountingAllocator();
  // Throws std::runtime_error when the limit or the operating system refuses; nullptr only for 0 bytes.
  void* Allocate(size_t bytes);
  // To the allocator that the block is from, on whichever thread.
  static void Free(void* block) noexcept;
  // Measure the next run: peak_bytes starts again from in_use_bytes.
  void ResetPeak();
  // Return every cached block to the operating system.
  void Trim();
  void SetLimit(uint64_t bytes);
  // Keep no freed block from now on: whoever used this allocator is going.
  void Close();
  WorkspaceStats Stats();

 private:
  struct Header;
  static constexpr size_t kNumClasses = 8 * 48;  // up to 2^47 bytes, the address space

  static size_t ClassOf(size_t bytes);
  static size_t ClassBytes(size_t size_class);
  Header* TakeCached(size_t size_class);
  Header* TakeFromSystem(size_t size_class, size_t bytes);
  void ReturnToSystem(Header* header) noexcept;
  void TrimLocked() noexcept;
  void TakeBack(Header* header) noexcept;

  std::mutex mutex_;
  std::array<Header*, kNumClasses> cached_{};
  std::bitset<kNumClasses> occupied_;
  WorkspaceStats stats_{};
  uint64_t max_cached_bytes_ = kMaxCachedBytes;
};

}  // namespace antiphon
