// What the sessions of a model share: weights, kernels, threads, and memory for the values of a
// run.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "../../../plugins/cpu/src/calls.h"
#include "memory.h"
#include "ledger.h"
#include "plan.h"
#include "tokenizer.h"

namespace edge_lib {

// Sizes that a session is made with, checked.
struct SessionSizes {
  int64_t window, capacity, history;
  bool has_seed;
  uint64_t seed;
  int64_t slots = 0;  // of caches with a window: `capacity`, or what StateLayout.sliding has
  static SessionSizes of(const Bundle& bundle,
                         const edge_session_options* options);  // throws Fault
};

// Offsets by name, each on ALIGNMENT bytes, and the bytes of all.
struct Offsets {
  std::map<std::string, int64_t> at;
  int64_t total = 0;
  void add(const std::string& name, int64_t size);
};

// Where the weights of a plan lie once they are loaded: neighbours in the file stay neighbours.
struct WeightPlaces {
  struct Segment {
    int64_t start, end, at;  // bytes of the file, and where they go
  };
  std::vector<Segment> segments;
  Offsets inlined;
  int64_t total = 0;  // of the segments
  explicit WeightPlaces(const Plan& plan);
  int64_t place(int64_t offset) const;  // of a byte of the file
};

// How the runs of a program are laid out for the largest of them.
struct ProgramLayout {
  Sizes largest;
  Offsets inputs, values;
  ProgramLayout(const Plan& plan, const PlanProgram& program, const Sizes& largest);
};

// The layouts of a session's runs, and the bytes that they need.
struct RunLayouts {
  std::vector<ProgramLayout> programs;
  int64_t inputs = 0, values = 0;
  RunLayouts(const Bundle& bundle, const Plan& plan, const SessionSizes& sizes);
};

// Where recurrent tensors, logs and caches of a session lie.
struct Tensor {
  std::string name;
  std::vector<int64_t> dims;  // of one slot, of a row of a log, of a cache
  DType type;
  int64_t offset, slot;  // bytes; those of one slot, of one row, of a cache
  bool slides = false;   // a cache that forgets the oldest tokens
  int64_t row() const { return dims[3] * item_size(type); }  // bytes of one head's, of a cache
};
struct StateLayout {
  std::vector<Tensor> recurrent, logs, caches;
  int64_t block = 0, cache_block = 0;  // bytes of the first two, and of the caches
  int64_t slot_bytes = 0, cache_bytes = 0;
  int64_t looks_back = 0;  // of caches that slide; 0 where none does
  StateLayout(const Config& config, const Plan& plan, const SessionSizes& sizes);
  // Of a copy after `position` tokens: how many of a cache's last rows it has.
  int64_t rows(const Tensor& cache, int64_t position) const {
    return cache.slides ? std::min(position, looks_back - 1) : position;
  }
  // The first position that the next token looks back on in caches that slide.
  int64_t first_needed(int64_t position) const {
    return looks_back ? position - std::min(position, looks_back - 1) : 0;
  }
  int64_t copy_bytes(int64_t position) const;  // of the caches' rows
};


// What a bundle's pointer is: shared by bundle, model, sessions and decoders.
struct OpenBundle {
  Bundle bundle;
  Plan plan;
  explicit OpenBundle(const std::string& path) : bundle(path), plan(Plan::of(bundle)) {}
  // Read when it is first asked for. Throws Fault.
  const Tokenizer& tokenizer() const {
    std::lock_guard<std::mutex> lock(reading_);
    if (!tokenizer_) tokenizer_ = Tokenizer::of(bundle);
    return *tokenizer_;
  }

 private:
  mutable std::mutex reading_;
  mutable std::unique_ptr<const Tokenizer> tokenizer_;
};

class Engine {
 public:
  Engine(std::shared_ptr<const OpenBundle> opened, int threads, const char* set);
  ~Engine();
  Engine(const Engine&) = delete;

  const Bundle& bundle() const { return opened_->bundle; }
  const Plan& plan() const { return opened_->plan; }
  const std::string& set() const { return set_; }
  void* kernel(size_t variant) const { return kernels_[variant]; }
  char* weight(const PlanWeight& weight) const;
  char* inlined(const std::string& name) const {
    return inlined_.data() + places_.inlined.at.at(name);
  }

  // At least so many bytes, shared by all sessions.
  std::shared_ptr<Memory> values(int64_t size);
  // Runs follow one another. Throws Fault.
  void run(const EdgeCpuCall* calls, int64_t count);
  std::mutex& turn() { return turn_; }

 private:
  void load_weights();
  void interleave_weights();
  void load_kernels();
  void free_all();

  std::shared_ptr<const OpenBundle> opened_;
  WeightPlaces places_;
  Memory weights_, inlined_;
  std::string set_;
  std::vector<void*> kernels_;
  void* pool_ = nullptr;
  int threads_;
  int process_;
  std::mutex turn_;
  std::shared_ptr<Memory> values_;
};

}  // namespace edge_lib
