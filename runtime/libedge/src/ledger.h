// Which slots of a session's memory hold which tokens: runtime/ledger.py has the reasons. Numbers
// alone, of a fixed size, so that nothing is allocated for a run.
#pragma once

#include <cstdint>

namespace edge_lib {

constexpr int MAX_WINDOW = 256;
enum Store { KEEP = 0, ADVANCED = 1, LAST = 2 };  // fields of the input `run`

// Slots of stored states, and rows of the logs.
inline int state_slots(int64_t window) { return window < 2 ? int(window) + 2 : 4; }
inline int64_t log_slots(int64_t window) { return 2 * window; }

struct Anchor {  // a stored state: its slot, and the tokens before it
  int slot;
  int64_t position;
};

struct Ledger {
  int window;
  int64_t position = 0, floor = 0;
  int64_t first = 0;  // the position in the first slot of caches that slide
  bool whole = false;  // nothing was taken back of the last run
  int stored = 1;
  Anchor anchors[4] = {};  // the stored states, oldest first
  int logged = 0;
  int16_t rows[2 * MAX_WINDOW];  // of the logs: of the tokens since the first of them
  int nodes = 0;                 // of a tree that waits for a choice
  int16_t parents[MAX_WINDOW], slots[MAX_WINDOW];

  explicit Ledger(int window_) : window(window_) {}
  const Anchor& newest() const { return anchors[stored - 1]; }
  int source() const { return newest().slot; }
  int spare() const;  // there is one while rows are pending, or when room has been made
  // The rows since the newest stored state, which a run replays.
  const int16_t* pending() const { return rows + (newest().position - anchors[0].position); }
  int count() const { return logged - int(newest().position - anchors[0].position); }
  int64_t reach() const;
  // Forgets what is furthest back until there are `wanted` free rows, and frees a slot.
  void make_room(int wanted);
  void free_slot();
  // Without what goes back by more than a window from `end`.
  void thin(int64_t end);
  // The first `wanted` free rows of the logs.
  void free_rows(int wanted, int16_t* found) const;
  void back(int tokens);
  // The tree's nodes on the path to `node` (-1 for none) are kept. `path` gets them; how many.
  int choose(int node, int16_t* path);
  // For a state after `at` tokens that is copied in, `wanted` of them rows, for which there is room.
  Ledger elsewhere(int64_t at, int wanted) const;

 private:
  void drop_first();
};

// What one run reads and writes, and where the session is once it has succeeded.
struct Step {
  Ledger before, after;
  int tokens, advance = 0;
  Store store = KEEP;
  int16_t slots[MAX_WINDOW];  // of the new tokens; those of a committing run have none
  bool tree, logged;

  // At most a window of tokens, all of which can be taken back; there is room.
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
