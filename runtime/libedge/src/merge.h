// Byte-pair encoding (Sennrich et al., arXiv 1508.07909): merges the adjacent pair of lowest rank
// first, of equal ones the leftmost.
#pragma once

#include <cstdint>
#include <queue>
#include <vector>

namespace edge_lib {

struct Symbol {
  size_t begin, end;  // byte range in the text
  int32_t id;
  int32_t before = -1, after = -1;
  bool gone = false;
};

struct Merge {
  double rank;  // the lowest is merged first
  int32_t id;
};

// Returns the indices of the symbols left after all merges. `find(left, right, merge)` returns
// whether two symbols may be merged, and fills in `merge`.
template <class Find>
std::vector<int32_t> merged(std::vector<Symbol>& symbols, Find find) {
  struct Candidate {
    Merge merge;
    int32_t left, right;
    size_t begin, end;  // byte range of both when the candidate was found
    bool operator<(const Candidate& b) const {
      return merge.rank != b.merge.rank ? merge.rank > b.merge.rank : left > b.left;
    }
  };
  std::priority_queue<Candidate> waiting;
  auto consider = [&](int32_t left, int32_t right) {
    Merge merge;
    if (left < 0 || right < 0 || !find(symbols[size_t(left)], symbols[size_t(right)], &merge))
      return;
    waiting.push(
        {merge, left, right, symbols[size_t(left)].begin, symbols[size_t(right)].end});
  };
  for (size_t i = 0; i < symbols.size(); i++) {
    symbols[i].before = int32_t(i) - 1;
    symbols[i].after = i + 1 < symbols.size() ? int32_t(i) + 1 : -1;
  }
  for (size_t i = 1; i < symbols.size(); i++) consider(int32_t(i) - 1, int32_t(i));
  while (!waiting.empty()) {
    Candidate best = waiting.top();
    waiting.pop();
    Symbol &left = symbols[size_t(best.left)], &right = symbols[size_t(best.right)];
    // one of them has been merged since
    if (left.gone || right.gone || left.after != best.right || right.end != best.end) continue;
    left.end = right.end, left.id = best.merge.id, left.after = right.after;
    right.gone = true;
    if (right.after >= 0) symbols[size_t(right.after)].before = best.left;
    consider(left.before, best.left);
    consider(best.left, left.after);
  }
  std::vector<int32_t> order;
  for (int32_t at = symbols.empty() ? -1 : 0; at >= 0; at = symbols[size_t(at)].after)
    order.push_back(at);
  return order;
}

}  // namespace edge_lib
