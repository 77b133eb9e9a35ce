// Regions of a thread pool, from two threads and from within regions, while workers fall asleep and wake. Ends with
// status 1 if an index did not run exactly once, and does not end if a worker does not take its share, or nobody takes
// that of a thread that is busy.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "thread_pool.h"

using antiphon::ThreadPool;

namespace {

struct Region {
  ThreadPool* pool;
  std::vector<int> runs;  // of each index; plain numbers, so that a sanitizer sees unordered writes
  bool is_nested;
};

void Count(void* user, size_t index) {
  auto* region = static_cast<Region*>(user);
  ++region->runs[index];
  if (!region->is_nested) return;
  Region inner{region->pool, std::vector<int>(5), false};
  region->pool->Run(5, &Count, &inner);
  for (const int runs : inner.runs) {
    if (runs != 1) std::exit(1);
  }
}

void RunRegions(ThreadPool* pool, unsigned seed, int count) {
  std::mt19937 random(seed);
  for (int number = 0; number < count; ++number) {
    const size_t size = 1 + random() % (number % 8 == 0 ? 500 : 12);
    Region region{pool, std::vector<int>(size), random() % 16 == 0};
    pool->Run(size, &Count, &region);
    for (const int runs : region.runs) {
      if (runs != 1) std::exit(1);
    }
    if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));  // workers sleep
  }
}

struct Meeting {
  std::atomic<size_t> arrived{0};
  size_t expected;
};

// Every index waits for all others: each needs a thread of its own.
void Meet(void* user, size_t) {
  auto* meeting = static_cast<Meeting*>(user);
  ++meeting->arrived;
  while (meeting->arrived < meeting->expected) std::this_thread::yield();
}

// The first index waits for all others.
void WaitForRest(void* user, size_t index) {
  auto* meeting = static_cast<Meeting*>(user);
  if (index > 0) ++meeting->arrived;
  while (index == 0 && meeting->arrived < meeting->expected - 1) std::this_thread::yield();
}

}  // namespace

int main() {
  for (const size_t workers : {0, 1, 3}) {
    ThreadPool pool(workers);
    std::thread other([&] { RunRegions(&pool, 1, 1000); });
    RunRegions(&pool, 2, 4000);
    other.join();
    if (workers == 0) continue;
    for (int number = 0; number < 50; ++number) {
      std::this_thread::sleep_for(std::chrono::microseconds(20 * number));
      Meeting all{{}, workers + 1}, rest{{}, 32};
      pool.Run(all.expected, &Meet, &all);
      pool.Run(rest.expected, &WaitForRest, &rest);
    }
  }
}
