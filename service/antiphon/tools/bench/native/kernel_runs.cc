// Kernels of the native library on their own, repeated and timed in the calling thread: kernel_runs.py reads their rates.
//
// A library of its own, which hatch_build.py compiles when the benchmark runs. The kernels are the tables of the native
// library (kernels.h); both libraries are built from one checkout.
//
// A run includes what the kernels of an operator do for its inputs. It includes neither ONNX Runtime, nor the division
// into tasks, nor the allocation of outputs. Numbers of the inputs do not matter for the speed, but are not all equal.
#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <vector>

#include "bare_loops.h"
#include "export.h"
#include "kernels.h"
#include "shortlist.h"

namespace antiphon {

namespace {

// Zeroed memory, aligned as ONNX Runtime aligns tensors.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : data_(static_cast<T*>(operator new(Bytes(count), kAlignment))) {
    std::fill_n(data_, count, T{});
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { operator delete(data_, kAlignment); }
  T* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  static size_t Bytes(int64_t count) { return static_cast<size_t>(count) * sizeof(T); }
  T* data_;
};

// Numbers between -1 and 1.
void FillFloats(float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(i * 37 % 201 - 100) / 100.0f;
}

}  // namespace

// One call of a kernel, with its inputs. work: number of multiply-adds, or of bytes that are read.
class KernelRun {
 public:
  virtual ~KernelRun() = default;
  virtual void Once() = 0;
  virtual double work() const = 0;
};

namespace {

// Integers of weights, none of which is special.
template <typename T>
void FillIntegers(T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(i * 37 % 255 - 127);
}

struct ProductShape {
  int64_t rows, inputs, outputs;

  int64_t Padded() const { return RoundUp(inputs, kDepth); }
  int64_t Panels() const { return RoundUp(outputs, kPanel) / kPanel; }
  double MultiplyAdds() const { return static_cast<double>(rows * inputs * outputs); }
};

// Activations and room for their integers.
class Activations {
 public:
  explicit Activations(const ProductShape& shape)
      : shape_(shape), x_(shape.rows * shape.inputs), integers_(RoundUp(shape.rows, kPanel) * shape.Padded()),
        steps_(shape.rows), zeros_(shape.rows) {
    FillFloats(x_.data(), shape.rows * shape.inputs);
  }

  QuantizedRows Quantize(decltype(Kernels::quantize) quantize) const {
    const QuantizedRows rows{integers_.data(), steps_.data(), zeros_.data(), shape_.rows};
    quantize(x_.data(), shape_.inputs, shape_.Padded(), rows, 0, shape_.rows);
    return rows;
  }

 private:
  ProductShape shape_;
  Buffer<float> x_;
  Buffer<uint8_t> integers_;
  Buffer<float> steps_;
  Buffer<int32_t> zeros_;
};

class Int8Weight {
 public:
  explicit Int8Weight(const ProductShape& shape)
      : data_(shape.Panels() * kPanel * shape.Padded()), scales_(shape.Panels() * kPanel),
        column_sums_(shape.Panels() * kPanel),
        weight_{data_.data(), scales_.data(), column_sums_.data(), nullptr, shape.Padded(), shape.outputs} {
    FillIntegers(data_.data(), shape.Panels() * kPanel * shape.Padded());
    FillFloats(scales_.data(), shape.Panels() * kPanel);  // the search of the largest logit depends on its place
  }
  const QuantizedWeight& get() const { return weight_; }

 private:
  Buffer<int8_t> data_;
  Buffer<float> scales_;
  Buffer<int32_t> column_sums_;
  QuantizedWeight weight_;
};

class Int4Weight {
 public:
  explicit Int4Weight(const ProductShape& shape)
      : data_(shape.Panels() * kPanel * shape.Padded() / 2),
        ratios_(shape.Panels() * kPanel * shape.Padded() / kNibbleGroup), scales_(shape.Panels() * kPanel),
        offsets_(shape.Panels() * kPanel),
        weight_{data_.data(), ratios_.data(), scales_.data(), offsets_.data(), nullptr, shape.Padded(), shape.outputs} {
    FillIntegers(data_.data(), shape.Panels() * kPanel * shape.Padded() / 2);
  }
  const NibbleWeight& get() const { return weight_; }

