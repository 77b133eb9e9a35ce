// Threads allocate, fill, check and free at random, then trim; built with sanitizers by test_workspace.py.

#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "counting_allocator.h"

namespace {

constexpr int kThreads = 4;
constexpr int kSteps = 4000;
constexpr int kMaxHeld = 24;
constexpr size_t kBeyond = 64;  // what ONNX Runtime may read behind a block; AddressSanitizer forbids it to our code

std::atomic<int> failures{0};

void Expect(bool held, const char* what) {
  if (!held) {
    ++failures;
    std::fprintf(stderr, "failed: %s\n", what);
  }
}

void Stress(antiphon::CountingAllocator& allocator, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::pair<unsigned char*, size_t>> held;
  const auto release = [&](size_t index) {
    auto [block, bytes] = held[index];
    Expect(block[0] == bytes % 251 && block[bytes - 1] == bytes % 251, "a block keeps what was written to it");
    allocator.Free(block);
    held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
  };
  for (int step = 0; step < kSteps; ++step) {
    if (held.size() < kMaxHeld && random() % 2 == 0) {
      const size_t bytes = 1 + random() % (size_t{1} << (random() % 22));
      auto* block = static_cast<unsigned char*>(allocator.Allocate(bytes));
      Expect(reinterpret_cast<uintptr_t>(block) % antiphon::CountingAllocator::kAlignment == 0, "aligned");
      std::memset(block, static_cast<int>(bytes % 251), bytes);
      held.emplace_back(block, bytes);
    } else if (!held.empty()) {
      release(random() % held.size());
    }
    if (step % 500 == 0) allocator.Trim();
  }
  while (!held.empty()) release(0);
}

void CheckLimit(antiphon::CountingAllocator& allocator) {
  allocator.SetLimit(1 << 20);
  bool refused = false;
  try {
    allocator.Allocate(2 << 20);
  } catch (const std::runtime_error&) {
    refused = true;
  }
  Expect(refused, "an allocation over the limit throws");
  void* block = allocator.Allocate(1 << 10);
  Expect(block != nullptr, "one below it does not");
  allocator.Free(block);
}

// Blocks of one allocator are freed on another's thread, and after their own is closed: each knows where it is from.
void CheckOwners(antiphon::CountingAllocator& one) {
  antiphon::CountingAllocator other;
  void* ours = one.Allocate(1 << 10);
  void* theirs = other.Allocate(3 << 10);
  const auto before = one.Stats().in_use_bytes;
  Expect(other.Stats().in_use_bytes == 3 << 10, "counted where it was asked for");
  other.Close();
  std::thread([&] {
    antiphon::CountingAllocator::Free(theirs);
    antiphon::CountingAllocator::Free(ours);
  }).join();
  Expect(one.Stats().in_use_bytes == before - (1 << 10), "freed where it was counted");
  Expect(other.Stats().in_use_bytes == 0 && other.Stats().reserved_bytes == 0, "a closed one keeps nothing");
}

// Every size around the class borders: the block is ours to its last byte (the sanitizer watches), and padded.
void CheckBorders(antiphon::CountingAllocator& allocator) {
  for (size_t power = 0; power < 20; ++power) {
    for (size_t eighth = 8; eighth < 16; ++eighth) {
      for (int offset = -129; offset <= 1; ++offset) {
        const auto bytes = static_cast<std::ptrdiff_t>((eighth << power) >> 3) + offset;
        if (bytes <= 0) continue;
        void* block = allocator.Allocate(static_cast<size_t>(bytes));
        std::memset(block, 1, static_cast<size_t>(bytes));
        constexpr size_t kHeader = antiphon::CountingAllocator::kAlignment;
        Expect(allocator.Stats().reserved_bytes >= kHeader + static_cast<size_t>(bytes) + kBeyond, "room behind a block");
        allocator.Free(block);
        allocator.Trim();
      }
    }
  }
}

}  // namespace

int main() {
  antiphon::CountingAllocator allocator;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < kThreads; ++seed) threads.emplace_back(Stress, std::ref(allocator), seed);
  for (auto& thread : threads) thread.join();
  CheckBorders(allocator);
  CheckOwners(allocator);
  CheckLimit(allocator);
  Expect(allocator.Allocate(0) == nullptr, "nothing for nothing");
  allocator.Free(nullptr);
  const auto before = allocator.Stats();
  Expect(before.in_use_bytes == 0, "everything was freed");
  Expect(before.peak_bytes > 0 && before.refusals == 1, "peak and refusals were counted");
  Expect(before.cached_bytes == before.reserved_bytes, "all that is held is cached");
  Expect(before.cached_bytes <= antiphon::CountingAllocator::kMaxCachedBytes, "the cache is bounded");
  allocator.Trim();
  Expect(allocator.Stats().reserved_bytes == 0, "trimmed to nothing");
  return failures == 0 ? 0 : 1;
}
