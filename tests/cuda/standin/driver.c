// The functions of libcuda that model/antiphon/ops/cuda/native/cuda_driver.h lists.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

static int g_context;

// A thread must make a context current before it allocates, copies or launches.
#define NEED_CONTEXT() if (!standin_has_context()) return kNoContext

int cuInit(unsigned flags) { (void)flags; return getenv("STANDIN_NO_DEVICE") ? 100 : kSuccess; }
int cuDriverGetVersion(int* version) { *version = 13000; return kSuccess; }
int cuGetErrorName(int error, const char** name) {
  *name = error == 100 ? "CUDA_ERROR_NO_DEVICE" : error == kNoContext ? "CUDA_ERROR_INVALID_CONTEXT"
        : error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : error == kLaunchFailed ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_INVALID_VALUE";
  return kSuccess;
}
int cuGetErrorString(int error, const char** text) { (void)error; *text = "an error of the stand-in"; return kSuccess; }
int cuDeviceGetCount(int* count) { *count = 1; return kSuccess; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal == 0 ? kSuccess : 101; }
int cuDeviceGetName(char* name, int size, int device) { (void)device; snprintf(name, size, "stand-in"); return kSuccess; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 16 ? 4 : attribute == 75 ? standin_architecture() / 10 : standin_architecture() % 10;
  return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { (void)device; *context = &g_context; return kSuccess; }
int cuCtxSetCurrent(void* context) {
  if (context != &g_context) return kInvalidValue;
  standin_set_context();
  return kSuccess;
}
int cuThreadExchangeStreamCaptureMode(int* mode) { *mode = 0; return kSuccess; }
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  NEED_CONTEXT();
  standin_memory(free_bytes, total_bytes);
  return kSuccess;
}
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  NEED_CONTEXT();
  return standin_allocate((void**)address, bytes);
}
int cuMemFree_v2(uint64_t address) {
  NEED_CONTEXT();
  return standin_free((void*)address);
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  NEED_CONTEXT();
  (void)flags;
  *memory = standin_allocate_host(bytes);
  return *memory ? kSuccess : kOutOfMemory;
}
int cuMemFreeHost(void* memory) {
  NEED_CONTEXT();
  free(memory);
  return kSuccess;
}
int cuMemcpyHtoDAsync_v2(uint64_t target, const void* source, size_t bytes, Stream* stream) {
  NEED_CONTEXT();
  return standin_copy((void*)target, source, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void* target, uint64_t source, size_t bytes, Stream* stream) {
  NEED_CONTEXT();
  return standin_copy(target, (const void*)source, bytes, stream);
}
int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t bytes, Stream* stream) {
  NEED_CONTEXT();
  return standin_copy((void*)target, (const void*)source, bytes, stream);
}
int cuMemsetD8Async(uint64_t target, unsigned char byte, size_t bytes, Stream* stream) {
  NEED_CONTEXT();
  return standin_fill((void*)target, byte, bytes, stream);
}
int cuStreamCreate(Stream** stream, unsigned flags) {
  NEED_CONTEXT();
  (void)flags;
  *stream = standin_new_stream();
  return kSuccess;
}
int cuStreamDestroy_v2(Stream* stream) {
  NEED_CONTEXT();
  free(stream);
  return kSuccess;
}
int cuStreamSynchronize(Stream* stream) { return standin_is_capturing(stream) ? kInCapture : kSuccess; }
int cuEventCreate(void** event, unsigned flags) {
  NEED_CONTEXT();
  (void)flags;
  *event = calloc(1, 8);
  return kSuccess;
}
int cuEventDestroy_v2(void* event) {
  NEED_CONTEXT();
  free(event);
  return kSuccess;
}
int cuEventRecord(void* event, Stream* stream) { (void)event, (void)stream; return kSuccess; }
int cuEventSynchronize(void* event) { (void)event; return kSuccess; }

// An image is the name of a variant and its number of arguments, as text.
int cuModuleLoadData(Kernel** module, const char* image) {
  NEED_CONTEXT();
  Kernel* kernel = calloc(1, sizeof(Kernel));
  if (sscanf(image, "%95s %d", kernel->name, &kernel->num_arguments) != 2) return kInvalidValue;
  *module = kernel;
  return kSuccess;
}
int cuModuleGetFunction(Kernel** function, Kernel* module, const char* name) {
  *function = module;
  return strncmp(module->name, name, strlen(name)) == 0 ? kSuccess : kInvalidValue;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return kSuccess;
}
int cuLaunchKernel(Kernel* kernel, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, Stream* stream, void** arguments, void** extra) {
  (void)block_x, (void)block_y, (void)block_z, (void)shared_bytes, (void)extra;
  return standin_launch(kernel, x, y, z, arguments, stream);
}
