#include "ledger.h"

#include <algorithm>
#include <cstring>

namespace edge_lib {

void Ledger::free_rows(int wanted, int16_t* rows) const {
  bool used[2 * MAX_WINDOW] = {};
  for (int i = 0; i < count; i++) used[pending[i]] = true;
  for (int row = 0, found = 0; found < wanted; row++)
    if (!used[row]) rows[found++] = int16_t(row);
}

int Ledger::choose(int node, int16_t* path) {
  int length = 0;
  for (int at = node; at >= 0; at = parents[at]) path[length++] = int16_t(at);
  std::reverse(path, path + length);
  for (int i = 0; i < length; i++) pending[count++] = slots[path[i]];
  position += length;
  nodes = 0;
  return length;
}

Ledger Ledger::elsewhere(int64_t at, int rows) const {
  Ledger out(window);
  out.source = spare();
  out.position = out.floor = at;
  out.count = rows;
  free_rows(rows, out.pending);
  return out;
}

Step Step::run(const Ledger& ledger, int tokens, const int32_t* parents) {
  Step out(ledger, tokens);
  out.logged = true;
  out.tree = parents != nullptr;
  ledger.free_rows(tokens, out.slots);
  Ledger& after = out.after;
  int kept = tokens;  // of a tree only one path will be
  if (parents) {
    int depths[MAX_WINDOW];
    kept = 0;
    for (int i = 0; i < tokens; i++) {
      depths[i] = parents[i] < 0 ? 1 : depths[parents[i]] + 1;
      kept = std::max(kept, depths[i]);
      after.parents[i] = int16_t(parents[i]);
      after.slots[i] = out.slots[i];
    }
    after.nodes = tokens;
  }
  out.advance = std::max(0, ledger.count + kept - ledger.window);
  if (out.advance) {
    out.store = ADVANCED;
    after.source = ledger.spare();
    after.count -= out.advance;
    std::memmove(after.pending, after.pending + out.advance,
                 size_t(after.count) * sizeof *after.pending);
  }
  if (!parents) {
    for (int i = 0; i < tokens; i++) after.pending[after.count++] = out.slots[i];
    after.position += tokens;
  }
  return out;
}

Step Step::commit(const Ledger& ledger, int tokens) {
  Step out(ledger, tokens);
  out.store = LAST;
  out.after = Ledger(ledger.window);
  out.after.position = ledger.position + tokens;
  out.after.source = ledger.spare();
  return out;
}

Step Step::applied(const Ledger& ledger) {
  Step out(ledger, 0);
  out.store = LAST;
  return out;
}

Step Step::rehearsal(const Ledger& ledger, int tokens) {
  Step out(ledger, tokens);
  out.before.count = 0;
  return out;
}

}  // namespace edge_lib
