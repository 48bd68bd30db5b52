#include "interleave.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <vector>

namespace edge_cpu {

namespace {

constexpr int MOST = 3;  // weights that one kernel may read interleaved

// Size of rows of words in bytes. Throws on overflow: the sizes come from a plan, which is
// untrusted.
int64_t bytes_of(int64_t rows, int64_t words, int word) {
  int64_t in_all = 0;
  if (rows < 0 || words < 0 || word < 0 || __builtin_mul_overflow(rows, words, &in_all) ||
      __builtin_mul_overflow(in_all, int64_t(word), &in_all))
    throw std::length_error("the plan reads a weight beyond the largest possible size");
  return in_all;
}

// The layout of a weight that its readers agree on.
struct Packing {
  int64_t bytes = 0, width = 0, rows = 0, words = 0;
  int word = 0;
  bool whole = true;  // no reader objects

  void agree(const Interleaved& wanted, int64_t of_weight) {
    bytes_of(wanted.rows, wanted.words, wanted.word);
    bool first = !width, same = words == wanted.words && word == wanted.word;
    whole = whole && of_weight == bytes && (first || (same && width == wanted.width));
    if (wanted.rows) whole = whole && (!rows || rows == wanted.rows);
    if (wanted.rows) rows = wanted.rows;
    width = wanted.width, words = wanted.words, word = wanted.word;
  }
  bool fits() const {
    return whole && width > 0 && rows && bytes_of(rows, words, word) == bytes;
  }
  int64_t bytes_of_group() const { return bytes_of(std::min(width, rows), words, word); }
};
using Packings = std::map<char*, Packing>;
// The weights that each kernel can read interleaved, in all its launches.
using Gains = std::map<Kernel*, std::vector<char*>>;

void collect(const EdgeCpuReader* readers, int64_t count, Packings& packings, Gains& gains) {
  for (int64_t i = 0; i < count; i++) {
    const EdgeCpuReader& reader = readers[i];
    Kernel* kernel = static_cast<Kernel*>(reader.kernel);
    Packing& packing = packings[reader.weight];
    if (!packing.bytes) packing.bytes = reader.bytes;
    Interleaved wanted[MOST];
    int known = kernel->interleavable(wanted), at = 0;
    while (at < known && wanted[at].argument != reader.argument) at++;
    if (at == known) {
      packing.whole = false;
      continue;
    }
    packing.agree(wanted[at], reader.bytes);
    gains[kernel].push_back(reader.weight);
  }
  char* end = nullptr;
  Packing* before = nullptr;
  for (auto& [weight, packing] : packings) {  // weights must not overlap
    if (before && weight < end) before->whole = packing.whole = false;
    if (weight + packing.bytes > end) end = weight + packing.bytes, before = &packing;
  }
}

// A kernel reads either all of these weights interleaved or none.
void settle(Packings& packings, const Gains& gains) {
  for (bool changed = true; changed;) {
    changed = false;
    for (const auto& [kernel, weights] : gains) {
      auto fits = [&](char* weight) { return packings[weight].fits(); };
      if (std::all_of(weights.begin(), weights.end(), fits)) continue;
      for (char* weight : weights) {
        changed = changed || packings[weight].fits();
        packings[weight].whole = false;
      }
    }
  }
}

// Packs group by group, through a buffer for one. The word size is a compile-time constant.
template <class Word> void pack_words(char* weight, const Packing& how, void* room) {
  Word* from = static_cast<Word*>(room);
  for (int64_t n = 0; n < how.rows; n += how.width) {
    int64_t rows = std::min(how.width, how.rows - n);
    char* to = weight + n * how.words * int64_t(sizeof(Word));
    std::memcpy(from, to, size_t(rows * how.words) * sizeof(Word));
    for (int64_t k = 0; k < how.words; k++)
      for (int64_t i = 0; i < rows; i++, to += sizeof(Word))
        std::memcpy(to, from + i * how.words + k, sizeof(Word));  // weights may be unaligned
  }
}
void pack(char* weight, const Packing& how, void* room) {
  how.word == 2 ? pack_words<uint16_t>(weight, how, room) : pack_words<uint32_t>(weight, how, room);
}

}  // namespace

void interleave(const EdgeCpuReader* readers, int64_t count) {
  Packings packings;
  Gains gains;
  collect(readers, count, packings, gains);
  settle(packings, gains);
  int64_t most = 0;
  for (const auto& [weight, how] : packings)
    if (how.fits()) most = std::max(most, how.bytes_of_group());
  std::vector<uint32_t> room(static_cast<size_t>(most / 4 + 1));
  for (const auto& [weight, how] : packings)
    if (how.fits()) pack(weight, how, room.data());
  for (const auto& [kernel, weights] : gains)
    if (packings[weights.front()].fits()) kernel->interleave(packings[weights.front()].rows);
}

}  // namespace edge_cpu
