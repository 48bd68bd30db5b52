#include "ledger.h"

#include <algorithm>

namespace edge_lib {

int Ledger::spare() const {
  bool used[4] = {};
  for (int i = 0; i < stored; i++) used[anchors[i].slot] = true;
  return int(std::find(used, used + 4, false) - used);
}

int64_t Ledger::reach() const {
  return nodes ? 0 : std::min({int64_t(logged), position - floor, int64_t(window)});
}

void Ledger::drop_first() {
  int64_t gone = anchors[1].position - anchors[0].position;
  std::copy(rows + gone, rows + logged, rows);
  logged -= int(gone);
  std::copy(anchors + 1, anchors + stored, anchors);
  stored--;
}

void Ledger::make_room(int wanted) {
  while (logged + wanted > log_slots(window) && stored > 1) drop_first();
  free_slot();
}

void Ledger::free_slot() {
  for (; stored >= state_slots(window); stored--) anchors[stored - 2] = anchors[stored - 1];
}

void Ledger::thin(int64_t end) {
  while (stored > 1 && end >= anchors[1].position + window) drop_first();
}

void Ledger::free_rows(int wanted, int16_t* found) const {
  bool used[2 * MAX_WINDOW] = {};
  for (int i = 0; i < logged; i++) used[rows[i]] = true;
  for (int row = 0, i = 0; i < wanted; row++)
    if (!used[row]) found[i++] = int16_t(row);
}

void Ledger::back(int tokens) {
  position -= tokens, logged -= tokens;
  whole = whole && !tokens;
  while (newest().position > position) stored--;
}

int Ledger::choose(int node, int16_t* path) {
  int length = 0;
  for (int at = node; at >= 0; at = parents[at]) path[length++] = int16_t(at);
  std::reverse(path, path + length);
  for (int i = 0; i < length; i++) rows[logged++] = slots[path[i]];
  position += length;
  nodes = 0;
  return length;
}

Ledger Ledger::elsewhere(int64_t at, int wanted) const {
  Ledger out(window);
  out.anchors[0] = {spare(), at - wanted};
  out.position = out.floor = at;
  out.logged = wanted;
  free_rows(wanted, out.rows);
  return out;
}

Step Step::run(const Ledger& ledger, int tokens, const int32_t* parents) {
  Step out(ledger, tokens);
  out.logged = true;
  out.tree = parents != nullptr;
  ledger.free_rows(tokens, out.slots);
  Ledger& after = out.after;
  int kept = tokens;  // for a tree, the length of its longest path
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
  // store the state after the last token if all are likely to be kept, and at most a window would
  // be pending otherwise; else store the state before the run, which stays valid in any case
  bool likely = tokens == 1 || !ledger.count() || ledger.whole;
  bool last = !parents && likely && ledger.count() + tokens <= ledger.window + 1;
  int64_t end = ledger.position + kept, at = last ? end : ledger.position;
  if (at > ledger.newest().position) {
    out.store = at > ledger.position ? LAST : ADVANCED;
    out.advance = out.store == ADVANCED ? int(at - ledger.newest().position) : 0;
    after.anchors[after.stored++] = {ledger.spare(), at};
  }
  if (!parents) {
    for (int i = 0; i < tokens; i++) after.rows[after.logged++] = out.slots[i];
    after.position += tokens;
  }
  after.whole = !parents;
  after.thin(end);
  if (out.store != LAST) after.free_slot();
  return out;
}

Step Step::commit(const Ledger& ledger, int tokens) {
  Step out(ledger, tokens);
  out.store = LAST;
  out.after = Ledger(ledger.window);
  out.after.position = ledger.position + tokens;
  out.after.first = ledger.first;
  out.after.anchors[0] = {ledger.spare(), out.after.position};
  return out;
}

Step Step::applied(const Ledger& ledger) {
  Step out(ledger, 0);
  out.store = LAST;
  return out;
}

Step Step::rehearsal(const Ledger& ledger, int tokens) {
  return Step(ledger, tokens);
}

}  // namespace edge_lib
