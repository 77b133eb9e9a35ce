// Logits of a step's samples as far as later steps read them, and the panels of columns that have to be computed.
//
// The logits of a chunk of columns are kept only until they are summarised. Whole rows are kept only for samples that
// need more than the largest logit and the forced token's. Chunks are fixed, so that sums over the vocabulary always
// have the same order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "sampling_arrays.h"
#include "shortlist.h"
#include "workspace.h"

namespace antiphon {

constexpr int64_t kNotFinite = -1;
constexpr int64_t kNoneAllowed = -2;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Samples whose logits a product computes: those of `indices`, or all if it is null.
struct Subset {
  const int32_t* indices;
  int64_t count;

  int64_t operator[](int64_t row) const { return indices == nullptr ? row : indices[row]; }
};

// Kept parts of the logits: a summary of every sample and chunk, forced tokens' logits, and whole rows where needed.
class Logits {
 public:
  Logits(const SamplingArrays& sampling, int64_t vocab)
      : sampling_(sampling),
        vocab_(vocab),
        chunks_(ChunksOf(vocab)),
        summaries_(static_cast<size_t>(sampling.count() * chunks_)),
        largest_(static_cast<size_t>(sampling.count() * chunks_)),
        forced_logits_(static_cast<size_t>(sampling.count())),
        slots_(static_cast<size_t>(sampling.count())),
        kept_(static_cast<size_t>(AssignSlots())) {}

  int64_t chunks() const { return chunks_; }
  // Place of the logits of a sample that has a vocabulary of its own, by index; taken once they are written.
  float* selected(int64_t i) const { return kept_.data() + slots_[static_cast<size_t>(i)]; }

  // Takes the logits [samples, stride] of some panels for samples that have a vocabulary of their own.
  void TakeSelected(const Subset& samples, int64_t begin, int64_t end, const float* logits, int64_t stride) const {
    for (int64_t row = 0; row < samples.count; ++row, logits += stride) {
      const int64_t i = samples[row];
      if (!sampling_.is_selected(i)) continue;
      const int32_t *ids = sampling_.selected_ids(i), *last = ids + sampling_.num_selected(i);
      float* own = selected(i);
      for (const int32_t* id = std::lower_bound(ids, last, begin * kPanel); id < last && *id < end * kPanel; ++id) {
        own[id - ids] = logits[*id - begin * kPanel];
      }
    }
  }

  // Takes one chunk's logits, [samples, kChunk]. Called once for each chunk, from any thread.
  void Take(const Kernels& kernels, int64_t chunk, float* logits) const {
    const int64_t first = chunk * kChunk, columns = std::min(kChunk, vocab_ - first);
    for (int64_t i = 0; i < sampling_.count(); ++i, logits += kChunk) {
      if (sampling_.is_selected(i)) continue;
      const LogitSummary summary = sampling_.only_forbids(i)
                                       ? SummaryWithout(kernels, i, first, columns, logits)
                                       : kernels.summarize(logits, columns, sampling_.needs_log_sum(i));
      summaries_[static_cast<size_t>(i * chunks_ + chunk)] = summary;
      largest_[static_cast<size_t>(i * chunks_ + chunk)] = summary.largest;
      const int64_t place = sampling_.forced_id(i) - first;
      if (place >= 0 && place < columns) forced_logits_[static_cast<size_t>(i)] = logits[place];
      if (slots_[static_cast<size_t>(i)] < 0) continue;
      std::memcpy(kept_.data() + slots_[static_cast<size_t>(i)] + first, logits,
                  static_cast<size_t>(columns) * sizeof(float));
    }
  }

  struct Best {
    int64_t id;  // an index for a selected sample; kNotFinite where the logits are not finite
    float logit;
    double log_sum;  // log of the sum of exp over the vocabulary; 0 where the sample does not need it
  };

  Best BestOf(const Kernels& kernels, int64_t i) const {
    if (sampling_.is_selected(i)) SummariseSelected(kernels, i);
    const int64_t chunks = ChunksOf(VocabularyOf(i));
    const LogitSummary* chunk = summaries_.data() + i * chunks_;
    Best best{0, -kInfinity, 0.0};
    bool is_valid = true;
    float forbidden = -kInfinity;
    for (int64_t index = 0; index < chunks; ++index) {
      is_valid = is_valid && chunk[index].invalid == 0;
      if (chunk[index].largest > best.logit) best = {index * kChunk + chunk[index].index, chunk[index].largest, 0.0};
      if (sampling_.only_forbids(i)) forbidden = std::max(forbidden, chunk[index].sum);
    }
    if (!is_valid || !std::isfinite(std::max(best.logit, forbidden))) return {kNotFinite, best.logit, 0.0};
    if (best.logit == -kInfinity) return {kNoneAllowed, best.logit, 0.0};
    if (sampling_.needs_log_sum(i)) {
      double sum = 0;
      for (int64_t index = 0; index < chunks; ++index) {
        if (chunk[index].largest == -kInfinity) continue;  // nothing to add, and its own sum is not a number
        sum += static_cast<double>(chunk[index].sum) * std::exp(static_cast<double>(chunk[index].largest) - best.logit);
      }
      best.log_sum = best.logit + std::log(sum);
    }
    return best;
  }

