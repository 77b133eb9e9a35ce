// Kernels compiled ahead of time, in a file of model/antiphon/ops/cuda/compile_kernels.py, and their launches.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "cuda_driver.h"

namespace antiphon {

// One value of a launch. Made implicitly, so that a launch lists its values as a call does.
struct Argument {
  Argument(const void* address) : is_address(true), is_float(false), address(address) {}
  Argument(int64_t number) : is_address(false), is_float(false), number(number) {}
  Argument(float value) : is_address(false), is_float(true), value(value) {}

  bool is_address, is_float;
  union {
    const void* address;
    int64_t number;
    float value;
  };
};

using Grid = std::array<int64_t, 3>;

class KernelLibrary {
 public:
  static constexpr size_t kMostArguments = 32;

  // Reads a file for the architecture of a device. Throws CudaError, which names the file and what is wrong.
  KernelLibrary(const std::string& path, int ordinal);

  // Throws CudaError unless there are variants of a kernel, `embed.float16` for instance, and all of them take these
  // parameters: words `name:kind` with a space between them, as in the file.
  void Require(const std::string& kernel, const std::string& parameters) const;

  // Launches a variant with values in the order of its parameters. Throws CudaError if there is no such variant, if a
  // value does not suit its parameter, or if the driver refuses. A grid with a size of 0 is no launch.
  void Launch(const std::string& variant, const Grid& grid, const Argument* arguments, size_t count, CudaHandle stream);

  int multiprocessors() const { return multiprocessors_; }

 private:
  struct Kernel {
    int num_warps = 0;
    int shared_bytes = 0;
    size_t offset = 0;
    size_t size = 0;
    std::string parameters;
    std::string kinds;              // the letter of each parameter
    CudaHandle function = nullptr;  // null until the first launch
  };

  void ReadHeader(const std::string& header);
  void ReadKernel(const std::string& line);
  CudaHandle Loaded(const std::string& variant, Kernel* kernel);

  std::string path_;
  int multiprocessors_;
  std::string images_;
  std::map<std::string, Kernel> kernels_;
  std::mutex mutex_;
};

// The library of this process; nullptr before one was loaded.
KernelLibrary* LoadedKernels();
// Replaces it for nodes that are created from now on. Earlier ones stay in memory, because nodes and graphs use them.
void LoadKernels(const std::string& path, int ordinal);

}  // namespace antiphon
