// A session: memory of the state and operations on it, the tokens that led to it, random numbers.
#pragma once

#include "engine.h"
#include "inputs.h"
#include "sampler.h"

namespace edge_lib {

// A program's launches with their addresses. `resize` fills in the sizes before a run.
class PreparedProgram {
 public:
  PreparedProgram(const Engine& engine, const ProgramLayout& layout, const PlanProgram& program,
                  char* inputs, char* values, const std::map<std::string, char*>& tensors);
  void resize(const Sizes& sizes);
  const EdgeCpuCall* calls() const { return calls_.data(); }
  int64_t count() const { return int64_t(calls_.size()); }
  const float* logits() const { return logits_; }
  std::vector<InputWriter> writers;

 private:
  void set(int64_t* target, const Size& size, bool grid);
  size_t index(const Size& size);

  struct Hole {
    int64_t* target;
    size_t size;
    bool grid;
  };
  std::vector<EdgeCpuCall> calls_;
  std::vector<edge_cpu::Value> values_;
  std::vector<Size> sizes_;
  std::vector<int64_t> results_;
  std::vector<Hole> holes_;
  Sizes last_{{-1, -1, -1, -1, -1, -1}};
  const float* logits_ = nullptr;
};

// A copy of a session at one moment.
struct Snapshot {
  std::string model;
  int64_t position = 0;
  int rows = 0;                       // number of pending log rows
  std::vector<char> state, logs, kv;  // slots, pending log rows and cache rows, concatenated
  std::vector<int64_t> kv_rows;       // number of rows of each cache
  std::vector<int32_t> tokens;
  int32_t pending = -1;
  Rng rng;
  std::string messages, extra;

  int64_t bytes() const {
    return int64_t(state.size() + logs.size() + kv.size() + tokens.size() * sizeof(int32_t));
  }
};

class Session {
 public:
  Session(std::shared_ptr<Engine> engine, const SessionSizes& sizes);

  // Exclusive use of a session by one thread. Throws Fault if another thread uses it.
  class Hold {
   public:
    explicit Hold(Session& session);
    ~Hold() { session_.busy_.store(false, std::memory_order_release); }

   private:
    Session& session_;
  };

  // Returns logits [1 or count, V], valid until the next run.
  const float* run(const int32_t* tokens, size_t count, const int32_t* parents, uint32_t flags);
  void prepare();
  void select(int32_t node);
  void rewind(size_t count);
  void clear();
  std::unique_ptr<Session> fork();
  std::unique_ptr<Snapshot> snapshot();
  void restore(const Snapshot& snapshot);
  void save(const std::string& path);
  void load(const std::string& path);
  int32_t sample(const edge_sampling& how, size_t recent_from);
  edge_finish generate(const int32_t* prompt, size_t count, const edge_generation& how,
                       const edge_sampling& sampling, edge_result& result);
  // Index of the first token that a repetition penalty considers.
  size_t recent_from(const edge_sampling& how) const;
  void cancel(bool on) { cancelled_.store(on, std::memory_order_release); }

  int64_t position() const { return ledger_.position; }
  int64_t reach() const { return ledger_.reach(); }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  int32_t pending() const { return pending_; }
  const Bundle& bundle() const { return engine_->bundle(); }

 private:
  friend class StateFile;

  void needs_choice(const char* verb) const;
  void check_run(const int32_t* tokens, size_t count, const int32_t* parents, uint32_t flags) const;
  void perform(PlanProgram::Kind kind, const RunInputs& run);
  void apply();  // writes the state after all pending rows to the spare slot
  void check_room(int64_t position) const;
  char* slot(const Tensor& tensor, int slot) const {
    return state_.data() + tensor.offset + slot * tensor.slot;
  }
  // Address of the cache row of a position. Sliding caches begin with position `first`.
  char* cache_row(const Tensor& cache, int64_t head, int64_t position, int64_t first) {
    return caches_.data() + cache.offset +
           (head * cache.dims[2] + position - (cache.slides ? first : 0)) * cache.row();
  }
  // Moves the needed rows of sliding caches to the front if `count` more tokens do not fit.
  void slide(int64_t count);
  // Copies the cache rows that a copy of the state contains, concatenated.
  void copy_rows(char* bytes);
  // Fills one cache from the rows that copy_rows made of it: the last `rows` of `position` tokens.
  // A sliding cache then begins with position `first`; missing rows of a full cache become zero.
  void take_rows(const Tensor& cache, const char* bytes, int64_t rows, int64_t position,
                 int64_t first);
  void move_row(int64_t from, int64_t to);
  void forget(int64_t count);  // drops tokens from the end of the list

  std::shared_ptr<Engine> engine_;
  SessionSizes sizes_;
  StateLayout layout_;
  Ledger ledger_;
  Memory state_, caches_, inputs_, logits_;
  std::shared_ptr<Memory> values_;
  std::vector<PreparedProgram> programs_;
  int64_t rows_ = 0;  // number of valid rows of logits
  std::vector<int32_t> tokens_, tree_tokens_;
  int32_t pending_ = -1;
  Rng rng_;
  Sampler sampler_;
  std::vector<uint32_t> mask_;  // of a constraint: the ids that may follow
  std::vector<int32_t> feed_;
  std::string messages_ = "[]", extra_;  // JSON from a loaded file
  std::atomic<bool> busy_{false}, cancelled_{false};
};

}  // namespace edge_lib
