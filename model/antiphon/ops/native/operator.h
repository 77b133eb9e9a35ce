// Base of the operators of this library: typed inputs, outputs, attributes, tasks, and errors that name the operator
// and the refused value. Hides ONNX Runtime's C interface; defines no operator.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "ort_abi.h"
#include "workspace.h"

namespace antiphon {

// A refused call: the message names the value and the allowed range. Becomes an OrtStatus.
class OperatorError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A tensor of a call, or an optional input left out (data null, rank 0).
struct Tensor {
  static constexpr size_t kMaxRank = 8;

  void* data = nullptr;
  ElementType type = kAnyElement;
  size_t rank = 0;
  std::array<int64_t, kMaxRank> dims{};

  explicit operator bool() const { return data != nullptr || rank != 0; }
  int64_t size() const;
  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

// Name of a value in one or two parts, which are joined only for a message: operators check many values in each call.
struct Name {
  Name(const char* first, const char* second = "") : first(first), second(second) {}
  std::string text() const { return std::string(first) + second; }

  const char* first;
  const char* second;
};

class Attributes {
 public:
  Attributes(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}
  int64_t Int(const char* name) const;
  // A number of columns, tokens or heads: 1 to 2^31 - 1, so that products of a few sizes do not overflow.
  int64_t Size(const char* name) const;
  float Float(const char* name) const;
  // Returns `missing` where the node does not have the attribute.
  float Float(const char* name, float missing) const;
  std::string String(const char* name) const;
  // Inputs that are initializers of the model, by index; the others are missing.
  std::vector<Tensor> ConstantInputs() const;
  const OrtApi* api() const { return api_; }

 private:
  const OrtApi* api_;
  const OrtKernelInfo* info_;
};

// One execution of one node.
class Call {
 public:
  // constants: as Attributes::ConstantInputs returns them. Most inputs are weights, and describing one takes 0.15 us.
  Call(const OrtApi* api, OrtKernelContext* context, const std::vector<Tensor>& constants)
      : api_(api), context_(context), constants_(constants) {}

  // Returns an input of the given rank. Throws OperatorError naming it when it is missing or has another rank.
  Tensor Input(size_t index, Name name, size_t rank) const;
  Tensor OptionalInput(size_t index, Name name, size_t rank) const;
  void* Output(size_t index, std::initializer_list<int64_t> dims) const;
  // Returns the stream in which an operator of a GPU launches its kernels.
  void* GpuStream() const;

  // Runs task(0) .. task(count - 1) on the workspace's threads, or on the session's where no workspace was chosen, and
  // waits; the first exception of a task is thrown here.
  template <typename Task>
  void Parallel(size_t count, const Task& task) const {
    if (count <= 1) {
      for (size_t index = 0; index < count; ++index) task(index);
      return;
    }
    Guarded<Task> guarded{&task, ChosenWorkspace(), {}, {}, {}};
    RunParallel(count, &Guarded<Task>::Run, &guarded);
    if (guarded.refusal) throw *guarded.refusal;
    if (guarded.fault) throw std::runtime_error(*guarded.fault);
  }

 private:
  template <typename Task>
  struct Guarded {
    const Task* task;
    ModelWorkspace* workspace;
    std::mutex mutex;
    // The first of each kind. Not std::exception_ptr, whose functions old versions of libstdc++ do not export.
    std::optional<OperatorError> refusal;
    std::optional<std::string> fault;

    static void Run(void* self, size_t index) noexcept {
      auto* guarded = static_cast<Guarded*>(self);
      const WorkspaceOf counted(guarded->workspace);
      try {
        (*guarded->task)(index);
      } catch (const OperatorError& error) {
        const std::lock_guard<std::mutex> lock(guarded->mutex);
        if (!guarded->refusal) guarded->refusal = error;
      } catch (const std::exception& error) {
        const std::lock_guard<std::mutex> lock(guarded->mutex);
        if (!guarded->fault) guarded->fault = error.what();
      }
    }
  };

  void RunParallel(size_t count, void (*run)(void*, size_t), void* user) const;

