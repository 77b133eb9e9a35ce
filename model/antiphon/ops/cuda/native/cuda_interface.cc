// C interface of the driver for Python: model/antiphon/ops/cuda/driver.py. Every function returns null, or the text of an error
// that is valid until the thread's next call.

#include <cstdint>
#include <cstring>
#include <string>

#include "../../native/export.h"
#include "cuda_driver.h"
#include "kernel_library.h"

namespace antiphon {

namespace {

// Mirrors _NativeDescription in driver.py, field by field.
struct CudaDescription {
  char name[256];
  int32_t architecture;
  int32_t multiprocessors;
  int32_t driver_version;
  uint64_t total_bytes;
  uint64_t free_bytes;
};

template <typename Body>
const char* Guarded(const Body& body) noexcept {
  static thread_local std::string message;
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

CudaHandle Handle(uint64_t value) { return reinterpret_cast<CudaHandle>(value); }

void Describe(int ordinal, CudaDescription* out) {
  const CudaDriver& driver = OpenDriver();
  UseDevice(ordinal);
  int device = 0;
  driver.Check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  driver.Check(driver.cuDeviceGetName(out->name, sizeof(out->name), device), "cuDeviceGetName");
  driver.Check(driver.cuDriverGetVersion(&out->driver_version), "cuDriverGetVersion");
  out->architecture = 10 * DeviceAttribute(ordinal, kCapabilityMajor) + DeviceAttribute(ordinal, kCapabilityMinor);
  out->multiprocessors = DeviceAttribute(ordinal, kMultiprocessors);
  size_t free_bytes = 0, total_bytes = 0;
  driver.Check(driver.cuMemGetInfo_v2(&free_bytes, &total_bytes), "cuMemGetInfo");
  out->free_bytes = free_bytes;
  out->total_bytes = total_bytes;
}

}  // namespace

}  // namespace antiphon

using antiphon::Guarded;
using antiphon::Handle;
using antiphon::OpenDriver;

#define ANTIPHON_CUDA(call, ...) \
  Guarded([&] {                  \
    const auto& driver = OpenDriver(); \
    driver.Check(driver.call(__VA_ARGS__), #call); \
  })

ANTIPHON_EXPORT const char* antiphon_cuda_describe(int ordinal, uint64_t out) {
  return Guarded([&] { antiphon::Describe(ordinal, reinterpret_cast<antiphon::CudaDescription*>(out)); });
}

ANTIPHON_EXPORT const char* antiphon_cuda_load(int ordinal, const char* path) {
  return Guarded([&] { antiphon::LoadKernels(path, ordinal); });
}

ANTIPHON_EXPORT const char* antiphon_cuda_use(int ordinal) {
  return Guarded([&] { antiphon::UseDevice(ordinal); });
}

ANTIPHON_EXPORT const char* antiphon_cuda_allocate(uint64_t bytes, uint64_t* address) {
  return ANTIPHON_CUDA(cuMemAlloc_v2, address, bytes);
}

ANTIPHON_EXPORT const char* antiphon_cuda_free(uint64_t address) { return ANTIPHON_CUDA(cuMemFree_v2, address); }

ANTIPHON_EXPORT const char* antiphon_cuda_allocate_pinned(uint64_t bytes, uint64_t* address) {
  return ANTIPHON_CUDA(cuMemHostAlloc, reinterpret_cast<void**>(address), bytes, 0);
}

ANTIPHON_EXPORT const char* antiphon_cuda_free_pinned(uint64_t address) {
  return ANTIPHON_CUDA(cuMemFreeHost, Handle(address));
}

ANTIPHON_EXPORT const char* antiphon_cuda_copy_in(uint64_t target, uint64_t source, uint64_t bytes, uint64_t stream) {
  return ANTIPHON_CUDA(cuMemcpyHtoDAsync_v2, target, Handle(source), bytes, Handle(stream));
}

ANTIPHON_EXPORT const char* antiphon_cuda_copy_out(uint64_t target, uint64_t source, uint64_t bytes, uint64_t stream) {
  return ANTIPHON_CUDA(cuMemcpyDtoHAsync_v2, Handle(target), source, bytes, Handle(stream));
}

ANTIPHON_EXPORT const char* antiphon_cuda_copy_within(uint64_t target, uint64_t source, uint64_t bytes,
                                                      uint64_t stream) {
  return ANTIPHON_CUDA(cuMemcpyDtoDAsync_v2, target, source, bytes, Handle(stream));
}

ANTIPHON_EXPORT const char* antiphon_cuda_fill(uint64_t target, int byte, uint64_t bytes, uint64_t stream) {
  return ANTIPHON_CUDA(cuMemsetD8Async, target, static_cast<unsigned char>(byte), bytes, Handle(stream));
}

ANTIPHON_EXPORT const char* antiphon_cuda_stream_create(uint64_t* stream) {
  constexpr unsigned kNonBlocking = 1;  // it does not wait for the default stream
  return ANTIPHON_CUDA(cuStreamCreate, reinterpret_cast<void**>(stream), kNonBlocking);
}

ANTIPHON_EXPORT const char* antiphon_cuda_stream_destroy(uint64_t stream) {
  return ANTIPHON_CUDA(cuStreamDestroy_v2, Handle(stream));
}

ANTIPHON_EXPORT const char* antiphon_cuda_stream_wait(uint64_t stream) {
  return ANTIPHON_CUDA(cuStreamSynchronize, Handle(stream));
}

ANTIPHON_EXPORT const char* antiphon_cuda_event_create(uint64_t* event) {
  constexpr unsigned kWithoutTimes = 2;
  return ANTIPHON_CUDA(cuEventCreate, reinterpret_cast<void**>(event), kWithoutTimes);
}

ANTIPHON_EXPORT const char* antiphon_cuda_event_destroy(uint64_t event) {
  return ANTIPHON_CUDA(cuEventDestroy_v2, Handle(event));
}

ANTIPHON_EXPORT const char* antiphon_cuda_event_record(uint64_t event, uint64_t stream) {
  return ANTIPHON_CUDA(cuEventRecord, Handle(event), Handle(stream));
}

ANTIPHON_EXPORT const char* antiphon_cuda_event_wait(uint64_t event) {
  return ANTIPHON_CUDA(cuEventSynchronize, Handle(event));
}
