// Frequencies of the rotary embedding: edge/rope.py, in fp32 where it has fp32.
#include <algorithm>
#include <cmath>

#include "config.h"

namespace edge_lib {

namespace {

constexpr double TURN = 2 * 3.14159265358979323846;

float between_0_and_1(float value) { return std::min(1.0f, std::max(0.0f, value)); }

float llama3(const Rope& rope, float inverse) {
  float turns = float(rope.original_context) * inverse / float(TURN);
  float low = float(rope.low), high = float(rope.high);
  float share = between_0_and_1((turns - low) / (high - low));
  return inverse * (share + (1 - share) / float(rope.factor));
}

float yarn(const Rope& rope, float inverse, int64_t pair) {
  // the pair that makes this many turns in the original context
  auto turning = [&](double turns) {
    double share = std::log(rope.original_context / (turns * TURN)) / std::log(rope.theta);
    return double(rope.dim) * share / 2;
  };
  double first = turning(rope.fast), last = turning(rope.slow);
  if (rope.truncate) first = std::floor(first), last = std::ceil(last);
  first = std::max(first, 0.0), last = std::min(last, double(rope.dim - 1));
  float width = last == first ? 0.001f : float(last - first);
  float divided = between_0_and_1((float(pair) - float(first)) / width);
  return inverse * (1 - divided) + inverse / float(rope.factor) * divided;
}

}  // namespace

float Rope::frequency(int64_t pair) const {
  double exponent = -float(2 * pair) / float(dim);
  float inverse = float(std::pow(double(float(theta)), exponent));
  if (scaling == "linear") return inverse / float(factor);
  if (scaling == "each") return inverse / factors[size_t(pair)];
  if (scaling == "llama3") return llama3(*this, inverse);
  if (scaling == "yarn") return yarn(*this, inverse, pair);
  return inverse;
}

}  // namespace edge_lib
