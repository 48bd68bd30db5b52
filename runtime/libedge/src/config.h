// Shapes of states, caches and logs that follow from a model's config. Each kind of layer is one
// function of config.cpp, the counterpart of edge/mixers; a test compares them.
#pragma once

#include "fault.h"
#include "json.h"

namespace edge_lib {

constexpr int64_t HUGE_SIZE = int64_t(1) << 60;
// Saturating products and sums: at most HUGE_SIZE, whatever a bundle says.
int64_t times(int64_t a, int64_t b);
int64_t plus(int64_t a, int64_t b);
int64_t up_to(int64_t value, int64_t multiple);  // rounds up
// A size as an int32, as in the interface.
inline int32_t narrowed(int64_t value) { return int32_t(value > INT32_MAX ? INT32_MAX : value); }

enum class DType : uint8_t { f32, f16, i8, u8, i32, i64 };
DType dtype_of(const std::string& name);
int64_t item_size(DType type);
// Returns whether no float among these bytes is infinite or NaN.
bool finite(const char* data, int64_t bytes, DType type);

struct Shape {
  std::string name;
  std::vector<int64_t> dims;
  int64_t elements() const;
};

// A rotary embedding, with the fields of RopeScaling (edge/mixers/attention.py).
struct Rope {
  double theta;
  int64_t dim;
  std::string scaling;  // its kind; "" for none
  double factor = 1, low = 1, high = 4, fast = 32, slow = 1, original_context = 8192;
  bool truncate = true;
  std::vector<float> factors;
  // Factor from positions to the angle of a pair of values, as in edge/rope.py.
  float frequency(int64_t pair) const;
};

struct Config {
  int64_t vocab = 0, d_model = 0, max_context = 0;
  size_t layers = 0;
  std::string family;
  // of one sequence; a convolution's state begins with time: [K-1, 1, channels]
  std::vector<Shape> recurrent;
  std::vector<Shape> caches;  // [1, heads, 0, padded width]; 0 is replaced by the capacity
  std::vector<int64_t> windows;  // of each cache: number of positions a token attends to; 0: all
  std::vector<Shape> logs;       // [channels]
  std::vector<int64_t> conv_widths;
  std::vector<Rope> ropes;

  // Maximum number of positions a token attends to in a cache with a window; 1 without windows.
  int64_t looks_back() const;

  // Reads the checked `model` of a manifest. Adds inconsistencies within its layers to `faults`.
  static Config of(const Json& model, Faults& faults);
};


}  // namespace edge_lib
