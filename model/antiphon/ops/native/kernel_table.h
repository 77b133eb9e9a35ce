// The table of the instruction set this file is compiled for. simd.h lists the rules for files that include it.
#pragma once

#include "attention_kernels.h"
#include "kernels.h"
#include "linear_kernels.h"
#include "nibble_kernels.h"
#include "row_kernels.h"
#include "sampling_kernels.h"

namespace antiphon {
namespace {

constexpr Kernels MakeTable(const char* name) {
  Kernels table{};
  table.name = name;
  table.quantize = Quantize;
  table.quantized_product = QuantizedProduct;
  table.chosen_columns = ChosenColumns;
  table.quantize_by_row = Quantize;
  table.nibble_product = NibbleProduct;
  table.float_product = FloatProduct;
  table.layer_norm = LayerNorm;
  table.rms_norm = RmsNorm;
  table.gate = GateRow;
  table.ssru = Ssru;
  table.average = Average;
  table.embed = EmbedFloat;
  table.quantized_embed = EmbedQuantized;
  table.rotate = Rotate;
  table.spread_queries = SpreadQueries;
  table.packed_attention = PackedAttention;
  table.paged_float32 = {AppendPosition<float>, FillBlock<float>, PagedAttend<float>};
  table.paged_float16 = {AppendPosition<uint16_t>, FillBlock<uint16_t>, PagedAttend<uint16_t>};
  table.cap = CapRow;
  table.summarize = Summarize;
  table.boltzmann = Boltzmann;
  table.at_least = AtLeast;
  table.rank_values = RankValues;
  table.rank_distances = RankDistances;
  table.measure_weights = MeasureWeights;
  table.keep_likely = KeepLikely;
  table.keep_near = KeepNear;
  return table;
}

}  // namespace
}  // namespace antiphon
