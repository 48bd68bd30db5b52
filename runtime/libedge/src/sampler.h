// Sampling of a token from logits, as in runtime/sampling.py, with the same random numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../include/edge.h"

namespace edge_lib {

// NumPy's PCG64 and its seeding: PCG XSL RR 128/64 (O'Neill, HMC-CS-2014-0905).
struct Rng {
  unsigned __int128 state = 0, increment = 1;

  Rng() = default;
  explicit Rng(uint64_t seed);
  static Rng from_system();
  double uniform();  // in [0, 1)

 private:
  Rng(const uint32_t* entropy, size_t count);
};

std::string decimal(unsigned __int128 value);
bool from_decimal(const std::string& text, unsigned __int128* value);

class Sampler {
 public:
  Sampler() = default;
  explicit Sampler(size_t vocab) : ids_(vocab), weights_(vocab), adjusted_(vocab) {
    order_.reserve(vocab);
  }

  // For each token call `begin`, `penalize` for each recent token (repeats have no effect), then
  // `sample`, which throws Fault if no logit is finite.
  void begin(const float* logits, size_t count, const edge_sampling& how);
  void penalize(int32_t token, float by);
  int32_t sample(const edge_sampling& how, Rng& rng);

 private:
  size_t keep_top(const float* logits, size_t count, float best, size_t wanted);
  size_t keep_nucleus(size_t count, double top_p);

  const float* logits_ = nullptr;  // unchanged
  size_t count_ = 0;
  bool changed_ = false;  // sample from adjusted_
  // candidates, in ascending order of ids until keep_nucleus sorts them
  std::vector<int32_t> ids_;
  std::vector<float> weights_, adjusted_;
  std::vector<std::pair<float, int32_t>> order_;
};

// Throws a Fault that names every parameter out of range.
void check_sampling(const edge_sampling& how, int64_t vocab);

}  // namespace edge_lib
