// One step of beam search over many requests: model/antiphon/ops/beam_step.py describes the arrays and calls these functions.
//
// The rules of the search are in service/antiphon/engine/beam_search.py, as are those of blocks.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "export.h"

namespace antiphon {

namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr float kLeastAlive = -0.5e9f;  // beams below it have no text yet

// A candidate that ends, of the best `width` of its search. Mirrors _ENDED in beam_step.py.
struct Ended {
  int64_t slot, parent, token_id;
  float total, logprob;
};

// A search whose beams agree on further tokens: a beam that has a text, and their number. Mirrors _AGREED there.
struct Agreed {
  int64_t slot, beam, count;
};

}  // namespace

// The searches of one shape; row-major arrays, the slot first. Mirrors _NativeSearches in beam_step.py.
struct Searches {
  int64_t width, num_candidates, max_len, num_end_ids;
  float* scores;                // [width]
  int64_t* token_ids;           // [width, max_len]
  float* logprobs;              // [width, max_len]
  const int64_t* end_ids;       // [num_end_ids]
  int64_t* lengths;             // tokens of each beam
  const int64_t* max_lengths;
  const int64_t* forced_ids;    // first token, or -1
  const int64_t* num_streamed;  // tokens that the client has; -1 where nothing is streamed before the end
  int64_t* parents;             // [width], written by choosing
  int64_t* next_ids;            // [width], written by choosing
  float* next_logprobs;         // [width], written by choosing
  uint8_t* is_over;             // written by choosing
  Agreed* agreed;
  Ended* ended;                 // written by choosing
};

// Candidates of the rows of a batch, `stride` for each row. Mirrors _NativeTops in beam_step.py.
struct Tops {
  const int64_t* ids;
  const float* scores;
  const float* logprobs;
  int64_t stride;
};

// Rows of the engine. Mirrors _NativeRows in beam_step.py.
struct Rows {
  int64_t* token_ids;
  int32_t* positions;
  int32_t* tables;  // [rows, table_width]
  int64_t table_width, block_size;
};

// What sharing blocks requires. Mirrors _NativeShared in beam_step.py.
struct Shared {
  int32_t* sources;   // blocks to copy
  int32_t* targets;   // where to
  int64_t* full;      // slots whose beams have filled a column of blocks
  int64_t num_copies, num_full;
};

namespace {

struct Candidate {
  float total;
  int64_t parent, id;
  float logprob;
};

// Chooses among the candidates of one search. Of equal totals, the one of the first beam, best first, wins.
class Choice {
 public:
  Choice(const Searches& searches, const Tops& tops)
      : searches_(searches), tops_(tops), best_(searches.num_candidates) {}

  // Fills `best` with the best candidates of the beams in `rows` [width], in order.
  void Find(int64_t slot, const int64_t* rows) {
    const float* own = searches_.scores + slot * searches_.width;
    const bool is_first = searches_.lengths[slot] == 0;
    const int64_t forced = is_first ? searches_.forced_ids[slot] : -1;
    num_found_ = 0;
    for (int64_t beam = 0; beam < searches_.width; ++beam) {
      const int64_t first = rows[beam] * tops_.stride;
      for (int64_t i = 0; i < searches_.num_candidates; ++i) {
        // As in transformers' ForcedBOSToken, a forced token adds nothing to the score, and every beam takes it.
        const bool is_forced = forced >= 0 && i == 0;
        const bool is_barred = forced >= 0 && i > 0;
        const float score = is_forced ? 0.0f : is_barred ? kNegativeInfinity : tops_.scores[first + i];
        const int64_t id = is_forced ? forced : is_barred ? -1 : tops_.ids[first + i];
        Insert({own[beam] + score, beam, id, tops_.logprobs[first + i]});
      }
    }
  }

  // Divides the best candidates into those that end and those that continue; returns the number of `ended`.
  int64_t Divide(int64_t slot, Ended* ended) {
    const int64_t width = searches_.width;
    const bool is_last = searches_.lengths[slot] + 1 >= searches_.max_lengths[slot];
    int64_t num_ended = 0, num_going = 0;
    for (const bool ends : {false, true}) {
      for (int64_t rank = 0; rank < searches_.num_candidates; ++rank) {
        const Candidate& one = best_[rank];
        if ((is_last || IsEnd(slot, one.id)) != ends) continue;
        if (ends && rank < width) ended[num_ended++] = {slot, one.parent, one.id, one.total, one.logprob};
        if (num_going < width) Continue(slot, num_going++, one);
      }
    }
    searches_.is_over[slot] = is_last || searches_.scores[slot * width] == kNegativeInfinity;
    return num_ended;
  }

