// Which slots of a session's memory hold which tokens: runtime/ledger.py has the reasons. Numbers
// alone, of a fixed size, so that nothing is allocated for a run.
#pragma once

#include <cstdint>

namespace edge_lib {

constexpr int MAX_WINDOW = 256;
enum Store { KEEP = 0, ADVANCED = 1, LAST = 2 };  // fields of the input `run`

struct Ledger {
  int window;
  int source = 0;  // slot of the state before the pending tokens
  int64_t position = 0, floor = 0;
  int count = 0;  // pending tokens
  int16_t pending[MAX_WINDOW];
  int nodes = 0;  // of a tree that waits for a choice
  int16_t parents[MAX_WINDOW], slots[MAX_WINDOW];

  explicit Ledger(int window_) : window(window_) {}
  int spare() const { return 1 - source; }
  int64_t reach() const {
    int64_t kept = position - floor;
    return nodes ? 0 : kept < count ? kept : count;
  }
  // The first `wanted` free rows of the logs.
  void free_rows(int wanted, int16_t* rows) const;
  void back(int tokens) { position -= tokens, count -= tokens; }
  // The tree's nodes on the path to `node` (-1 for none) are kept. `path` gets them; how many.
  int choose(int node, int16_t* path);
  // For a state after `at` tokens that is copied in, `rows` of them pending.
  Ledger elsewhere(int64_t at, int rows) const;
};

// What one run reads and writes, and where the session is once it has succeeded.
struct Step {
  Ledger before, after;
  int tokens, advance = 0;
  Store store = KEEP;
  int16_t slots[MAX_WINDOW];  // of the new tokens; those of a committing run have none
  bool tree, logged;

  // At most a window of tokens, all of which can be taken back.
  static Step run(const Ledger& ledger, int tokens, const int32_t* parents);
  // Only the state after the last is kept.
  static Step commit(const Ledger& ledger, int tokens);
  // No token: the live state is written to the spare slot too.
  static Step applied(const Ledger& ledger);
  // Stores nothing and leaves the session where it is.
  static Step rehearsal(const Ledger& ledger, int tokens);

 private:
  Step(const Ledger& ledger, int tokens_)
      : before(ledger), after(ledger), tokens(tokens_), tree(false), logged(false) {}
};

}  // namespace edge_lib
