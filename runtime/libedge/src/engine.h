// What the sessions of a model share: weights, kernels, threads, and memory for the values of runs.
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

// The checked sizes of a session.
struct SessionSizes {
  int64_t window, capacity, history;
  bool has_seed;
  uint64_t seed;
  int64_t slots = 0;  // of caches with a window: `capacity`, or fewer if they slide
  static SessionSizes of(const Bundle& bundle,
                         const edge_session_options* options);  // throws Fault
};

// Offsets by name, multiples of ALIGNMENT, and the total number of bytes.
struct Offsets {
  std::map<std::string, int64_t> at;
  int64_t total = 0;
  void add(const std::string& name, int64_t size);
};

// Places of a plan's weights in memory. Adjacent weights of the file stay adjacent.
struct WeightPlaces {
  struct Segment {
    int64_t start, end, at;  // byte range in the file, and its place in memory
  };
  std::vector<Segment> segments;
  Offsets inlined;
  int64_t total = 0;  // bytes of the segments
  explicit WeightPlaces(const Plan& plan);
  int64_t place(int64_t offset) const;  // place of a byte of the file
};

// Memory layout of a program's inputs and values, for its largest run.
struct ProgramLayout {
  Sizes largest;
  Offsets inputs, values;
  ProgramLayout(const Plan& plan, const PlanProgram& program, const Sizes& largest);
};

// The layouts of a session's programs, and the bytes that any of them needs.
struct RunLayouts {
  std::vector<ProgramLayout> programs;
  int64_t inputs = 0, values = 0;
  RunLayouts(const Bundle& bundle, const Plan& plan, const SessionSizes& sizes);
};

// The place of a recurrent tensor, log or cache in a session's memory.
struct Tensor {
  std::string name;
  std::vector<int64_t> dims;  // of one slot, one log row, or a whole cache
  DType type;
  int64_t offset, slot;  // in bytes; `slot` is the size of `dims`
  bool slides = false;   // a cache that drops the oldest tokens
  int64_t row() const { return dims[3] * item_size(type); }  // bytes of one head's row of a cache
};
struct StateLayout {
  std::vector<Tensor> recurrent, logs, caches;
  int64_t block = 0, cache_block = 0;  // bytes of recurrent tensors and logs, and of caches
  int64_t slot_bytes = 0, cache_bytes = 0;
  int64_t looks_back = 0;  // positions a token attends to in sliding caches; 0 without any
  StateLayout(const Config& config, const Plan& plan, const SessionSizes& sizes);
  // Number of rows of a cache, the last ones, that a copy after `position` tokens has.
  int64_t rows(const Tensor& cache, int64_t position) const {
    return cache.slides ? std::min(position, looks_back - 1) : position;
  }
  // First position that the next token attends to in sliding caches.
  int64_t first_needed(int64_t position) const {
    return looks_back ? position - std::min(position, looks_back - 1) : 0;
  }
  int64_t copy_bytes(int64_t position) const;  // bytes of the cache rows of such a copy
};

// An open bundle, shared by the bundle's handle, models, sessions and decoders.
struct OpenBundle {
  Bundle bundle;
  Plan plan;
  explicit OpenBundle(const std::string& path);
  // Reads the tokenizer on first use. Throws Fault.
  const Tokenizer& tokenizer() const {
    std::lock_guard<std::mutex> lock(reading_);
    if (!tokenizer_) tokenizer_ = Tokenizer::of(bundle);
    return *tokenizer_;
  }
  // Takes the program's own tokenizer, whose callbacks may use the bundle. Throws Fault.
  void use(const edge_tokenizer& own) const {
    auto made = Tokenizer::of(bundle, own);
    std::lock_guard<std::mutex> lock(reading_);
    if (tokenizer_)
      throw Fault{EDGE_ERROR_INPUT, "was given too late: the bundle has used one before", "",
                  "tokenizer"};
    tokenizer_ = std::move(made);
  }

 private:
  mutable std::mutex reading_;
  mutable std::unique_ptr<const Tokenizer> tokenizer_;
};

class Engine {
 public:
  // Fields of edge_model_options. Throws Fault.
  Engine(std::shared_ptr<const OpenBundle> opened, int threads, const char* set, bool pin);
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

  // Returns at least `size` bytes, shared by all sessions.
  std::shared_ptr<Memory> values(int64_t size);
  // Runs the calls; the caller holds `turn`. Throws Fault.
  void run(const EdgeCpuCall* calls, int64_t count);
  // After a rehearsal: lets no thread of the model allocate in later runs. Throws Fault.
  void level();
  std::mutex& turn() { return turn_; }

 private:
  void load_weights();
  void interleave_weights();
  void load_kernels();
  void free_all();
  void check_process() const;  // throws Fault in a forked child

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
