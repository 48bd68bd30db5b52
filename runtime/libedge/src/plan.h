// The launch plan (edge/launch.py): parsed, and checked against the model and the weights.
#pragma once

#include <map>
#include <optional>

#include "bundle.h"

namespace edge_lib {

// The sizes of a run: tokens T, sequences B, wanted rows L, capacity C, log slots S, and slots of
// sliding caches W. Plans in files do not use W.
struct Sizes {
  int64_t of[6];  // in the order "TBLCSW"
};
inline bool operator==(const Sizes& a, const Sizes& b) { return std::equal(a.of, a.of + 6, b.of); }

// The variant of the input `run` for sliding caches: see runtime/cuda/sliding.py.
constexpr const char* SLIDING_RUN = "run.sliding";

struct Size {
  int64_t times = 1, per = 1;
  std::string of;
  int64_t value(const Sizes& sizes) const;
  bool operator==(const Size& b) const { return times == b.times && per == b.per && of == b.of; }
};

enum class Space : uint8_t { value, weight, inlined, input, state, log, cache };
constexpr const char* SPACES[] = {"value", "weight", "inline", "input", "state", "log", "cache"};

struct PlanArgument {
  enum Kind { pointer, size, number } kind;
  Space space;
  std::string name;
  int64_t at;
  Size whole;
  double real;
};

struct PlanVariant {
  std::string kernel, text;  // name, and the text for Variant of plugins/cpu/src/kernel.h
  std::vector<std::string> names, types;
  int64_t window = 0;  // number of positions that attention looks back; 0: all
};

struct PlanLaunch {
  size_t variant;
  Size grid[3];
  std::vector<PlanArgument> arguments;
};

struct PlanProgram {
  enum Kind { chain, tree, settle } kind;
  int64_t max_rows;  // HUGE_SIZE: any number
  std::vector<size_t> launches;
};

struct PlanBuffer {
  DType type;
  Size elements;
};

struct PlanWeight {
  DType type;
  int64_t offset, elements;
};

struct PlanInline {
  DType type;
  std::string bytes;
};

struct PlanLog {
  DType type;
  int64_t width;
};

struct PlanState {
  DType type;
  int64_t elements;  // minimum for any capacity: two slots, or one row of each head of a cache
};

// What a pointer argument names. -1 elements: the number depends on the run.
struct Operand {
  DType type;
  int64_t elements, offset;
};

struct Plan {
  std::vector<PlanVariant> variants;
  std::vector<PlanLaunch> launches;
  std::vector<PlanProgram> programs;
  std::map<std::string, PlanBuffer> values, inputs;
  std::map<std::string, PlanWeight> weights;
  std::map<std::string, PlanInline> inlined;
  std::map<std::string, PlanLog> logs;
  std::vector<int64_t> taps;
  std::vector<std::vector<float>> inverses;  // inverse frequencies of each rotation
  std::map<std::string, PlanState> states, caches;  // the model's tensors

  // Reads and checks the plan of a bundle. Throws a Fault with every fault.
  static Plan of(const Bundle& bundle);
  // Throws Fault if a program's launches cannot take these sizes.
  void check_sizes(const PlanProgram& program, const Sizes& sizes) const;
  // Returns the operand of an argument; nothing if the name is unknown.
  std::optional<Operand> operand(const PlanArgument& argument) const;
  // Returns the index of the first program that takes this many rows, or -1.
  int program(PlanProgram::Kind kind, int64_t rows) const;

  std::string file;
};

// Adds to `faults` everything in the plan that does not fit the model or its weights.
void check_plan(const Plan& plan, const Bundle& bundle, const Json& rotations, Faults& faults);

}  // namespace edge_lib