 private:
  Buffer<uint8_t> data_;
  Buffer<uint16_t> ratios_;
  Buffer<float> scales_, offsets_;
  NibbleWeight weight_;
};

// Quantises rows and multiplies them by a weight.
template <typename Weight, auto quantize, auto product>
class ProductRun : public KernelRun {
 public:
  ProductRun(const Kernels& kernels, const ProductShape& shape)
      : kernels_(kernels), shape_(shape), activations_(shape), weight_(shape), out_(shape.rows * shape.outputs) {}

  void Once() override {
    (kernels_.*product)(activations_.Quantize(kernels_.*quantize), weight_.get(), Activation::kNone, 0,
                        shape_.Panels(), out_.data(), shape_.outputs);
  }
  double work() const override { return shape_.MultiplyAdds(); }

 private:
  const Kernels& kernels_;
  ProductShape shape_;
  Activations activations_;
  Weight weight_;
  Buffer<float> out_;
};

using Int8Run = ProductRun<Int8Weight, &Kernels::quantize, &Kernels::quantized_product>;
using Int4Run = ProductRun<Int4Weight, &Kernels::quantize_by_row, &Kernels::nibble_product>;

// End of a step where every sample takes its likeliest token: int8 logits of a chunk of columns, and their summaries.
class SampleRun : public KernelRun {
 public:
  SampleRun(const Kernels& kernels, const ProductShape& shape)
      : kernels_(kernels), shape_(shape), activations_(shape), weight_(shape), logits_(shape.rows * kChunk) {}

  void Once() override {
    const QuantizedRows rows = activations_.Quantize(kernels_.quantize);
    for (int64_t first = 0; first < shape_.outputs; first += kChunk) {
      const int64_t columns = std::min(kChunk, shape_.outputs - first), begin = first / kPanel;
      kernels_.quantized_product(rows, weight_.get(), Activation::kNone, begin,
                                 begin + RoundUp(columns, kPanel) / kPanel, logits_.data(), kChunk);
      for (int64_t row = 0; row < shape_.rows; ++row) {
        found_ = found_ + kernels_.summarize(logits_.data() + row * kChunk, columns, false).index;
      }
    }
  }
  double work() const override { return shape_.MultiplyAdds(); }

 private:
  const Kernels& kernels_;
  ProductShape shape_;
  Activations activations_;
  Int8Weight weight_;
  Buffer<float> logits_;
  int64_t found_ = 0;
};

// Rows of attention: `rows` sequences or decoder rows of `length` positions each.
struct AttentionShape {
  int64_t rows, length, heads, width;
};

// Attention of every position of packed sequences over its own sequence.
class PackedRun : public KernelRun {
 public:
  PackedRun(const Kernels& kernels, const AttentionShape& shape)
      : kernels_(kernels), shape_(shape), qkv_(shape.rows * shape.length * 3 * Columns()),
        out_(shape.rows * shape.length * Columns()), scores_(kQueryTile * shape.length),
        tile_(kQueryTile * shape.width) {
    FillFloats(qkv_.data(), shape.rows * shape.length * 3 * Columns());
  }

  void Once() override {
    for (int64_t row = 0; row < shape_.rows; ++row) {
      for (int64_t head = 0; head < shape_.heads; ++head) {
        const PackedHead packed = Head(row, head);
        for (int64_t first = 0; first < shape_.length; first += kQueryTile) {
          kernels_.packed_attention(packed, first, scores_.data(), tile_.data());
        }
      }
    }
  }

  double work() const override {
    return 2.0 * static_cast<double>(shape_.rows * shape_.length * shape_.length * Columns());
  }

