// A caching allocator that counts exactly how many bytes its callers hold. Does not use ONNX Runtime.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace antiphon {

// Part of the C interface: model/antiphon/ops/workspace.py reads the fields in this order.
struct WorkspaceStats {
  uint64_t in_use_bytes;    // requested and not yet freed, without rounding and headers
  uint64_t peak_bytes;      // largest in_use_bytes since the last ResetPeak
  uint64_t highest_bytes;   // largest in_use_bytes of all
  uint64_t reserved_bytes;  // obtained from the operating system: in use, rounded up, and cached
  uint64_t cached_bytes;    // unused part of reserved_bytes
  uint64_t limit_bytes;     // bound on reserved_bytes; 0: no limit
  uint64_t allocations;     // calls that returned a block
  uint64_t refusals;        // calls that threw
};

// Thread-safe. Blocks are aligned to 64 bytes, readable 64 bytes past their end, and not cleared.
//
// Freed blocks are kept in lists by size class, eight classes to a power of two, up to kMaxCachedBytes together. Blocks
// beyond that go back to the operating system at once, so that one long request does not enlarge the server
// permanently.
class CountingAllocator {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr uint64_t kMaxCachedBytes = 64ull << 20;

  ~CountingAllocator();
  // Throws std::runtime_error when the limit or the operating system refuses. Returns nullptr only for 0 bytes.
  void* Allocate(size_t bytes);
  // Returns the block to the allocator that it is from. Can be called on any thread.
  static void Free(void* block) noexcept;
  // Restarts peak_bytes from in_use_bytes, which it returns, to measure the next forward pass.
  uint64_t ResetPeak();
  // Returns every cached block to the operating system.
  void Trim();
  void SetLimit(uint64_t bytes);
  // Stops keeping freed blocks, since the owner of this allocator is about to end.
  void Close();
  WorkspaceStats Stats();

 private:
  struct Header;
  static constexpr size_t kNumClasses = 8 * 48;  // up to 2^47 bytes, the address space

  static size_t ClassOf(size_t bytes);
  static size_t ClassBytes(size_t size_class);
  Header* TakeCached(size_t size_class);
  Header* AllocateFromSystem(size_t size_class, size_t bytes);
  void ReturnToSystem(Header* header) noexcept;
  void TrimLocked() noexcept;
  void Recycle(Header* header) noexcept;

  std::mutex mutex_;
  std::array<Header*, kNumClasses> cached_{};
  std::bitset<kNumClasses> occupied_;
  WorkspaceStats stats_{};
  uint64_t max_cached_bytes_ = kMaxCachedBytes;
};

}  // namespace antiphon
