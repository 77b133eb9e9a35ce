#include "cuda_driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace antiphon {

namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr int kRelaxedCapture = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

template <typename Function>
void Resolve(void* library, const char* name, Function* function) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) throw CudaError(std::string(kLibrary) + " has no " + name + "; install a newer driver");
  *function = reinterpret_cast<Function>(symbol);
}

CudaDriver Resolved(void* library) {
  CudaDriver driver{};
#define ANTIPHON_RESOLVE(name) Resolve(library, #name, &driver.name)
  ANTIPHON_RESOLVE(cuInit);
  ANTIPHON_RESOLVE(cuDriverGetVersion);
  ANTIPHON_RESOLVE(cuGetErrorName);
  ANTIPHON_RESOLVE(cuGetErrorString);
  ANTIPHON_RESOLVE(cuDeviceGet);
  ANTIPHON_RESOLVE(cuDeviceGetCount);
  ANTIPHON_RESOLVE(cuDeviceGetName);
  ANTIPHON_RESOLVE(cuDeviceGetAttribute);
  ANTIPHON_RESOLVE(cuDevicePrimaryCtxRetain);
  ANTIPHON_RESOLVE(cuCtxSetCurrent);
  ANTIPHON_RESOLVE(cuThreadExchangeStreamCaptureMode);
  ANTIPHON_RESOLVE(cuMemGetInfo_v2);
  ANTIPHON_RESOLVE(cuMemAlloc_v2);
  ANTIPHON_RESOLVE(cuMemFree_v2);
  ANTIPHON_RESOLVE(cuMemHostAlloc);
  ANTIPHON_RESOLVE(cuMemFreeHost);
  ANTIPHON_RESOLVE(cuMemcpyHtoDAsync_v2);
  ANTIPHON_RESOLVE(cuMemcpyDtoHAsync_v2);
  ANTIPHON_RESOLVE(cuMemcpyDtoDAsync_v2);
  ANTIPHON_RESOLVE(cuMemsetD8Async);
  ANTIPHON_RESOLVE(cuStreamCreate);
  ANTIPHON_RESOLVE(cuStreamDestroy_v2);
  ANTIPHON_RESOLVE(cuStreamSynchronize);
  ANTIPHON_RESOLVE(cuEventCreate);
  ANTIPHON_RESOLVE(cuEventDestroy_v2);
  ANTIPHON_RESOLVE(cuEventRecord);
  ANTIPHON_RESOLVE(cuEventSynchronize);
  ANTIPHON_RESOLVE(cuModuleLoadData);
  ANTIPHON_RESOLVE(cuModuleGetFunction);
  ANTIPHON_RESOLVE(cuFuncSetAttribute);
  ANTIPHON_RESOLVE(cuLaunchKernel);
#undef ANTIPHON_RESOLVE
  return driver;
}

CudaHandle ContextOf(int ordinal) {
  static std::mutex mutex;
  static std::map<int, CudaHandle> contexts;  // retained until the process ends
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = contexts.find(ordinal); found != contexts.end()) return found->second;
  const CudaDriver& driver = OpenDriver();
  int device = 0;
  driver.Check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  CudaHandle context = nullptr;
  driver.Check(driver.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  return contexts[ordinal] = context;
}

}  // namespace

void CudaDriver::Check(int result, const char* call) const {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  throw CudaError(std::string(call) + ": " + (name != nullptr ? name : "error " + std::to_string(result)) +
                  (text != nullptr ? std::string(", ") + text : ""));
}

const CudaDriver& OpenDriver() {
  static std::mutex mutex;
  static const CudaDriver* opened = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (opened != nullptr) return *opened;
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw CudaError(std::string("no NVIDIA driver: ") + dlerror());
  const CudaDriver driver = Resolved(library);
  driver.Check(driver.cuInit(0), "cuInit");
  int count = 0;
  driver.Check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (count == 0) throw CudaError("the NVIDIA driver reports no device");
  opened = new CudaDriver(driver);
  return *opened;
}

void UseDevice(int ordinal) {
  const CudaDriver& driver = OpenDriver();
  driver.Check(driver.cuCtxSetCurrent(ContextOf(ordinal)), "cuCtxSetCurrent");
  int mode = kRelaxedCapture;
  driver.Check(driver.cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
}

int DeviceAttribute(int ordinal, int attribute) {
  const CudaDriver& driver = OpenDriver();
  int device = 0, value = 0;
  driver.Check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  driver.Check(driver.cuDeviceGetAttribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value;
}

}  // namespace antiphon
