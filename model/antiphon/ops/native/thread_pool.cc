#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

namespace antiphon {

namespace {

// Parts of a region at most: enough that nobody waits long for the last one, and few enough to take cheaply.
constexpr size_t kMaxParts = 32;
// Longer than the time between two regions of a run and between two runs of an engine that has work, and so short that
// an idle server uses little time.
constexpr std::chrono::microseconds kPollTime{100};
constexpr int kPausesPerLook = 32;
// Looks for the last part before this thread offers its core, which the thread of that part may need.
constexpr int kPatience = 2000;

// number << 32 | end << 16 | next
uint32_t NumberOf(uint64_t parts) { return static_cast<uint32_t>(parts >> 32); }
size_t EndOf(uint64_t parts) { return parts >> 16 & 0xffff; }
size_t NextOf(uint64_t parts) { return parts & 0xffff; }

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace

ThreadPool::ThreadPool(size_t workers) : shares_(workers + 1) {
  try {
    workers_.reserve(workers);
    for (size_t thread = 1; thread <= workers; ++thread) {
      workers_.emplace_back([this, thread] { Work(thread); });
#if defined(__linux__)  // elsewhere a thread can only name itself
      pthread_setname_np(workers_.back().native_handle(), "antiphon-pool");
#endif
    }
  } catch (...) {
    Close();
    throw;
  }
}

void ThreadPool::Close() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
  }
  begun_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPool::Run(size_t count, void (*run)(void*, size_t), void* user) noexcept {
  if (count <= 1 || workers_.empty() || is_running_.exchange(true, std::memory_order_acquire)) {
    for (size_t index = 0; index < count; ++index) run(user, index);
    return;
  }
  run_ = run;
  user_ = user;
  count_ = count;
  part_size_ = (count + kMaxParts - 1) / kMaxParts;
  num_done_.store(0, std::memory_order_relaxed);
  const uint64_t number = ++number_;
  const uint64_t parts = (count + part_size_ - 1) / part_size_, threads = shares_.size();
  const auto first_of = [&](uint64_t thread) { return (parts * thread + threads - 1) / threads; };
  for (size_t thread = 0; thread < threads; ++thread) {  // this thread, which begins first, has the largest share
    const uint64_t begin = first_of(thread), end = first_of(thread + 1);
    // Either a worker that falls asleep sees its share, or it is seen below.
    shares_[thread].parts.store(number << 32 | end << 16 | begin, std::memory_order_seq_cst);
  }
  if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
    { const std::lock_guard<std::mutex> lock(mutex_); }
    begun_.notify_all();
  }
  RunParts(0);
  for (int looks = 0; num_done_.load(std::memory_order_acquire) != parts; ++looks) {
    if (looks < kPatience) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
  is_running_.store(false, std::memory_order_release);
}

void ThreadPool::RunParts(size_t thread) {
  for (size_t i = 0; i < shares_.size(); ++i) RunPartsOf(shares_[(thread + i) % shares_.size()]);
}

void ThreadPool::RunPartsOf(Share& share) {
  uint64_t parts = share.parts.load(std::memory_order_acquire);
  while (NextOf(parts) < EndOf(parts)) {
    if (!share.parts.compare_exchange_weak(parts, parts + 1, std::memory_order_acquire)) continue;
    const size_t begin = NextOf(parts) * part_size_, end = std::min(begin + part_size_, count_);
    for (size_t index = begin; index < end; ++index) run_(user_, index);
    num_done_.fetch_add(1, std::memory_order_release);
    parts = share.parts.load(std::memory_order_acquire);
  }
}

void ThreadPool::Work(size_t thread) {
  uint32_t seen = 0;
  while (WaitForRegion(thread, seen)) {
    seen = NumberOf(shares_[thread].parts.load(std::memory_order_acquire));
    RunParts(thread);
  }
}

bool ThreadPool::WaitForRegion(size_t thread, uint32_t seen) {
  const auto has_begun = [&] { return NumberOf(shares_[thread].parts.load(std::memory_order_seq_cst)) != seen; };
  const auto begin = std::chrono::steady_clock::now();
  do {
    for (int pause = 0; pause < kPausesPerLook; ++pause) {
      if (has_begun()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() - begin < kPollTime);
  std::unique_lock<std::mutex> lock(mutex_);
  num_asleep_.fetch_add(1, std::memory_order_seq_cst);
  begun_.wait(lock, [&] { return is_ending_ || has_begun(); });
  num_asleep_.fetch_sub(1, std::memory_order_relaxed);
  return !is_ending_;
}

}  // namespace antiphon
