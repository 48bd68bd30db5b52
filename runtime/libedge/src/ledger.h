// The ledger: which slots of a session's memory hold which tokens, as explained in
// runtime/ledger.py. It has a fixed size, so that runs allocate nothing.
#pragma once

#include <cstdint>

namespace edge_lib {

constexpr int MAX_WINDOW = 256;
enum Store { KEEP = 0, ADVANCED = 1, LAST = 2 };  // values of the kernels' input run[STORE]

// Number of slots for stored states, and of log rows.
inline int state_slots(int64_t window) { return window < 2 ? int(window) + 2 : 4; }
inline int64_t log_slots(int64_t window) { return 2 * window; }

struct Anchor {  // a stored state: its slot, and the number of tokens before it
  int slot;
  int64_t position;
};

struct Ledger {
  int window;
  int64_t position = 0, floor = 0;
  int64_t first = 0;   // position held by the first slot of sliding caches
  bool whole = false;  // no token of the last run was rewound
  int stored = 1;
  Anchor anchors[4] = {};        // the stored states, oldest first
  int logged = 0;                // number of logged tokens
  int16_t rows[2 * MAX_WINDOW];  // log rows of the tokens since the oldest stored state
  int nodes = 0;                 // number of nodes of a tree that awaits a choice
  int16_t parents[MAX_WINDOW], slots[MAX_WINDOW];

  explicit Ledger(int window_) : window(window_) {}
  const Anchor& newest() const { return anchors[stored - 1]; }
  int source() const { return newest().slot; }
  int spare() const;  // a free slot; exists while rows are pending, or after make_room
  // The pending rows since the newest stored state, which a run replays.
  const int16_t* pending() const { return rows + (newest().position - anchors[0].position); }
  int count() const { return logged - int(newest().position - anchors[0].position); }
  int64_t reach() const;
  // Drops the oldest history until `wanted` rows are free, and frees a slot.
  void make_room(int wanted);
  void free_slot();
  // Drops history more than a window before `end`.
  void thin(int64_t end);
  // Stores the first `wanted` free log rows in `found`.
  void free_rows(int wanted, int16_t* found) const;
  void back(int tokens);
  // Keeps the tree's nodes on the path to `node` (-1 for none). Stores them in `path` and returns
  // their number.
  int choose(int node, int16_t* path);
  // Returns the ledger for a state after `at` tokens that is copied in, `wanted` of them pending.
  // There must be room for their rows.
  Ledger elsewhere(int64_t at, int wanted) const;

 private:
  void drop_first();
};

// What one run reads and writes, and the ledger after it has succeeded.
struct Step {
  Ledger before, after;
  int tokens, advance = 0;
  Store store = KEEP;
  int16_t slots[MAX_WINDOW];  // log rows of the new tokens, unless the run commits
  bool tree, logged;

  // Runs at most a window of tokens, all of which can be rewound. There must be room.
  static Step run(const Ledger& ledger, int tokens, const int32_t* parents);
  // Keeps only the state after the last token.
  static Step commit(const Ledger& ledger, int tokens);
  // Runs no token, and writes the state after the pending rows to the spare slot.
  static Step applied(const Ledger& ledger);
  // Stores nothing and leaves the session unchanged.
  static Step rehearsal(const Ledger& ledger, int tokens);

 private:
  Step(const Ledger& ledger, int tokens_)
      : before(ledger), after(ledger), tokens(tokens_), tree(false), logged(false) {}
};

}  // namespace edge_lib