  float ForcedLogitOf(int64_t i) const {
    if (!sampling_.is_selected(i)) return forced_logits_[static_cast<size_t>(i)];
    return Row(i, {}).values[sampling_.index_of(i, sampling_.forced_id(i))];
  }

  // The whole row of a sample that needs it.
  ValueRow Row(int64_t i, const Best& best) const {
    return {kept_.data() + slots_[static_cast<size_t>(i)], VocabularyOf(i), largest_.data() + i * chunks_, best.logit,
            best.id};
  }

 private:
  int64_t VocabularyOf(int64_t i) const { return sampling_.is_selected(i) ? sampling_.num_selected(i) : vocab_; }

  // Places the rows that are kept, one behind the other; returns the number of their values.
  int64_t AssignSlots() const {
    int64_t used = 0;
    for (int64_t i = 0; i < sampling_.count(); ++i) {
      const bool is_kept = sampling_.is_selected(i) || sampling_.needs_row(i);
      slots_[static_cast<size_t>(i)] = is_kept ? used : -1;
      used += is_kept ? VocabularyOf(i) : 0;
    }
    return used;
  }

  // Summarises a chunk without the forbidden tokens of sample i. `sum` is the largest of their logits.
  LogitSummary SummaryWithout(const Kernels& kernels, int64_t i, int64_t first, int64_t columns, float* logits) const {
    float largest = -kInfinity;
    bool has_nan = false;
    for (int64_t edit = sampling_.first_edit(i); edit < sampling_.end_of_edits(i); ++edit) {
      const int64_t place = sampling_.edited_id(edit) - first;
      if (place < 0 || place >= columns) continue;
      has_nan = has_nan || std::isnan(logits[place]);
      largest = std::max(largest, logits[place]);
      logits[place] = -kInfinity;
    }
    LogitSummary summary = kernels.summarize(logits, columns, /*with_sum=*/false);
    summary.sum = largest;
    summary.invalid |= has_nan;
    return summary;
  }

  void SummariseSelected(const Kernels& kernels, int64_t i) const {
    const ValueRow row = Row(i, {});
    for (int64_t chunk = 0; chunk < ChunksOf(row.vocab); ++chunk) {
      const int64_t first = chunk * kChunk, columns = std::min(kChunk, row.vocab - first);
      const LogitSummary summary = kernels.summarize(row.values + first, columns, sampling_.needs_log_sum(i));
      summaries_[static_cast<size_t>(i * chunks_ + chunk)] = summary;
      largest_[static_cast<size_t>(i * chunks_ + chunk)] = summary.largest;
    }
  }

  const SamplingArrays& sampling_;
  int64_t vocab_;
  int64_t chunks_;
  Scratch<LogitSummary> summaries_;
  Scratch<float> largest_;
  Scratch<float> forced_logits_;
  Scratch<int64_t> slots_;
  Scratch<float> kept_;
};

// The panels with a token of a sample's own vocabulary, and the samples that need each; none if a sample needs the whole
// vocabulary. A sample's logits do not depend on other samples or panels, so neither does it on its neighbours.
class SelectedPanels {
 public:
  SelectedPanels(const SamplingArrays& sampling, int64_t panels) {
    if (!sampling.are_all_selected()) return;
    std::vector<int32_t> ends(static_cast<size_t>(panels) + 1);
    Each(sampling, [&](int64_t panel, int64_t) { ++ends[static_cast<size_t>(panel) + 1]; });
    for (int64_t panel = 0; panel < panels; ++panel) {
      const auto at = static_cast<size_t>(panel);
      if (ends[at + 1] > 0) {
        panels_.push_back(panel);
        starts_.push_back(ends[at]);
      }
      ends[at + 1] += ends[at];
    }
    starts_.push_back(ends.back());
    samples_.resize(static_cast<size_t>(ends.back()));
    Each(sampling, [&](int64_t panel, int64_t i) {
      samples_[static_cast<size_t>(ends[static_cast<size_t>(panel)]++)] = static_cast<int32_t>(i);
    });
  }

  bool is_empty() const { return panels_.empty(); }
  size_t tasks() const { return (panels_.size() + kPanelsPerTask - 1) / kPanelsPerTask; }

  // Calls body(panel, samples) for the panels of a task.
  template <typename Body>
  void Run(size_t task, const Body& body) const {
    const size_t end = std::min((task + 1) * kPanelsPerTask, panels_.size());
    for (size_t index = task * kPanelsPerTask; index < end; ++index) {
      body(panels_[index], Subset{samples_.data() + starts_[index], starts_[index + 1] - starts_[index]});
    }
  }

 private:
  static constexpr size_t kPanelsPerTask = 32;

  // Calls body(panel, sample) once for each panel of each sample, sample by sample.
  template <typename Body>
  static void Each(const SamplingArrays& sampling, const Body& body) {
    for (int64_t i = 0; i < sampling.count(); ++i) {
      const int32_t* ids = sampling.selected_ids(i);
      int64_t last = -1;
      for (int64_t k = 0; k < sampling.num_selected(i); ++k) {
        const int64_t panel = ids[k] / kPanel;
        if (panel != last) body(last = panel, i);
      }
    }
  }

  std::vector<int64_t> panels_;
  std::vector<int32_t> starts_;   // of each panel in samples_, and the end
  std::vector<int32_t> samples_;
};

}  // namespace antiphon