 private:
  int64_t Columns() const { return shape_.heads * shape_.width; }

  PackedHead Head(int64_t row, int64_t head) const {
    const float* query = qkv_.data() + row * shape_.length * 3 * Columns() + head * shape_.width;
    PackedHead packed{};
    packed.query = query;
    packed.key = query + Columns();
    packed.value = query + 2 * Columns();
    packed.out = out_.data() + row * shape_.length * Columns() + head * shape_.width;
    packed.stride = packed.kv_stride = 3 * Columns();
    packed.out_stride = Columns();
    packed.length = shape_.length;
    packed.width = shape_.width;
    packed.scale = 0.125f;
    return packed;
  }

  const Kernels& kernels_;
  AttentionShape shape_;
  Buffer<float> qkv_, out_, scores_, tile_;
};

// Attention of one new position of every row over its cache, which has the layout of a pool with one layer. Keys and
// values of the position are appended first where the cache is the row's own.
template <typename Element>
class PagedRun : public KernelRun {
 public:
  PagedRun(const PagedKernels<Element>& kernels, const AttentionShape& shape, bool appends)
      : kernels_(kernels), shape_(shape), appends_(appends), head_elements_(kBlockSize * RoundUp(shape.width, kPanel)),
        blocks_(RoundUp(shape.length, kBlockSize) / kBlockSize),
        cache_(shape.rows * blocks_ * 2 * shape.heads * head_elements_), qkv_(shape.rows * 3 * Columns()),
        out_(shape.rows * Columns()), scores_(blocks_ * kBlockSize) {
    FillFloats(qkv_.data(), shape.rows * 3 * Columns());
    for (int64_t block = 0; block < shape.rows * blocks_; ++block) {
      pointers_.push_back(cache_.data() + block * 2 * shape.heads * head_elements_);
    }
    for (int64_t position = 0; position < shape.length; ++position) ForHeads([&](const auto& head, const float* query) {
      kernels_.append(head, position, query + Columns(), query + 2 * Columns());
    });
  }

  void Once() override {
    float* out = out_.data();
    ForHeads([&](const auto& head, const float* query) {
      const int64_t position = shape_.length - 1;
      if (appends_) kernels_.append(head, position, query + Columns(), query + 2 * Columns());
      kernels_.attend(head, query, shape_.length, position, ScoreBias{}, scores_.data(), out);
      out += shape_.width;
    });
  }

  double work() const override {
    return 2.0 * static_cast<double>(shape_.rows * shape_.length * Columns());
  }

 private:
  int64_t Columns() const { return shape_.heads * shape_.width; }

  template <typename Body>
  void ForHeads(const Body& body) const {
    for (int64_t row = 0; row < shape_.rows; ++row) {
      for (int64_t head = 0; head < shape_.heads; ++head) {
        const PagedHead<Element> paged{pointers_.data() + row * blocks_, head * head_elements_,
                                       shape_.heads * head_elements_, shape_.width, 0.125f, 0.0f};
        body(paged, qkv_.data() + row * 3 * Columns() + head * shape_.width);
      }
    }
  }

  const PagedKernels<Element>& kernels_;
  AttentionShape shape_;
  bool appends_;
  int64_t head_elements_, blocks_;
  Buffer<Element> cache_;
  std::vector<Element*> pointers_;
  Buffer<float> qkv_, out_, scores_;
};

// A loop of one instruction on registers.
class BareRun : public KernelRun {
 public:
  explicit BareRun(int64_t (*loop)(int64_t)) : loop_(loop), multiply_adds_(loop(kRounds)) {}
  void Once() override { loop_(kRounds); }
  double work() const override { return static_cast<double>(multiply_adds_); }

