#include "kernel_library.h"

#include <atomic>
#include <cstring>
#include <fstream>
#include <sstream>

namespace antiphon {

namespace {

constexpr int kVersion = 2;
constexpr int kWarp = 32;
constexpr int64_t kAlignment = 16;              // of addresses, in bytes, and of aligned numbers
constexpr int kMaxDynamicShared = 8;            // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kSharedWithoutAsking = 48 << 10;  // more must be allowed for each function
// A larger file is no library of ours: a damaged one must not make us allocate.
constexpr size_t kLargestFile = size_t{1} << 28;

// Kinds of parameters in the file.
constexpr char kAddress = 'p';
constexpr char kAligned = 'a';  // int32, a multiple of 16
constexpr char kNumber = 'i';   // int32
constexpr char kFloat = 'f';    // float32

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

// Returns the letters of the words `name:kind`; empty where a word has none.
std::string KindsOf(const std::string& parameters) {
  std::istringstream words(parameters);
  std::string kinds, word;
  while (words >> word) {
    const size_t colon = word.find(':');
    if (colon == std::string::npos || colon + 2 != word.size()) return "";
    kinds += word[colon + 1];
  }
  return kinds;
}

// Returns the word of a parameter, for messages.
std::string WordAt(const std::string& parameters, size_t index) {
  std::istringstream words(parameters);
  std::string word;
  for (size_t at = 0; at <= index; ++at) words >> word;
  return word;
}

// Returns the bits of a value for the driver. Throws CudaError with the reason why it does not suit its parameter.
uint64_t BitsOf(const Argument& argument, char kind) {
  const bool is_number = kind == kNumber || kind == kAligned;
  if (argument.is_address != (kind == kAddress) || argument.is_float != (kind == kFloat)) {
    throw CudaError("the value has another kind");
  }
  uint64_t bits = 0;
  if (kind == kFloat) {
    std::memcpy(&bits, &argument.value, sizeof(argument.value));
    return bits;
  }
  // The compiler was promised what is checked here: wide loads from other addresses would fail or read beside.
  const int64_t number = is_number ? argument.number : reinterpret_cast<intptr_t>(argument.address);
  const bool is_aligned = kind == kNumber || number % kAlignment == 0;
  const auto narrow = static_cast<int32_t>(number);
  if (!is_aligned) throw CudaError(std::to_string(number) + " is no multiple of " + std::to_string(kAlignment));
  if (is_number && narrow != number) throw CudaError(std::to_string(number) + " does not fit 32 bits");
  if (is_number) {
    std::memcpy(&bits, &narrow, sizeof(narrow));
  } else {
    std::memcpy(&bits, &number, sizeof(number));
  }
  return bits;
}

}  // namespace

KernelLibrary::KernelLibrary(const std::string& path, int ordinal)
    : path_(path), multiprocessors_(DeviceAttribute(ordinal, kMultiprocessors)) {
  const std::string content = Content(path);
  const size_t end = content.find("\n\n");
  if (content.rfind("antiphon-kernels ", 0) != 0 || end == std::string::npos) {
    throw CudaError(path + " is no kernel library");
  }
  const int capability = 10 * DeviceAttribute(ordinal, kCapabilityMajor) + DeviceAttribute(ordinal, kCapabilityMinor);
  std::istringstream first(content);
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
  images_ = content.substr(end + 2);
  ReadHeader(content.substr(0, end + 1));
  if (count != kernels_.size()) throw CudaError(path + " is damaged: its header lacks kernels");
}

void KernelLibrary::ReadHeader(const std::string& header) {
  std::istringstream lines(header);
  std::string line;
  std::getline(lines, line);  // the first one describes the file
  while (std::getline(lines, line)) ReadKernel(line);
}

void KernelLibrary::ReadKernel(const std::string& line) {
  std::istringstream words(line);
  std::string name;
  Kernel kernel;
  words >> name >> kernel.num_warps >> kernel.shared_bytes >> kernel.offset >> kernel.size >> std::ws;
  std::getline(words, kernel.parameters);
  kernel.kinds = KindsOf(kernel.parameters);
  const bool has_image = kernel.offset <= images_.size() && kernel.size <= images_.size() - kernel.offset;
  const bool has_kinds = !kernel.kinds.empty() && kernel.kinds.size() <= kMostArguments;
  if (!words || !has_image || !has_kinds) throw CudaError(path_ + " is damaged at: " + line.substr(0, 80));
  kernels_.emplace(name, std::move(kernel));
}

void KernelLibrary::Require(const std::string& kernel, const std::string& parameters) const {
  const auto begin = kernels_.lower_bound(kernel);
  const auto is_variant = [&](const std::string& name) {
    return name == kernel || name.rfind(kernel + ".", 0) == 0;  // the width of a head may follow
  };
  if (begin == kernels_.end() || !is_variant(begin->first)) throw CudaError(path_ + " has no kernel " + kernel);
  for (auto found = begin; found != kernels_.end() && is_variant(found->first); ++found) {
    if (found->second.parameters == parameters) continue;
    throw CudaError(found->first + " of " + path_ + " takes " + found->second.parameters + ", not " + parameters);
  }
}

CudaHandle KernelLibrary::Loaded(const std::string& variant, Kernel* kernel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (kernel->function != nullptr) return kernel->function;
  const CudaDriver& driver = OpenDriver();
  CudaHandle module = nullptr, function = nullptr;
  const std::string image = images_.substr(kernel->offset, kernel->size);  // a copy is aligned as the driver reads it
  driver.Check(driver.cuModuleLoadData(&module, image.data()), "cuModuleLoadData");
  const std::string name = variant.substr(0, variant.find('.'));
  driver.Check(driver.cuModuleGetFunction(&function, module, name.c_str()), "cuModuleGetFunction");
  if (kernel->shared_bytes > kSharedWithoutAsking) {
    driver.Check(driver.cuFuncSetAttribute(function, kMaxDynamicShared, kernel->shared_bytes), "cuFuncSetAttribute");
  }
  return kernel->function = function;
}

void KernelLibrary::Launch(const std::string& variant, const Grid& grid, const Argument* arguments, size_t count,
                           CudaHandle stream) {
  if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return;
  const auto found = kernels_.find(variant);
  if (found == kernels_.end()) throw CudaError(path_ + " has no kernel " + variant);
  Kernel& kernel = found->second;
  if (count != kernel.kinds.size()) {
    throw CudaError(variant + " takes " + std::to_string(kernel.kinds.size()) + " values, not " +
                    std::to_string(count));
  }
  // Two further addresses are for scratch memory and profiles of Triton, which these kernels do not have.
  std::array<uint64_t, kMostArguments + 2> bits{};
  std::array<void*, kMostArguments + 2> addresses{};
  for (size_t index = 0; index < count; ++index) {
    try {
      bits[index] = BitsOf(arguments[index], kernel.kinds[index]);
    } catch (const CudaError& error) {
      throw CudaError(variant + ", " + WordAt(kernel.parameters, index) + ": " + error.what());
    }
  }
  for (size_t index = 0; index < addresses.size(); ++index) addresses[index] = &bits[index];
  const CudaDriver& driver = OpenDriver();
  driver.Check(driver.cuLaunchKernel(Loaded(variant, &kernel), static_cast<unsigned>(grid[0]),
                                     static_cast<unsigned>(grid[1]), static_cast<unsigned>(grid[2]),
                                     static_cast<unsigned>(kernel.num_warps * kWarp), 1, 1,
                                     static_cast<unsigned>(kernel.shared_bytes), stream, addresses.data(), nullptr),
               variant.c_str());
}

KernelLibrary* LoadedKernels() { return g_loaded.load(); }

void LoadKernels(const std::string& path, int ordinal) {
  UseDevice(ordinal);
  g_loaded.store(new KernelLibrary(path, ordinal));  // never destroyed: see the header
}

}  // namespace antiphon