 private:
  void Insert(Candidate one) {
    if (!(one.total == one.total)) one.total = kNegativeInfinity;  // not a number: its row is about to fail
    const int64_t count = searches_.num_candidates;
    if (num_found_ == count && !(one.total > best_[count - 1].total)) return;
    int64_t at = num_found_ < count ? num_found_++ : count - 1;
    for (; at > 0 && one.total > best_[at - 1].total; --at) best_[at] = best_[at - 1];
    best_[at] = one;
  }

  bool IsEnd(int64_t slot, int64_t id) const {
    const int64_t* ends = searches_.end_ids + slot * searches_.num_end_ids;
    return std::find(ends, ends + searches_.num_end_ids, id) != ends + searches_.num_end_ids;
  }

  void Continue(int64_t slot, int64_t beam, const Candidate& one) {
    const int64_t at = slot * searches_.width + beam;
    searches_.parents[at] = searches_.lengths[slot] == 0 ? 0 : one.parent;  // at first, only one beam has read the text
    searches_.next_ids[at] = std::max<int64_t>(one.id, 0);  // a beam without a candidate is dead: feed it any token
    searches_.next_logprobs[at] = one.logprob;
    searches_.scores[at] = one.total;
  }

  const Searches& searches_;
  const Tops& tops_;
  std::vector<Candidate> best_;
  int64_t num_found_ = 0;
};

bool IsMoved(const int64_t* parents, int64_t width) {
  for (int64_t beam = 0; beam < width; ++beam) {
    if (parents[beam] != beam) return true;
  }
  return false;
}

// Lets beams continue their parents' histories [width, max_len], of which `length` are used, and appends `added`.
template <typename T>
void Append(T* history, int64_t max_len, int64_t length, const int64_t* parents, const T* added, int64_t width) {
  if (length > 0 && IsMoved(parents, width)) {
    std::vector<T> before(width * length);
    for (int64_t beam = 0; beam < width; ++beam) {
      std::copy_n(history + beam * max_len, length, before.data() + beam * length);
    }
    for (int64_t beam = 0; beam < width; ++beam) {
      std::copy_n(before.data() + parents[beam] * length, length, history + beam * max_len);
    }
  }
  for (int64_t beam = 0; beam < width; ++beam) history[beam * max_len + length] = added[beam];
}

// Number of tokens after those that the client has on which all beams of a search with a text agree; `beam` becomes one
// of these beams.
int64_t NumAgreed(const Searches& searches, int64_t slot, int64_t* beam) {
  const int64_t known = searches.num_streamed[slot];
  if (known < 0) return 0;
  int64_t count = searches.lengths[slot] - known;
  const int64_t* shared = nullptr;
  for (int64_t i = 0; i < searches.width; ++i) {
    const int64_t at = slot * searches.width + i;
    if (!(searches.scores[at] > kLeastAlive)) continue;
    const int64_t* own = searches.token_ids + at * searches.max_len + known;
    if (shared == nullptr) {
      shared = own;
      *beam = i;
    } else {
      count = std::mismatch(own, own + count, shared).first - own;
    }
  }
  return shared == nullptr ? 0 : count;
}

// The block tables of one search's rows, while beams begin to continue other beams.
class Tables {
 public:
  Tables(const Rows& engine, const int64_t* rows, const int64_t* parents, int64_t width)
      : engine_(engine), rows_(rows), parents_(parents), width_(width) {}

  // Lets every beam read the first `num_read` blocks of its parent.
  void Inherit(int64_t num_read) {
    before_.resize(width_ * num_read);
    for (int64_t beam = 0; beam < width_; ++beam) std::copy_n(Of(beam), num_read, before_.data() + beam * num_read);
    for (int64_t beam = 0; beam < width_; ++beam) {
      std::copy_n(before_.data() + parents_[beam] * num_read, num_read, Of(beam));
    }
    num_read_ = num_read;
  }