 private:
  static constexpr int64_t kRounds = 1000;
  int64_t (*loop_)(int64_t);
  int64_t multiply_adds_;
};

// A loop that reads bytes in order, as a product of one row reads its weight.
class ReadRun : public KernelRun {
 public:
  ReadRun(const BareLoops& loops, int64_t bytes) : loops_(loops), bytes_(bytes), data_(bytes) {}
  void Once() override { found_ = loops_.read(data_.data(), bytes_); }
  double work() const override { return static_cast<double>(bytes_); }

 private:
  const BareLoops& loops_;
  int64_t bytes_;
  Buffer<uint8_t> data_;
  volatile uint32_t found_ = 0;
};

// Returns make(); null where memory is short.
template <typename Make>
KernelRun* Made(const Make& make) noexcept {
  try {
    return make();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

const BareLoops& LoopsOf(const Kernels& kernels) {
  [[maybe_unused]] const std::string name = kernels.name;
#if defined(__x86_64__)
  if (name == "avx2") return avx2;
  if (name == "avxvnni") return avxvnni;
  if (name == "avx512") return avx512;
  if (name == "amx") return amx;
#elif defined(__aarch64__)
  if (name == "dotprod") return dotprod;
  if (name == "i8mm") return i8mm;
#endif
  return portable;
}

}  // namespace

}  // namespace antiphon

using antiphon::KernelRun;
using antiphon::Kernels;

// Each makes a run, or returns null where memory is short. kernels: a table that this processor can run.

// bits: of a weight, 8 or 4.
ANTIPHON_EXPORT KernelRun* antiphon_run_product(const Kernels* kernels, const antiphon::ProductShape* shape, int bits) {
  return antiphon::Made([&]() -> KernelRun* {
    if (bits == 4) return new antiphon::Int4Run(*kernels, *shape);
    return new antiphon::Int8Run(*kernels, *shape);
  });
}

ANTIPHON_EXPORT KernelRun* antiphon_run_sample(const Kernels* kernels, const antiphon::ProductShape* shape) {
  return antiphon::Made([&] { return new antiphon::SampleRun(*kernels, *shape); });
}

ANTIPHON_EXPORT KernelRun* antiphon_run_packed(const Kernels* kernels, const antiphon::AttentionShape* shape) {
  return antiphon::Made([&] { return new antiphon::PackedRun(*kernels, *shape); });
}

ANTIPHON_EXPORT KernelRun* antiphon_run_paged(const Kernels* kernels, const antiphon::AttentionShape* shape,
                                              int is_half, int appends) {
  return antiphon::Made([&]() -> KernelRun* {
    if (is_half != 0) return new antiphon::PagedRun<uint16_t>(kernels->paged_float16, *shape, appends != 0);
    return new antiphon::PagedRun<float>(kernels->paged_float32, *shape, appends != 0);
  });
}

// The bare loop of products with weights of 8 or 4 bits, or of float32 sums (32); null for portable code.
ANTIPHON_EXPORT KernelRun* antiphon_run_bare(const Kernels* kernels, int bits) {
  const antiphon::BareLoops& loops = antiphon::LoopsOf(*kernels);
  const auto loop = bits == 32 ? loops.fma : bits == 4 ? loops.nibble : loops.dot;
  if (loop == nullptr) return nullptr;
  return antiphon::Made([&] { return new antiphon::BareRun(loop); });
}

ANTIPHON_EXPORT KernelRun* antiphon_run_read(const Kernels* kernels, int64_t bytes) {
  return antiphon::Made([&] {
    return new antiphon::ReadRun(antiphon::LoopsOf(*kernels), antiphon::RoundUp(bytes, antiphon::kReadBytes));
  });
}

ANTIPHON_EXPORT double antiphon_run_work(const KernelRun* run) { return run->work(); }

// Returns the seconds of `calls` calls.
ANTIPHON_EXPORT double antiphon_run_seconds(KernelRun* run, int64_t calls) {
  const auto started = std::chrono::steady_clock::now();
  for (int64_t call = 0; call < calls; ++call) run->Once();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

ANTIPHON_EXPORT void antiphon_run_close(KernelRun* run) { delete run; }
