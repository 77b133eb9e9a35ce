#include "counting_allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace antiphon {

namespace {

constexpr size_t kMinBlockBytes = 512;  // from here on every class is a multiple of the alignment
// Larger blocks are mapped, so that freeing one shrinks the process, and pages never written cost nothing.
constexpr size_t kMappedBytes = 256u << 10;
constexpr size_t kMaxBytes = size_t{1} << 46;
// Quantised kernels of ONNX Runtime can read (not use) a few bytes past an operand; its own allocator pads as well.
constexpr size_t kOverread = 64;

void* SystemAllocate(size_t bytes) noexcept {
  if (bytes < kMappedBytes) return std::aligned_alloc(CountingAllocator::kAlignment, bytes);
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return block == MAP_FAILED ? nullptr : block;
}

void SystemFree(void* block, size_t bytes) noexcept {
  if (bytes < kMappedBytes) {
    std::free(block);
  } else {
    munmap(block, bytes);
  }
}

// AddressSanitizer must report accesses to cached blocks and to the bytes that rounding adds at the end of blocks in
// use.
void Poison([[maybe_unused]] void* begin, [[maybe_unused]] size_t bytes) noexcept {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(begin, bytes);
#endif
}

void Unpoison([[maybe_unused]] void* begin, [[maybe_unused]] size_t bytes) noexcept {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(begin, bytes);
#endif
}

}  // namespace

// Header in front of every block; it links the cached ones.
struct alignas(CountingAllocator::kAlignment) CountingAllocator::Header {
  size_t bytes;
  size_t size_class;
  Header* next;
  CountingAllocator* owner;
};

CountingAllocator::~CountingAllocator() { TrimLocked(); }

// Class 8 k + j holds blocks of up to 2^k (1 + (j + 1) / 8) bytes: at most an eighth is lost to rounding.
size_t CountingAllocator::ClassOf(size_t bytes) {
  const size_t last = bytes - 1;
  const size_t power = 63 - static_cast<size_t>(__builtin_clzll(last));
  return 8 * power + ((last >> (power - 3)) & 7);
}

size_t CountingAllocator::ClassBytes(size_t size_class) {
  return (size_class % 8 + 9) << (size_class / 8 - 3);
}

void* CountingAllocator::Allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > kMaxBytes) {
    ++stats_.refusals;
    throw std::runtime_error("workspace: one allocation of " + std::to_string(bytes) + " bytes was asked for");
  }
  const size_t size_class = ClassOf(std::max(bytes + sizeof(Header) + kOverread, kMinBlockBytes));
  Header* header = TakeCached(size_class);
  if (header == nullptr) header = AllocateFromSystem(size_class, bytes);
  header->bytes = bytes;
  ++stats_.allocations;
  stats_.in_use_bytes += bytes;
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.in_use_bytes);
  Unpoison(header + 1, bytes);
  return header + 1;
}

void CountingAllocator::Free(void* block) noexcept {
  if (block == nullptr) return;
  Header* header = static_cast<Header*>(block) - 1;
  header->owner->Recycle(header);
}

void CountingAllocator::Recycle(Header* header) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.in_use_bytes -= header->bytes;
  Poison(header + 1, header->bytes);
  if (stats_.cached_bytes + ClassBytes(header->size_class) > max_cached_bytes_) {
    ReturnToSystem(header);
    return;
  }
  header->next = cached_[header->size_class];
  cached_[header->size_class] = header;
  occupied_.set(header->size_class);
  stats_.cached_bytes += ClassBytes(header->size_class);
}

// Also accepts a block of up to twice the size, so that a run of another shape reuses blocks of the previous run.
CountingAllocator::Header* CountingAllocator::TakeCached(size_t size_class) {
  size_t found = size_class;
  const size_t end = std::min(size_class + 9, kNumClasses);
  while (found < end && !occupied_[found]) ++found;
  if (found == end) return nullptr;
  Header* header = cached_[found];
  cached_[found] = header->next;
  occupied_.set(found, header->next != nullptr);
  stats_.cached_bytes -= ClassBytes(found);
  return header;
}

CountingAllocator::Header* CountingAllocator::AllocateFromSystem(size_t size_class, size_t bytes) {
  const size_t block_bytes = ClassBytes(size_class);
  const uint64_t limit = stats_.limit_bytes;
  if (limit != 0 && stats_.reserved_bytes + block_bytes > limit) TrimLocked();
  const bool allowed = limit == 0 || stats_.reserved_bytes + block_bytes <= limit;
  void* block = allowed ? SystemAllocate(block_bytes) : nullptr;
  if (block == nullptr) {
    ++stats_.refusals;
    throw std::runtime_error("workspace " + std::string(allowed ? "exhausted" : "limit reached") + ": " +
                             std::to_string(bytes) + " bytes asked, " + std::to_string(stats_.reserved_bytes) +
                             " held, limit " + std::to_string(limit));
  }
  stats_.reserved_bytes += block_bytes;
  auto* header = new (block) Header{bytes, size_class, nullptr, this};
  Poison(header + 1, block_bytes - sizeof(Header));
  return header;
}

void CountingAllocator::ReturnToSystem(Header* header) noexcept {
  const size_t bytes = ClassBytes(header->size_class);
  stats_.reserved_bytes -= bytes;
  Unpoison(header, bytes);
  SystemFree(header, bytes);
}

void CountingAllocator::TrimLocked() noexcept {
  for (Header*& list : cached_) {
    while (list != nullptr) {
      Header* header = list;
      list = header->next;
      ReturnToSystem(header);
    }
  }
  occupied_.reset();
  stats_.cached_bytes = 0;
}

void CountingAllocator::Trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  TrimLocked();
}

uint64_t CountingAllocator::ResetPeak() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.highest_bytes = std::max(stats_.highest_bytes, stats_.peak_bytes);
  return stats_.peak_bytes = stats_.in_use_bytes;
}

void CountingAllocator::SetLimit(uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.limit_bytes = bytes;
}

void CountingAllocator::Close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  max_cached_bytes_ = 0;
  TrimLocked();
}

WorkspaceStats CountingAllocator::Stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  WorkspaceStats stats = stats_;
  stats.highest_bytes = std::max(stats.highest_bytes, stats.peak_bytes);
  return stats;
}

}  // namespace antiphon
