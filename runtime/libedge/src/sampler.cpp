#include "sampler.h"

#include <sys/random.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "fault.h"

namespace edge_lib {

namespace {

// NumPy's SeedSequence (numpy/random/bit_generator.pyx), after O'Neill's randutils.
class SeedSequence {
 public:
  SeedSequence(const uint32_t* entropy, size_t count) {
    for (size_t i = 0; i < 4; i++) pool_[i] = hashed(i < count ? entropy[i] : 0);
    for (int from = 0; from < 4; from++)
      for (int to = 0; to < 4; to++)
        if (from != to) pool_[to] = mixed(pool_[to], hashed(pool_[from]));
    for (size_t from = 4; from < count; from++)
      for (int to = 0; to < 4; to++) pool_[to] = mixed(pool_[to], hashed(entropy[from]));
  }
  void generate(uint64_t* out, int count) const {
    uint32_t constant = 0x8b51f9dd;
    for (int i = 0; i < 2 * count; i++) {
      uint32_t value = pool_[i % 4] ^ constant;
      constant *= 0x58f38ded;
      value *= constant;
      value ^= value >> 16;
      out[i / 2] = i % 2 ? out[i / 2] | uint64_t(value) << 32 : value;
    }
  }

 private:
  uint32_t hashed(uint32_t value) {
    value ^= constant_;
    constant_ *= 0x931e8875;
    value *= constant_;
    return value ^ value >> 16;
  }
  static uint32_t mixed(uint32_t x, uint32_t y) {
    uint32_t out = 0xca01f9dd * x - 0x4973f715 * y;
    return out ^ out >> 16;
  }
  uint32_t constant_ = 0x43b0d7e5, pool_[4];
};

using Wide = unsigned __int128;
constexpr Wide MULTIPLIER = Wide(0x2360ed051fc65da4) << 64 | 0x4385df649fccf645;
constexpr float NEAR = 8;    // usual maximum distance of likely logits from the best
constexpr size_t FEW = 256;  // candidates that are sorted as quickly as they are filtered

}  // namespace

Rng::Rng(const uint32_t* entropy, size_t count) {
  uint64_t words[4];
  SeedSequence(entropy, count).generate(words, 4);
  increment = (Wide(words[2]) << 64 | words[3]) << 1 | 1;
  state = increment + (Wide(words[0]) << 64 | words[1]);
  state = state * MULTIPLIER + increment;
}

Rng::Rng(uint64_t seed) {
  uint32_t entropy[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  *this = Rng(entropy, entropy[1] ? 2 : 1);
}

Rng Rng::from_system() {
  uint32_t entropy[4];
  if (getrandom(entropy, sizeof entropy, 0) != sizeof entropy)
    throw Fault{EDGE_ERROR_ENGINE, "the system provides no random numbers; set a seed", "", "seed"};
  return Rng(entropy, 4);
}

double Rng::uniform() {
  state = state * MULTIPLIER + increment;
  uint64_t folded = uint64_t(state >> 64) ^ uint64_t(state);
  unsigned turn = unsigned(state >> 122);
  folded = folded >> turn | folded << (-turn & 63);
  return double(folded >> 11) * 0x1p-53;
}

std::string decimal(Wide value) {
  std::string out;
  do out.insert(out.begin(), char('0' + int(value % 10)));
  while (value /= 10);
  return out;
}

bool from_decimal(const std::string& text, Wide* value) {
  *value = 0;
  if (text.empty() || text.size() > 39) return false;
  for (char c : text) {
    if (c < '0' || c > '9') return false;
    Wide next = *value * 10 + Wide(c - '0');
    if (next / 10 != *value) return false;
    *value = next;
  }
  return true;
}

void check_sampling(const edge_sampling& how, int64_t vocab) {
  Faults faults;
  auto within = [&](const char* name, double value, double low, double high, bool above) {
    // NaN fails every comparison
    if (!(value >= low && value <= high) || (above && value <= low))
      faults.add(name, std::string("must be ") + (above ? "above " : "at least ") +
                           std::to_string(low) + " and at most " + std::to_string(high));
  };
  within("temperature", how.temperature, 0, 100, false);
  within("top_k", how.top_k, 0, INT32_MAX, false);
  within("top_p", how.top_p, 0, 1, true);
  within("min_p", how.min_p, 0, 1, false);
  within("repetition_penalty", how.repetition_penalty, 0, 100, true);
  within("repetition_window", how.repetition_window, 0, 1 << 20, false);
  if (how.forbidden_count && !how.forbidden) faults.add("forbidden", "is NULL");
  for (size_t i = 0; how.forbidden && i < how.forbidden_count; i++)
    if (how.forbidden[i] < 0 || how.forbidden[i] >= vocab)
      faults.add("forbidden", "has an id that is out of range");
  if (how.allowed_words && !how.allowed) faults.add("allowed", "is NULL");
  faults.refuse(EDGE_ERROR_INPUT);
}

void Sampler::begin(const float* logits, size_t count, const edge_sampling& how) {
  logits_ = logits, count_ = count;
  changed_ = how.repetition_penalty != 1 || how.forbidden_count || how.allowed;
  if (changed_) std::copy(logits, logits + count, adjusted_.begin());
  for (size_t i = 0; i < how.forbidden_count; i++)
    if (size_t(how.forbidden[i]) < count) adjusted_[size_t(how.forbidden[i])] = -INFINITY;
  if (!how.allowed) return;
  for (size_t i = 0; i < count; i++) {
    uint32_t word = i / 32 < how.allowed_words ? how.allowed[i / 32] : 0;
    if (!(word >> (i % 32) & 1)) adjusted_[i] = -INFINITY;
  }
}

void Sampler::penalize(int32_t token, float by) {
  size_t id = size_t(token);
  if (id >= count_ || adjusted_[id] == -INFINITY) return;
  adjusted_[id] = logits_[id] > 0 ? logits_[id] / by : logits_[id] * by;
}

// Stores the `wanted` most likely ids, and ties with the last of them, in ids_. Returns their
// number.
size_t Sampler::keep_top(const float* logits, size_t count, float best, size_t wanted) {
  // selecting among the few near the best is quick
  size_t near = 0;
  for (size_t i = 0; i < count; i++)
    if (logits[i] > best - NEAR) weights_[near++] = logits[i];
  if (near < wanted) {
    std::copy(logits, logits + count, weights_.begin());
    near = count;
  }
  auto last = weights_.begin() + std::ptrdiff_t(wanted - 1);
  std::nth_element(weights_.begin(), last, weights_.begin() + std::ptrdiff_t(near),
                   std::greater<float>());
  float least = *last;
  size_t kept = 0;
  for (size_t i = 0; i < count; i++)
    if (logits[i] >= least) ids_[kept++] = int32_t(i);
  return kept;
}

// Moves the fewest candidates with at least `top_p` of the total weight to the front, the most
// likely first. Returns their number.
size_t Sampler::keep_nucleus(size_t count, double top_p) {
  double whole = 0;
  for (size_t i = 0; i < count; i++) whole += weights_[i];
  size_t kept = count;
  float floor = float((1 - top_p) * (1 - top_p) / 6);
  while (count > FEW) {  // find a floor above which the nucleus lies, to sort fewer candidates
    double sum = 0;
    kept = 0;
    for (size_t i = 0; i < count; i++)
      if (weights_[i] >= floor) kept++, sum += weights_[i];
    if (kept == count || sum >= top_p * whole) break;
    floor = floor > 1e-30f ? floor / 8 : 0;
  }
  if (kept < count) {
    size_t to = 0;
    for (size_t i = 0; i < count; i++)
      if (weights_[i] >= floor) ids_[to] = ids_[i], weights_[to++] = weights_[i];
  }
  order_.resize(kept);
  for (size_t i = 0; i < kept; i++) order_[i] = {weights_[i], ids_[i]};
  // ids ascend, so this is the order of a stable sort by weight
  std::sort(order_.begin(), order_.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  double sum = 0;
  size_t taken = 0;
  while (taken < kept && (taken == 0 || sum < top_p * whole)) sum += order_[taken++].first;
  for (size_t i = 0; i < taken; i++) weights_[i] = order_[i].first, ids_[i] = order_[i].second;
  return taken;
}

int32_t Sampler::sample(const edge_sampling& how, Rng& rng) {
  const float* logits = changed_ ? adjusted_.data() : logits_;
  size_t count = count_;
  size_t best = size_t(std::max_element(logits, logits + count) - logits);
  if (changed_ && logits[best] == -INFINITY)
    throw Fault{EDGE_ERROR_INPUT, "no id may be sampled: all are forbidden or not allowed", "",
                "sampling"};
  if (!std::isfinite(logits[best]))
    throw Fault{EDGE_ERROR_ENGINE, "no logit is finite: nothing can be sampled", "", "logits"};
  if (how.temperature == 0) return int32_t(best);
  size_t kept = count;
  if (how.top_k > 0 && size_t(how.top_k) < count)
    kept = keep_top(logits, count, logits[best], size_t(how.top_k));
  else
    for (size_t i = 0; i < count; i++) ids_[i] = int32_t(i);
  float scale = float(std::min(1 / how.temperature, 1e30));
  for (size_t i = 0; i < kept; i++)
    weights_[i] = std::exp((logits[ids_[i]] - logits[best]) * scale);
  if (how.top_p < 1) kept = keep_nucleus(kept, how.top_p);
  if (how.min_p > 0) {
    size_t to = 0;
    for (size_t i = 0; i < kept; i++)
      if (weights_[i] >= float(how.min_p)) ids_[to] = ids_[i], weights_[to++] = weights_[i];
    kept = to;
  }
  double total = 0;
  for (size_t i = 0; i < kept; i++) total += weights_[i];
  double wanted = rng.uniform() * total, sum = 0;
  int32_t last = int32_t(best);
  for (size_t i = 0; i < kept; i++) {
    if (weights_[i] > 0) last = ids_[i];  // for when rounding leaves `wanted` beyond the sum
    sum += weights_[i];
    if (sum > wanted) break;
  }
  return last;
}

}  // namespace edge_lib
