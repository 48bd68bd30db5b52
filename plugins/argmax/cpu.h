// The largest logits of each row and their tokens: the C++ counterpart of triton_pick.py.

// Returns a key that sorts by logit, then by descending token. NaN sorts as the largest logit.
inline int64_t key_of(float logit, int64_t token) {
  int32_t bits;
  float plain = logit == 0.f ? 0.f : logit;
  std::memcpy(&bits, &plain, 4);
  int32_t ordered = logit != logit ? 0x7fffffff : bits ^ ((bits >> 31) & 0x7fffffff);
  return int64_t(uint64_t(uint32_t(ordered)) << 32 | uint64_t(0x7fffffff - token));
}

// Stores the `count` largest of key(first) ... key(last - 1) in `best`, in descending order.
template <class Key> inline void largest_keys(int64_t first, int64_t last, int64_t count,
                                              int64_t* best, Key key) {
  for (int64_t i = 0; i < count; i++) best[i] = INT64_MIN;
  for (int64_t i = first; i < last; i++) {
    int64_t each = key(i);
    if (each <= best[count - 1]) continue;
    int64_t at = count - 1;
    for (; at > 0 && best[at - 1] < each; at--) best[at] = best[at - 1];
    best[at] = each;
  }
}

struct PickBlocks : Kernel {
  Argument logits, keys;
  int64_t V, stride, count, block;
  PickBlocks(const Variant& v)
      : logits(v, "logits"), keys(v, "keys"), V(v.integer("V")), stride(v.integer("STRIDE")),
        count(v.within("COUNT", 1)), block(v.within("BLOCK", 1)) {}
  void run(const Value* a, const int64_t* grid, Pool& pool) const override {
    int64_t parts = (V + block - 1) / block;
    pool.each(grid[0] * parts, items_a_piece(16 * block), [&](int64_t first, int64_t last) {
      for (int64_t each = first; each < last; each++) {
        const float* row = logits.in<const float>(a) + each / parts * stride;
        int64_t start = each % parts * block, end = std::min(start + block, V);
        int64_t* out = keys.in<int64_t>(a) + each * count;
        if (count == 1) {
          // compare plain floats: most are below the best so far and need no key
          float top = -INFINITY;
          bool spoiled = false;
          for (int64_t i = start; i < end; i++) {
            spoiled |= row[i] != row[i];
            top = row[i] > top ? row[i] : top;
          }
          if (!spoiled && top > -INFINITY) {
            int64_t i = start;
            while (row[i] != top) i++;
            *out = key_of(top, i);
            continue;
          }
        }
        largest_keys(start, end, count, out, [&](int64_t i) { return key_of(row[i], i); });
      }
    });
  }
};

struct Pick : Kernel {
  Argument keys, values, ids;
  int64_t found, K, count;
  Pick(const Variant& v)
      : keys(v, "keys"), values(Argument::optional(v, "values")), ids(v, "ids"),
        found(v.integer("FOUND")), K(v.integer("K")), count(v.within("COUNT", 1)) {}
  void run(const Value* a, const int64_t* grid, Pool&) const override {
    int64_t* best = static_cast<int64_t*>(thread_bytes(1, count * int64_t(sizeof(int64_t))));
    for (int64_t row = 0; row < grid[0]; row++) {
      const int64_t* from = keys.in<const int64_t>(a) + row * found;
      largest_keys(0, found, count, best, [&](int64_t i) { return from[i]; });
      bool spoiled = int32_t(best[0] >> 32) == 0x7fffffff;
      for (int64_t i = 0; i < K; i++) {
        int32_t ordered = int32_t(best[i] >> 32);
        int32_t bits = ordered ^ ((ordered >> 31) & 0x7fffffff);
        int64_t token = 0x7fffffff - (best[i] & 0x7fffffff);
        ids.in<int32_t>(a)[row * K + i] = spoiled ? -1 : int32_t(token);
        if (values) std::memcpy(values.in<float>(a) + row * K + i, &bits, 4);
      }
    }
  }
};

KERNEL("pick.blocks", PickBlocks)
KERNEL("pick.pick", Pick)
