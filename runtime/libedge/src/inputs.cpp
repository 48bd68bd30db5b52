#include "inputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace edge_lib {

namespace {

bool begins(const std::string& text, const char* with) {
  return text.compare(0, std::strlen(with), with) == 0;
}

// Returns the row of a convolution's `index`-th input, counting the state's, the pending ones and
// the run's as one chain. Rows are [state slot: K-1 | log slots: S | new tokens: T].
int32_t tap_row(const Step& step, int width, int64_t index) {
  const Ledger& ledger = step.before;
  if (index < width - 1) return int32_t(index);
  index -= width - 1;
  if (index < ledger.count()) return ledger.pending()[index] + width - 1;
  return int32_t(width - 1 + 2 * ledger.window + index - ledger.count());
}

}  // namespace

int64_t place_of(const Step& step, int token) {
  int64_t depth = token;
  if (step.tree) {
    depth = 0;
    for (int at = step.after.parents[token]; at >= 0; at = step.after.parents[at]) depth++;
  }
  return step.before.position + depth;
}

InputWriter::InputWriter(const Plan& plan, const std::string& name, char* target)
    : whole_(reinterpret_cast<int32_t*>(target)), real_(reinterpret_cast<float*>(target)) {
  static const std::pair<const char*, What> plain[] = {
      {"run", fields},    {SLIDING_RUN, sliding}, {"tokens", tokens},       {"rows", rows},
      {"replay", replay}, {"slots", slots},       {"positions", positions}, {"ancestors", ancestors},
  };
  for (auto [known, what] : plain)
    if (name == known) {
      what_ = what;
      return;
    }
  // the plan has been checked: only rotations and taps are left
  if (begins(name, "rope")) {
    inverses_ = &plan.inverses[std::stoul(name.substr(4))];
    what_ = name.back() == 's' ? cosines : sines;
    return;
  }
  what_ = begins(name, "taps") ? taps : state_taps;
  width_ = std::stoi(name.substr(what_ == taps ? 4 : 10));
}

void InputWriter::write(const RunInputs& run) const {
  const Step& step = run.step;
  const Ledger& ledger = step.before;
  int count = step.tokens;
  switch (what_) {
    case fields:
    case sliding: {
      const int64_t values[8] = {ledger.count(),
                                 step.advance,
                                 ledger.source(),
                                 ledger.spare(),
                                 step.store,
                                 ledger.position - (what_ == sliding ? ledger.first : 0),
                                 0,
                                 0};
      std::copy(values, values + 8, whole_);
      break;
    }
    case tokens:
      if (run.tokens)
        std::copy(run.tokens, run.tokens + count, whole_);
      else
        std::fill(whole_, whole_ + count, 0);
      break;
    case rows:
      for (int i = 0; run.all_rows && i < count; i++) whole_[i] = i;
      if (!run.all_rows && count) whole_[0] = count - 1;
      break;
    case replay:
      std::copy(ledger.pending(), ledger.pending() + ledger.count(), whole_);
      break;
    case slots:
      for (int i = 0; i < count; i++) whole_[i] = step.logged ? step.slots[i] : -1;
      break;
    case positions:
      for (int i = 0; i < count; i++) whole_[i] = int32_t(place_of(step, i));
      break;
    case ancestors:
      for (int i = 0; i < count; i++)
        for (int j = 0; j < count; j++) whole_[i * int64_t(count) + j] = !step.tree && j <= i;
      for (int i = 0; step.tree && i < count; i++)
        for (int at = i; at >= 0; at = step.after.parents[at]) whole_[i * count + at] = 1;
      break;
    case taps:
    case state_taps:
      write_taps(run);
      break;
    default:
      write_angles(run);
  }
}

void InputWriter::write_taps(const RunInputs& run) const {
  const Step& step = run.step;
  int replayed = step.before.count();
  if (what_ == state_taps) {
    int end = step.store == LAST ? replayed + step.tokens : step.advance;
    for (int k = 0; k < width_ - 1; k++) whole_[k] = tap_row(step, width_, end + k);
    return;
  }
  for (int t = 0; t < step.tokens; t++) {
    int32_t* own = whole_ + int64_t(t) * width_;
    if (!step.tree) {
      for (int k = 0; k < width_; k++) own[k] = tap_row(step, width_, int64_t(replayed) + t + k);
      continue;
    }
    // the token's branch backwards, then the inputs before the tree
    int k = width_ - 1, before = width_ - 1 + replayed;
    for (int at = t; at >= 0 && k >= 0; at = step.after.parents[at])
      own[k--] = tap_row(step, width_, before + at);
    for (int at = before - 1; k >= 0; at--) own[k--] = tap_row(step, width_, at);
  }
}

void InputWriter::write_angles(const RunInputs& run) const {
  float* out = real_;
  for (int t = 0; t < run.step.tokens; t++) {
    float place = float(place_of(run.step, t));
    for (float inverse : *inverses_) {
      double angle = place * inverse;  // a product of fp32
      *out++ = float(what_ == cosines ? std::cos(angle) : std::sin(angle));
    }
  }
}

}  // namespace edge_lib
