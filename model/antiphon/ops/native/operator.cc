#include "operator.h"

#include <algorithm>
#include <limits>

namespace antiphon {

namespace {

// More batches than threads, so that other threads do not wait for one slow task.
constexpr size_t kMaxBatches = 32;

void Check(const OrtApi* api, OrtStatus* status, Name what) {
  if (status == nullptr) return;
  const std::string message = what.text() + ": " + api->GetErrorMessage(status);
  api->ReleaseStatus(status);
  throw OperatorError(message);
}

Tensor Describe(const OrtApi* api, const OrtValue* value, Name name) {
  Tensor tensor;
  OrtTensorTypeAndShapeInfo* shape = nullptr;
  Check(api, api->GetTensorTypeAndShape(value, &shape), name);
  // These calls cannot fail on a shape just read; if they do, the shape must still be released.
  OrtStatus* failed = api->GetTensorElementType(shape, &tensor.type);
  if (failed == nullptr) failed = api->GetDimensionsCount(shape, &tensor.rank);
  if (failed == nullptr && tensor.rank <= Tensor::kMaxRank) {
    failed = api->GetDimensions(shape, tensor.dims.data(), tensor.rank);
  }
  api->ReleaseTensorTypeAndShapeInfo(shape);
  Check(api, failed, name);
  if (tensor.rank > Tensor::kMaxRank) throw OperatorError(name.text() + " has too many dimensions");
  Check(api, api->GetTensorMutableData(const_cast<OrtValue*>(value), &tensor.data), name);
  return tensor;
}

}  // namespace

int64_t Tensor::size() const {
  int64_t product = 1;
  for (size_t axis = 0; axis < rank; ++axis) product *= dims[axis];
  return product;
}

int64_t Attributes::Int(const char* name) const {
  int64_t value = 0;
  Check(api_, api_->KernelInfoGetAttribute_int64(info_, name, &value), name);
  return value;
}

int64_t Attributes::Size(const char* name) const {
  constexpr int64_t kMaxSize = std::numeric_limits<int32_t>::max();
  const int64_t value = Int(name);
  Require(value >= 1 && value <= kMaxSize, name, value, [&] { return "it must be 1 to " + std::to_string(kMaxSize); });
  return value;
}

std::vector<Tensor> Attributes::ConstantInputs() const {
  size_t count = 0;
  Check(api_, api_->KernelInfo_GetInputCount(info_, &count), "inputs");
  std::vector<Tensor> inputs(count);
  for (size_t index = 0; index < count; ++index) {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    Check(api_, api_->KernelInfoGetConstantInput_tensor(info_, index, &is_constant, &value), "constant input");
    if (is_constant != 0 && value != nullptr) inputs[index] = Describe(api_, value, "constant input");
  }
  return inputs;
}

float Attributes::Float(const char* name) const {
  float value = 0;
  Check(api_, api_->KernelInfoGetAttribute_float(info_, name, &value), name);
  return value;
}

float Attributes::Float(const char* name, float missing) const {
  float value = missing;
  OrtStatus* status = api_->KernelInfoGetAttribute_float(info_, name, &value);
  if (status == nullptr) return value;
  api_->ReleaseStatus(status);
  return missing;
}

std::string Attributes::String(const char* name) const {
  char text[32];
  size_t size = sizeof(text);
  Check(api_, api_->KernelInfoGetAttribute_string(info_, name, text, &size), name);
  return std::string(text);
}

Tensor Call::OptionalInput(size_t index, Name name, size_t rank) const {
  if (index >= constants_.size()) return {};
  Tensor tensor = constants_[index];
  if (!tensor) {
    const OrtValue* value = nullptr;
    Check(api_, api_->KernelContext_GetInput(context_, index, &value), name);
    if (value == nullptr) return {};
    tensor = Describe(api_, value, name);
  }
  if (tensor.rank != rank) {
    throw OperatorError(name.text() + " has " + std::to_string(tensor.rank) + " dimensions; it must have " +
                        std::to_string(rank));
  }
  return tensor;
}

Tensor Call::Input(size_t index, Name name, size_t rank) const {
  Tensor tensor = OptionalInput(index, name, rank);
  if (!tensor) throw OperatorError(name.text() + " is missing");
  return tensor;
}

void* Call::Output(size_t index, std::initializer_list<int64_t> dims) const {
  OrtValue* value = nullptr;
  Check(api_, api_->KernelContext_GetOutput(context_, index, dims.begin(), dims.size(), &value), "output");
  if (value == nullptr) return nullptr;  // no node reads this output
  void* data = nullptr;
  Check(api_, api_->GetTensorMutableData(value, &data), "output");
  return data;
}

void* Call::GpuStream() const {
  void* stream = nullptr;
  Check(api_, api_->KernelContext_GetGPUComputeStream(context_, &stream), "stream");
  return stream;
}

void Call::RunParallel(size_t count, void (*run)(void*, size_t), void* user) const {
  if (ModelWorkspace* workspace = ChosenWorkspace()) return workspace->pool.Run(count, run, user);
  Check(api_, api_->KernelContext_ParallelFor(context_, run, count, std::min(count, kMaxBatches), user), "threads");
}

void Refuse(const std::string& name, int64_t value, const std::string& allowed) {
  throw OperatorError(name + " is " + std::to_string(value) + "; " + allowed);
}

}  // namespace antiphon
