// The CUDA driver, opened at run time: a machine without it can load this library and serve on its processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace antiphon {

// The driver is missing, or a call of it failed; the message names the call and what the driver said.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

using CudaAddress = uint64_t;
using CudaHandle = void*;  // stream, event, module, function or context

// The functions that this library uses, under the names of the driver's interface. Zero is success.
struct CudaDriver {
  int (*cuInit)(unsigned flags);
  int (*cuDriverGetVersion)(int* version);
  int (*cuGetErrorName)(int error, const char** name);
  int (*cuGetErrorString)(int error, const char** text);
  int (*cuDeviceGet)(int* device, int ordinal);
  int (*cuDeviceGetCount)(int* count);
  int (*cuDeviceGetName)(char* name, int size, int device);
  int (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  int (*cuDevicePrimaryCtxRetain)(CudaHandle* context, int device);
  int (*cuCtxSetCurrent)(CudaHandle context);
  int (*cuThreadExchangeStreamCaptureMode)(int* mode);
  int (*cuMemGetInfo_v2)(size_t* free_bytes, size_t* total_bytes);
  int (*cuMemAlloc_v2)(CudaAddress* address, size_t bytes);
  int (*cuMemFree_v2)(CudaAddress address);
  int (*cuMemHostAlloc)(void** memory, size_t bytes, unsigned flags);
  int (*cuMemFreeHost)(void* memory);
  int (*cuMemcpyHtoDAsync_v2)(CudaAddress target, const void* source, size_t bytes, CudaHandle stream);
  int (*cuMemcpyDtoHAsync_v2)(void* target, CudaAddress source, size_t bytes, CudaHandle stream);
  int (*cuMemcpyDtoDAsync_v2)(CudaAddress target, CudaAddress source, size_t bytes, CudaHandle stream);
  int (*cuMemsetD8Async)(CudaAddress target, unsigned char value, size_t bytes, CudaHandle stream);
  int (*cuStreamCreate)(CudaHandle* stream, unsigned flags);
  int (*cuStreamDestroy_v2)(CudaHandle stream);
  int (*cuStreamSynchronize)(CudaHandle stream);
  int (*cuEventCreate)(CudaHandle* event, unsigned flags);
  int (*cuEventDestroy_v2)(CudaHandle event);
  int (*cuEventRecord)(CudaHandle event, CudaHandle stream);
  int (*cuEventSynchronize)(CudaHandle event);
  int (*cuModuleLoadData)(CudaHandle* module, const void* image);
  int (*cuModuleGetFunction)(CudaHandle* function, CudaHandle module, const char* name);
  int (*cuFuncSetAttribute)(CudaHandle function, int attribute, int value);
  int (*cuLaunchKernel)(CudaHandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CudaHandle stream, void** arguments,
                        void** extra);

  // Throws CudaError, which names the call, unless the result is success.
  void Check(int result, const char* call) const;
};

// Opens libcuda.so.1 and initialises it, once. Throws CudaError where there is none, or no device; tries again then.
const CudaDriver& OpenDriver();

// Makes the primary context of a device current in this thread, and lets other threads allocate during a capture.
void UseDevice(int ordinal);

// Returns an attribute of a device: CUdevice_attribute, such as kMultiprocessors.
int DeviceAttribute(int ordinal, int attribute);

constexpr int kMultiprocessors = 16;
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;

}  // namespace antiphon
