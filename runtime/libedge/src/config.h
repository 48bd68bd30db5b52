// What follows from a model's config: states, caches, widths. Each kind of layer is one function of
// config.cpp; edge/mixers states the same for Python, and a test compares them.
#pragma once

#include "fault.h"
#include "json.h"

namespace edge_lib {

constexpr int64_t HUGE_SIZE = int64_t(1) << 60;
// Products and sums that end at HUGE_SIZE, whatever a bundle says.
int64_t times(int64_t a, int64_t b);
int64_t plus(int64_t a, int64_t b);
int64_t up_to(int64_t value, int64_t multiple);  // the next multiple
// A size as the interface tells it.
inline int32_t narrowed(int64_t value) { return int32_t(value > INT32_MAX ? INT32_MAX : value); }

enum class DType : uint8_t { f32, f16, i8, u8, i32, i64 };
DType dtype_of(const std::string& name);
int64_t item_size(DType type);
// Whether no float among these bytes is infinite or no number.
bool finite(const char* data, int64_t bytes, DType type);

struct Shape {
  std::string name;
  std::vector<int64_t> dims;
  int64_t elements() const;
};

struct Rope {
  double theta;
  int64_t dim;
  bool scaled;
};

struct Config {
  int64_t vocab = 0, d_model = 0, max_context = 0;
  size_t layers = 0;
  std::string family;
  // of one sequence; of a convolution's state time comes first: [K-1, 1, channels]
  std::vector<Shape> recurrent;
  std::vector<Shape> caches;  // [1, heads, 0, padded width]: the capacity is to be filled in
  std::vector<int64_t> windows;  // of each cache: positions a token looks back on; 0: all
  std::vector<Shape> logs;       // [channels]
  std::vector<int64_t> conv_widths;
  std::vector<Rope> ropes;

  // The most positions that a token looks back on in a cache with a window; 1 where none has one.
  int64_t looks_back() const;

  // Of a checked `model` of a manifest. Adds what its layers do not agree on to `faults`.
  static Config of(const Json& model, Faults& faults);
};

// theta^(-2i/dim), as edge/rope.py has it.
std::vector<float> powers(double theta, int64_t dim);

}  // namespace edge_lib