  const OrtApi* api_;
  OrtKernelContext* context_;
  const std::vector<Tensor>& constants_;
};

// Throws OperatorError "<name> is <value>; <allowed>".
[[noreturn]] void Refuse(const std::string& name, int64_t value, const std::string& allowed);

// Refuses unless ok. allowed: a text, or a function that makes it: operators check many values in each call.
template <typename Allowed>
void Require(bool ok, Name name, int64_t value, const Allowed& allowed) {
  if (ok) return;
  if constexpr (std::is_invocable_v<Allowed>) {
    Refuse(name.text(), value, allowed());
  } else {
    Refuse(name.text(), value, allowed);
  }
}

struct Port {
  ElementType type;
  OrtCustomOpInputOutputCharacteristic characteristic = kRequired;
};

// The ports of several arrays, one after another.
template <size_t... Counts>
constexpr auto JoinPorts(const std::array<Port, Counts>&... parts) {
  std::array<Port, (Counts + ...)> joined{};
  size_t at = 0;
  const auto append = [&](const auto& part) {
    for (const Port& port : part) joined[at++] = port;
  };
  (append(parts), ...);
  return joined;
}

// Name of the provider that runs an operator: its kProvider, or that of processors.
template <typename Operator, typename = void>
struct ProviderOf {
  static constexpr const char* kName = "CPUExecutionProvider";
};
template <typename Operator>
struct ProviderOf<Operator, std::void_t<decltype(Operator::kProvider)>> {
  static constexpr const char* kName = Operator::kProvider;
};

// Makes an OrtCustomOp of an Operator class, which has
//   static constexpr const char* kName; static constexpr Port kInputs[], kOutputs[];
//   explicit Operator(const Attributes&);  void Run(const Call&) const;
template <typename Operator>
class Registration : public OrtCustomOp {
 public:
  Registration() : OrtCustomOp{} {
    version = kOrtApiVersion;
    GetName = [](const OrtCustomOp*) { return Operator::kName; };
    GetExecutionProviderType = [](const OrtCustomOp*) { return ProviderOf<Operator>::kName; };
    GetInputType = [](const OrtCustomOp*, size_t index) { return Operator::kInputs[index].type; };
    GetInputTypeCount = [](const OrtCustomOp*) { return std::size(Operator::kInputs); };
    GetOutputType = [](const OrtCustomOp*, size_t index) { return Operator::kOutputs[index].type; };
    GetOutputTypeCount = [](const OrtCustomOp*) { return std::size(Operator::kOutputs); };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t index) { return Operator::kInputs[index].characteristic; };
    GetOutputCharacteristic = [](const OrtCustomOp*, size_t index) { return Operator::kOutputs[index].characteristic; };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
    GetVariadicInputMinArity = GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
    GetVariadicOutputMinArity = GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
    GetStartVersion = GetEndVersion = [](const OrtCustomOp*) { return 1; };
    CreateKernelV2 = &Create;
    KernelComputeV2 = &Compute;
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }

 private:
  struct Kernel {
    const OrtApi* api;
    Operator op;
    std::vector<Tensor> constants;
  };

  static OrtStatus* Create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    return Guard(api, [&] {
      const Attributes attributes(api, info);
      *kernel = new Kernel{api, Operator(attributes), attributes.ConstantInputs()};
    });
  }

  static OrtStatus* Compute(void* kernel, OrtKernelContext* context) {
    const auto* self = static_cast<const Kernel*>(kernel);
    return Guard(self->api, [&] { self->op.Run(Call(self->api, context, self->constants)); });
  }

  template <typename Body>
  static OrtStatus* Guard(const OrtApi* api, const Body& body) {
    try {
      body();
      return nullptr;
    } catch (const OperatorError& error) {
      return api->CreateStatus(ORT_INVALID_ARGUMENT, Message(error).c_str());
    } catch (const std::exception& error) {
      return api->CreateStatus(ORT_FAIL, Message(error).c_str());
    }
  }

  static std::string Message(const std::exception& error) {
    return std::string("antiphon.") + Operator::kName + ": " + error.what();
  }
};

}  // namespace antiphon
