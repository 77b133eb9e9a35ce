// Table of the inner loops of every operator, and the choice of the table for this processor.
//
// A table's functions read and write only the memory that their arguments describe, allocate nothing and cannot fail.
// Operators check arguments, divide the work into tasks and provide the memory. Numbers are float32 unless noted.
#pragma once

#include <cstddef>
#include <cstdint>

namespace antiphon {

constexpr int64_t kPanel = 16;      // adjacent columns of a packed weight
constexpr int64_t kDepth = 64;      // int8 products are padded to a multiple of this many inputs
constexpr int64_t kNibbleGroup = 32;  // inputs of a 4-bit product that share a scale
constexpr int64_t kBlockSize = 16;  // positions of a cache block
constexpr int64_t kQueryTile = 16;  // queries that packed attention processes at once

enum class Activation { kNone, kRelu, kGelu, kGeluTanh, kSilu, kTanh, kGeluSigmoid };

inline int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// One product's packed weight. Panel p holds columns 16 p .. 16 p + 15.
struct FloatWeight {
  const float* data;  // [panels, inputs, 16]
  const float* bias;  // [outputs] or null
  int64_t inputs;
  int64_t outputs;
};

// Inputs of an integer product that stay float32, because their activations are far larger than those of the others.
struct Outliers {
  const int32_t* columns = nullptr;  // [count]
  const float* weights = nullptr;    // [panels, count, 16]
  int64_t count = 0;
};

struct QuantizedWeight {
  const int8_t* data;          // [panels, padded_inputs / 4, 16, 4]
  const float* scales;         // [panels * 16]
  const int32_t* column_sums;  // [panels * 16]
  const float* bias;           // [outputs] or null
  int64_t padded_inputs;       // multiple of 64
  int64_t outputs;
  Outliers outliers{};
};

// 4-bit integers, two's complement. Step s holds inputs 8 s .. 8 s + 7 of a panel: byte j of an output has input
// 8 s + j in its lower nibble and 8 s + 4 + j in its upper one. weight = integer * ratio * 16 scale.
struct NibbleWeight {
  const uint8_t* data;     // [panels, padded_inputs / 8, 16, 4]
  const uint16_t* ratios;  // float16 [panels, padded_inputs / 32, 16]
  const float* scales;     // [panels * 16]
  const float* offsets;    // [panels * 16]: sums over inputs of integer * 16 ratio, to correct for a zero point
  const float* bias;       // [outputs] or null
  int64_t padded_inputs;   // multiple of 64
  int64_t outputs;
  Outliers outliers{};
};

// Rows of activations, one scale and zero point each: value = (integer - zero) * step.
struct QuantizedRows {
  uint8_t* data;  // rows rounded up to 16, times padded_inputs
  float* steps;   // [rows]
  int32_t* zeros;
  int64_t rows;
  // Outliers count as zero in `data`: their columns, all bits set for other inputs [padded_inputs], and their values
  // [rows, num_outliers].
  const int32_t* columns = nullptr;
  const int32_t* mask = nullptr;
  float* outliers = nullptr;
  int64_t num_outliers = 0;
};

// Added to the score of query position q and key position k of one head; both parts can be absent.
struct ScoreBias {
  const float* table;  // [2 reach + 1] by k - q, or null
  int64_t reach;
  float slope;  // subtracts slope * |k - q|
};

// Scores of relative positions, added to the unscaled scores of one head before the softmax. Query q and key k use row
// rows[q - k] of two tables: the query is multiplied by the table of keys, the key by the table of queries. Either
// table can be null.
struct RelativeScores {
  const int32_t* rows;  // [2 reach + 1] by q - k, never falling; null: there are no such scores
  int64_t reach;
  const float* keys;     // row p at keys + p * stride
  const float* queries;  // [width][columns], scaled, by q - k beginning at `lowest`, as written by spread_queries
  int64_t stride;
  int64_t lowest;
  int64_t columns;
  float* scores;     // room for 16 floats of every row that a query of the sequence can use
  int32_t* offsets;  // room for the length of the sequence and 15 more
};

// One head of one packed sequence: query t at query + t * stride, key t at key + t * kv_stride, values likewise.
struct PackedHead {
  const float* query;
  const float* key;
  const float* value;
  float* out;  // row t at out + t * out_stride
  int64_t stride;
  int64_t kv_stride;
  int64_t out_stride;
  int64_t length;
  int64_t width;  // D
  float scale;
  float cap;  // limit of scores, cap tanh(score / cap); 0: none
  bool causal;
  ScoreBias bias;
  RelativeScores relative;
};

// One head of one row's cache: `offset` elements into block b of the row, at blocks[b], are the keys [Dp][16];
// `values` elements further the values [16][Dp].
template <typename Element>
struct PagedHead {
  Element* const* blocks;
  int64_t offset;
  int64_t values;
  int64_t width;  // D
  float scale;
  float cap;  // as in PackedHead
};

template <typename Element>
struct PagedKernels {
  // Writes key and value [D] of one position.
  void (*append)(const PagedHead<Element>&, int64_t position, const float* key, const float* value);
  // Writes keys and values of `count` positions, `stride` floats apart, into a block, beginning at its first position.
  void (*fill)(const PagedHead<Element>&, int64_t block, int64_t count, const float* key, const float* value,
               int64_t stride);
  // softmax(scale * query keys + bias) values over positions 0 .. length - 1. scores: [length rounded up to 16].
  // `position` is the query's position for the bias.
  void (*attend)(const PagedHead<Element>&, const float* query, int64_t length, int64_t position, const ScoreBias&,
                 float* scores, float* out);
};

// Summary of one row's logits in a range of columns.
struct LogitSummary {
  float largest;
  int32_t index;    // of the largest, lowest on ties; relative to the first column
  float sum;        // of exp(logit - largest); 0 unless requested
  int32_t invalid;  // not 0 when there is a NaN
};

// Conversion of values to the logarithms of their weights: (value - largest) / temperature.
struct Scale {
  float largest;
  float inverse;  // of the temperature
};

// Conversion of values to the distance of their surprise from the entropy: |log_total - log weight - entropy|, in
// double precision.
struct Surprise {
  Scale scale;
  double log_total;
  double entropy;
};

inline double DistanceOf(float value, const Surprise& surprise) {
  const double distance = static_cast<double>(value) - static_cast<double>(surprise.scale.largest);
  return __builtin_fabs(surprise.log_total - distance * static_cast<double>(surprise.scale.inverse) - surprise.entropy);
}

// Sums over tokens: of the weights, and of each weight times its logarithm.
struct Moments {
  double total;
  double scaled;
};

// Tokens that can be sampled, by rising id. The arrays have room for their elements and 16 more, rounded up to 16.
struct Tokens {
  int32_t* ids;
  float* values;
  float* weights;
};

// A rank r, 0 or more, has bucket min(r * kBucketsPerRank, kRankBuckets - 1).
constexpr int64_t kRankBuckets = 2048;
constexpr float kBucketsPerRank = 64.0f;

struct Kernels {
  const char* name;

