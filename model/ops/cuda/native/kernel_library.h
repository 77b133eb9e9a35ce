// Kernels compiled ahead of time, in a file of model/ops/cuda/library_file.py, and their launches.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_driver.h"

namespace antiphon {

// Arguments of a launch by the names of the kernel's parameters.
class LaunchArguments {
 public:
  LaunchArguments& Pointer(const char* name, const void* value);
  // Throws CudaError if the value does not fit 32 bits.
  LaunchArguments& Int(const char* name, int64_t value);
  LaunchArguments& Float(const char* name, float value);

  struct Argument {
    const char* name;
    char kind;  // as in the file: p, i, f
    uint64_t bits;
  };
  const std::vector<Argument>& all() const { return arguments_; }

 private:
  LaunchArguments& Add(const char* name, char kind, const void* value, size_t bytes);

  std::vector<Argument> arguments_;
};

using Grid = std::array<int64_t, 3>;

class KernelLibrary {
 public:
  // Reads a file for the architecture of a device. Throws CudaError, which names the file and what is wrong.
  KernelLibrary(const std::string& path, int ordinal);

  // Launches a variant. Throws CudaError if there is no such variant, if an argument is missing, has another kind or
  // is unknown, or if the driver refuses. A grid with a size of 0 is no launch.
  void Launch(const std::string& variant, const Grid& grid, const LaunchArguments& arguments, CudaHandle stream);

  // Throws CudaError unless there is such a variant.
  void Require(const std::string& variant) const { Find(variant); }

  int multiprocessors() const { return multiprocessors_; }

 private:
  struct Parameter {
    std::string name;
    char kind;
  };
  struct Kernel {
    int num_warps = 0;
    int shared_bytes = 0;
    size_t offset = 0;
    size_t size = 0;
    std::vector<Parameter> parameters;
    CudaHandle function = nullptr;  // null until the first launch
  };

  void ReadHeader(const std::string& header);
  const Kernel& Find(const std::string& variant) const;
  CudaHandle Loaded(const std::string& variant, Kernel* kernel);

  std::string path_;
  int multiprocessors_;
  std::string images_;
  std::map<std::string, Kernel> kernels_;
  std::mutex mutex_;
};

// The library of this process; nullptr before one was loaded.
KernelLibrary* LoadedKernels();
// Replaces it; kernels of an earlier library stay loaded, because captured graphs use them.
void LoadKernels(const std::string& path, int ordinal);

}  // namespace antiphon