  // Gives a separate block of column `num_read - 1` to each beam that would share one, and notes what to copy into it:
  // as many beams have no child as there are children beyond the first.
  void Separate(Shared* shared) {
    const int64_t column = num_read_ - 1;
    int64_t childless = 0;
    for (int64_t beam = 0; beam < width_; ++beam) {
      if (std::find(parents_, parents_ + beam, parents_[beam]) == parents_ + beam) continue;
      while (std::find(parents_, parents_ + width_, childless) != parents_ + width_) ++childless;
      const int32_t target = before_[childless++ * num_read_ + column];
      shared->sources[shared->num_copies] = before_[parents_[beam] * num_read_ + column];
      shared->targets[shared->num_copies++] = target;
      Of(beam)[column] = target;
    }
  }

 private:
  int32_t* Of(int64_t beam) const { return engine_.tables + rows_[beam] * engine_.table_width; }

  const Rows& engine_;
  const int64_t* rows_;
  const int64_t* parents_;
  int64_t width_, num_read_ = 0;
  std::vector<int32_t> before_;
};

}  // namespace

}  // namespace antiphon

// Chooses the next tokens of `count` searches, the row of each beam in `rows` [count, width]. Returns the number of
// candidates that end.
ANTIPHON_EXPORT int64_t antiphon_beams_choose(const antiphon::Searches* searches, const antiphon::Tops* tops,
                                              const int64_t* rows, int64_t count) {
  antiphon::Choice choice(*searches, *tops);
  int64_t num_ended = 0;
  for (int64_t slot = 0; slot < count; ++slot) {
    choice.Find(slot, rows + slot * searches->width);
    num_ended += choice.Divide(slot, searches->ended + num_ended);
  }
  return num_ended;
}

// Appends the chosen tokens to the histories of the beams, and their log-probabilities if they are kept. Returns the
// number of searches whose beams agree on tokens that their clients do not have.
ANTIPHON_EXPORT int64_t antiphon_beams_remember(const antiphon::Searches* searches, int64_t num_searches,
                                                int32_t keeps_logprobs) {
  const antiphon::Searches& all = *searches;
  int64_t num_agreed = 0;
  for (int64_t slot = 0; slot < num_searches; ++slot) {
    const int64_t first = slot * all.width, length = all.lengths[slot];
    const int64_t* parents = all.parents + first;
    antiphon::Append(all.token_ids + first * all.max_len, all.max_len, length, parents, all.next_ids + first,
                     all.width);
    if (keeps_logprobs) {
      antiphon::Append(all.logprobs + first * all.max_len, all.max_len, length, parents, all.next_logprobs + first,
                       all.width);
    }
    ++all.lengths[slot];
    int64_t beam = 0;
    const int64_t count = antiphon::NumAgreed(all, slot, &beam);
    if (count > 0) all.agreed[num_agreed++] = {slot, beam, count};
  }
  return num_agreed;
}

// Moves the rows of `count` searches to the chosen tokens: every row reads its parent's blocks and writes to a block of
// its own.
ANTIPHON_EXPORT void antiphon_beams_share(const antiphon::Searches* searches, const antiphon::Rows* engine,
                                          const int64_t* rows, int64_t count, antiphon::Shared* shared) {
  const int64_t width = searches->width;
  shared->num_copies = shared->num_full = 0;
  for (int64_t slot = 0; slot < count; ++slot) {
    const int64_t* own = rows + slot * width;
    const int64_t* parents = searches->parents + slot * width;
    const int32_t num_cached = engine->positions[own[0]] + 1;  // in a first step, the other beams have fed fewer
    const int64_t column = num_cached / engine->block_size;  // the one that is written next
    const bool is_partial = num_cached % engine->block_size > 0;
    if (antiphon::IsMoved(parents, width) && column + is_partial > 0) {
      antiphon::Tables tables(*engine, own, parents, width);
      tables.Inherit(column + is_partial);
      if (is_partial) tables.Separate(shared);
    }
    if (!is_partial) shared->full[shared->num_full++] = slot;
    for (int64_t beam = 0; beam < width; ++beam) {
      engine->token_ids[own[beam]] = searches->next_ids[slot * width + beam];
      engine->positions[own[beam]] = num_cached;
    }
  }
}