  // int8: quantises rows begin .. end - 1 of x [rows, inputs]. Each table has its own layout of rows.data.
  void (*quantize)(const float* x, int64_t inputs, int64_t padded_inputs, const QuantizedRows& rows, int64_t begin,
                   int64_t end);
  // out[r, c] for columns of panels begin .. end - 1; column c of the product is stored at out[r * stride + c - 16
  // begin].
  void (*quantized_product)(const QuantizedRows&, const QuantizedWeight&, Activation, int64_t begin, int64_t end,
                            float* out, int64_t stride);
  // out[i] is column ids[i] of the product with row `row`, without outliers; columns: the weight as [outputs,
  // padded_inputs].
  void (*chosen_columns)(const QuantizedRows&, int64_t row, const QuantizedWeight&, const int8_t* columns,
                         const int32_t* ids, int64_t count, float* out);
  // Chosen columns and 4-bit products read rows that `quantize_by_row` wrote: row r at r * padded_inputs in every table.
  void (*quantize_by_row)(const float* x, int64_t inputs, int64_t padded_inputs, const QuantizedRows& rows,
                          int64_t begin, int64_t end);
  void (*nibble_product)(const QuantizedRows&, const NibbleWeight&, Activation, int64_t begin, int64_t end, float* out,
                         int64_t stride);
  void (*float_product)(const float* x, int64_t rows, const FloatWeight&, Activation, int64_t begin, int64_t end,
                        float* out, int64_t stride);

