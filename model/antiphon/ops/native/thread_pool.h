// Threads that share the work of a region with its caller, for the regions of one model's runs.
//
// A run of a small graph has tens of regions of a few microseconds, so that a region must cost little: two empty parts
// take 0.2 us.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace antiphon {

// Each thread has a share of a region, neighbouring parts, so that what one part fetches ahead is for its own next one;
// then it takes parts of others. Workers poll for a new region for a short time, then sleep. One region runs at a time.
class ThreadPool {
 public:
  // workers: number of threads besides the caller's. Throws std::system_error if a thread cannot start.
  explicit ThreadPool(size_t workers);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() { Close(); }
  // Ends the workers. No region may run.
  void Close() noexcept;

  // Calls run(user, i) for every i below count, on this thread and the workers, and returns after the last one. run must
  // not throw. A call from another thread meanwhile, or from within a region, does all of its own work.
  void Run(size_t count, void (*run)(void*, size_t), void* user) noexcept;

 private:
  // The parts of one thread that nobody has taken: number of the region, end and next part in one word, so that no part
  // of a region that has ended can be taken.
  struct alignas(64) Share {
    std::atomic<uint64_t> parts{0};
  };

  void Work(size_t thread);
  bool WaitForRegion(size_t thread, uint32_t seen);
  void RunParts(size_t thread);
  void RunPartsOf(Share& share);

  std::vector<Share> shares_;
  uint32_t number_ = 0;  // of the last region
  // Written before the shares, and read by threads that have taken a part.
  void (*run_)(void*, size_t) = nullptr;
  void* user_ = nullptr;
  size_t count_ = 0, part_size_ = 1;
  alignas(64) std::atomic<uint32_t> num_done_{0};
  alignas(64) std::atomic<uint32_t> num_asleep_{0};
  std::atomic<bool> is_running_{false};
  std::mutex mutex_;
  bool is_ending_ = false;  // mutex_ protects it
  std::condition_variable begun_;
  std::vector<std::thread> workers_;
};

}  // namespace antiphon
