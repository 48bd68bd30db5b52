// The launch plan (edge/launch.py): parsed, and checked against the model and the weights.
#pragma once

#include <map>
#include <optional>

#include "bundle.h"

namespace edge_lib {

// What a run's sizes are: tokens T, sequences B, wanted rows L, capacity C, log slots S, and slots of
// caches that slide, W. No plan in a file has the last.
struct Sizes {
  int64_t of[6];  // by "TBLCSW"
};
inline bool operator==(const Sizes& a, const Sizes& b) { return std::equal(a.of, a.of + 6, b.of); }

// The input `run` with the past that is in caches that slide.
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
  std::string kernel, text;  // the latter as the kernels read it: see Variant in kernel.h
  std::vector<std::string> names, types;
  int64_t window = 0;  // positions that it looks back on; 0: all
};

struct PlanLaunch {
  size_t variant;
  Size grid[3];
  std::vector<PlanArgument> arguments;
};

struct PlanProgram {
  enum Kind { chain, tree, settle } kind;
  int64_t max_rows;  // HUGE_SIZE for any number
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
  int64_t elements;  // there whatever the capacity is: both slots, a row of every head of a cache
};

// What a launch points to. -1 elements: how many depends on the run.
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
  std::vector<std::vector<float>> inverses;  // of each rotation
  std::map<std::string, PlanState> states, caches;  // of the model

  // Throws Fault with every fault.
  static Plan of(const Bundle& bundle);
  // Refuses sizes that a program's launches cannot take. Throws Fault.
  void check_sizes(const PlanProgram& program, const Sizes& sizes) const;
  // None where there is none of that name.
  std::optional<Operand> operand(const PlanArgument& argument) const;
  // The first program that takes so many rows; -1 for none.
  int program(PlanProgram::Kind kind, int64_t rows) const;

  std::string file;
};

// Adds to `faults` what does not fit the model or its weights.
void check_plan(const Plan& plan, const Bundle& bundle, const Json& rotations, Faults& faults);

}  // namespace edge_lib