  // normed = norm(x + residual) * weight + bias, sum = x + residual; residual, weight, bias and sum can be null.
  void (*layer_norm)(const float* x, const float* residual, const float* weight, const float* bias, float epsilon,
                     int64_t width, float* normed, float* sum);
  void (*rms_norm)(const float* x, const float* residual, const float* weight, const float* bias, float epsilon,
                   int64_t width, float* normed, float* sum);
  // out[i] = act(gate[i]) * linear[i]
  void (*gate)(const float* gate, const float* linear, Activation, int64_t width, float* out);
  // One token of a recurrence: state[i] = f before[i] + (1 - f) gates[i] with f = sigmoid(gates[width + i]), and out[i]
  // = relu(state[i]). before can be null, which is zero.
  void (*ssru)(const float* gates, const float* before, int64_t width, float* state, float* out);
  // out[i] = state[i] = (position before[i] + x[i]) / (position + 1); before is not read at position 0.
  void (*average)(const float* x, const float* before, int64_t position, int64_t width, float* state, float* out);
  // Token embeddings: out[i] = column of the packed weight * scale (* scales[column]) + position[i] (or null).
  void (*embed)(const FloatWeight&, int64_t column, float scale, const float* position, float* out);
  void (*quantized_embed)(const QuantizedWeight&, int64_t inputs, int64_t column, float scale, const float* position,
                          float* out);
  // Rotates components i and i + width / 2 of a head vector [width]: table = cos [width / 2], sin [width / 2].
  void (*rotate)(float* vector, const float* table, int64_t width);

  // Position queries of head width side by side, scaled, by distance beginning at relative.lowest. `from` holds them by
  // row, `to` is [width][columns], columns a multiple of 16.
  void (*spread_queries)(const PackedHead&, const float* from, float* to);
  // Queries first .. first + 15 of a head, fewer at the end of the sequence. scores: [16 length], tile: [16 width].
  void (*packed_attention)(const PackedHead&, int64_t first, float* scores, float* tile);
  PagedKernels<float> paged_float32;
  PagedKernels<uint16_t> paged_float16;

  // values[i] = cap tanh(values[i] / cap)
  void (*cap)(float* values, int64_t count, float cap);
  // Summary of [columns] logits.
  LogitSummary (*summarize)(const float* logits, int64_t columns, bool with_sum);
  // weights[i] = exp((logits[i] - largest) * inverse_temperature)
  void (*boltzmann)(const float* logits, int64_t columns, float largest, float inverse_temperature, float* weights);
  // Indices of the logits >= threshold, rising. Returns their number; writes at most `room`.
  int64_t (*at_least)(const float* logits, int64_t columns, float threshold, int32_t* indices, int64_t room);

  // Buckets of ranks largest - value, or distance / inverse: temperatures do not change their distribution.
  // buckets: room for `count` rounded up to 16.
  void (*rank_values)(const float* values, int64_t count, float largest, int32_t* buckets);
  void (*rank_distances)(const float* values, int64_t count, const Surprise&, int32_t* buckets);
  Moments (*measure_weights)(const float* values, const float* weights, int64_t count, const Scale&);
  // Keeps the tokens whose value is above `last`, or is `last` at an index before `end`, and whose weight is at least
  // min_weight. Reads their values from `values`, which can be tokens.values; their ids are the indices unless has_ids.
  // Returns the number of kept tokens.
  int64_t (*keep_likely)(const Tokens& tokens, const float* values, bool has_ids, int64_t count, float last,
                         int64_t end, float min_weight);
  // The same for tokens whose distance is at most `farthest`.
  int64_t (*keep_near)(const Tokens& tokens, const float* values, bool has_ids, int64_t count, const Surprise&,
                       double farthest);
};

const Kernels& PortableKernels();
const Kernels& Avx2Kernels();     // x86 with AVX2, FMA and F16C
const Kernels& AvxVnniKernels();  // those of AVX2, integer products by AVX-VNNI
const Kernels& Avx512Kernels();   // AVX-512 F, BW, DQ, VL and VNNI
const Kernels& AmxKernels();      // those of AVX-512, int8 products in AMX tiles
const Kernels& DotProdKernels();  // 64-bit Arm with dot products of int8 (optional from 8.2 on)
const Kernels& I8mmKernels();     // the same, products of several rows by products of int8 matrices (8.6)

// The fastest table that this processor can run, or the one that ANTIPHON_CPU names: portable, or avx2, avxvnni, avx512
// and amx on x86, dotprod and i8mm on Arm.
// Throws std::runtime_error for another name, or for a table that the processor cannot run.
const Kernels& ActiveKernels();

// The table of this name; null for another name, or for a table that the processor cannot run.
const Kernels* KernelsNamed(const char* name);

}  // namespace antiphon
