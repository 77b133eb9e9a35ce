#include "kernel_library.h"

#include <atomic>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

namespace antiphon {

namespace {

constexpr int kVersion = 1;
constexpr int kWarp = 32;
constexpr int kMaxDynamicShared = 8;            // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kSharedWithoutAsking = 48 << 10;  // more must be allowed for each function
// A program of more is no kernel of ours: a damaged file must not make us allocate.
constexpr size_t kLargestFile = size_t{1} << 28;

std::atomic<KernelLibrary*> g_loaded{nullptr};

std::string Content(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw CudaError(path + " cannot be opened; `make kernels` compiles it");
  const auto size = static_cast<size_t>(file.tellg());
  if (size > kLargestFile) throw CudaError(path + " has " + std::to_string(size) + " bytes and is no kernel library");
  std::string content(size, '\0');
  file.seekg(0);
  if (!file.read(content.data(), static_cast<std::streamsize>(size))) throw CudaError(path + " cannot be read");
  return content;
}

}  // namespace

LaunchArguments& LaunchArguments::Add(const char* name, char kind, const void* value, size_t bytes) {
  Argument argument{name, kind, 0};
  std::memcpy(&argument.bits, value, bytes);
  arguments_.push_back(argument);
  return *this;
}

LaunchArguments& LaunchArguments::Pointer(const char* name, const void* value) {
  return Add(name, 'p', &value, sizeof(value));
}

LaunchArguments& LaunchArguments::Int(const char* name, int64_t value) {
  const auto narrow = static_cast<int32_t>(value);
  if (narrow != value) throw CudaError(std::string(name) + " is " + std::to_string(value) + "; it must fit 32 bits");
  return Add(name, 'i', &narrow, sizeof(narrow));
}

LaunchArguments& LaunchArguments::Float(const char* name, float value) { return Add(name, 'f', &value, sizeof(value)); }

KernelLibrary::KernelLibrary(const std::string& path, int ordinal)
    : path_(path), multiprocessors_(DeviceAttribute(ordinal, kMultiprocessors)) {
  std::string content = Content(path);
  const size_t end = content.find("\n\n");
  if (content.rfind("antiphon-kernels ", 0) != 0 || end == std::string::npos) {
    throw CudaError(path + " is no kernel library");
  }
  images_ = content.substr(end + 2);
  ReadHeader(content.substr(0, end));
  const int capability = 10 * DeviceAttribute(ordinal, kCapabilityMajor) + DeviceAttribute(ordinal, kCapabilityMinor);
  std::istringstream first(content.substr(0, content.find('\n')));
  std::string magic;
  int version = 0, architecture = 0;
  size_t count = 0;
  first >> magic >> version >> architecture >> count;
  if (version != kVersion) {
    throw CudaError(path + " has version " + std::to_string(version) + "; this library reads version " +
                    std::to_string(kVersion));
  }
  if (architecture != capability) {
    throw CudaError(path + " is for sm_" + std::to_string(architecture) + "; the device is sm_" +
                    std::to_string(capability));
  }
  if (count != kernels_.size()) throw CudaError(path + " is damaged: its header lacks kernels");
}

void KernelLibrary::ReadHeader(const std::string& header) {
  std::istringstream lines(header);
  std::string line;
  std::getline(lines, line);  // the first one describes the file
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string name, word;
    Kernel kernel;
    words >> name >> kernel.num_warps >> kernel.shared_bytes >> kernel.offset >> kernel.size;
    if (!words || kernel.offset > images_.size() || kernel.size > images_.size() - kernel.offset) {
      throw CudaError(path_ + " is damaged at: " + line.substr(0, 80));
    }
    while (words >> word) {
      const size_t colon = word.find(':');
      if (colon == std::string::npos || colon + 2 != word.size()) throw CudaError(path_ + " is damaged at: " + word);
      kernel.parameters.push_back({word.substr(0, colon), word[colon + 1]});
    }
    kernels_.emplace(name, std::move(kernel));
  }
}

const KernelLibrary::Kernel& KernelLibrary::Find(const std::string& variant) const {
  const auto found = kernels_.find(variant);
  if (found == kernels_.end()) throw CudaError(path_ + " has no kernel " + variant);
  return found->second;
}

CudaHandle KernelLibrary::Loaded(const std::string& variant, Kernel* kernel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (kernel->function != nullptr) return kernel->function;
  const CudaDriver& driver = OpenDriver();
  CudaHandle module = nullptr, function = nullptr;
  driver.Check(driver.cuModuleLoadData(&module, images_.data() + kernel->offset), "cuModuleLoadData");
  const std::string name = variant.substr(0, variant.find('.'));
  driver.Check(driver.cuModuleGetFunction(&function, module, name.c_str()), "cuModuleGetFunction");
  if (kernel->shared_bytes > kSharedWithoutAsking) {
    driver.Check(driver.cuFuncSetAttribute(function, kMaxDynamicShared, kernel->shared_bytes), "cuFuncSetAttribute");
  }
  return kernel->function = function;
}

void KernelLibrary::Launch(const std::string& variant, const Grid& grid, const LaunchArguments& arguments,
                           CudaHandle stream) {
  if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return;
  auto& kernel = const_cast<Kernel&>(Find(variant));
  const auto& given = arguments.all();
  if (given.size() != kernel.parameters.size()) {
    throw CudaError(variant + " takes " + std::to_string(kernel.parameters.size()) + " arguments, not " +
                    std::to_string(given.size()));
  }
  // Two further pointers are for scratch memory and profiles of Triton, which these kernels do not have.
  uint64_t none = 0;
  std::vector<void*> packed;
  for (size_t index = 0; index < given.size(); ++index) {
    const Parameter& parameter = kernel.parameters[index];
    if (parameter.name != given[index].name || parameter.kind != given[index].kind) {
      throw CudaError(variant + " takes " + parameter.name + ":" + parameter.kind + " at " + std::to_string(index) +
                      ", not " + given[index].name + ":" + given[index].kind);
    }
    packed.push_back(const_cast<uint64_t*>(&given[index].bits));
  }
  packed.push_back(&none);
  packed.push_back(&none);
  const CudaDriver& driver = OpenDriver();
  driver.Check(driver.cuLaunchKernel(Loaded(variant, &kernel), static_cast<unsigned>(grid[0]),
                                     static_cast<unsigned>(grid[1]), static_cast<unsigned>(grid[2]),
                                     static_cast<unsigned>(kernel.num_warps * kWarp), 1, 1,
                                     static_cast<unsigned>(kernel.shared_bytes), stream, packed.data(), nullptr),
               variant.c_str());
}

KernelLibrary* LoadedKernels() { return g_loaded.load(); }

void LoadKernels(const std::string& path, int ordinal) {
  UseDevice(ordinal);
  g_loaded.store(new KernelLibrary(path, ordinal));  // never destroyed: see the header
}

}  // namespace antiphon
