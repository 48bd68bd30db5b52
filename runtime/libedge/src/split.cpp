#include "split.h"

#include <algorithm>

#include "fault.h"

namespace edge_lib {

namespace {

// made by runtime/cpu/unicode.py
enum Classes : uint8_t { LETTER = 1, NUMBER = 2, SPACE = 4, DIGIT = 8, COMPOSES = 16, MARK = 32 };
const uint32_t STARTS[] = {
#include "unicode.inc"
};

#define END R"('s|'t|'re|'ve|'m|'ll|'d)"
#define REST R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"
#define WORD R"(|[^\r\n\p{L}\p{N}]?\p{L}+|)"
const char GPT2[] = END R"(| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const char LLAMA3[] = "(?i:" END ")" WORD R"(\p{N}{1,3})" REST;
const char QWEN2[] = "(?i:" END ")" WORD R"(\p{N})" REST;
const char QWEN35[] = "(?i:" END ")"
                      R"(|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*)"
                      R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";

using Text = std::vector<Character>;

uint8_t classes_of(uint32_t code) {
  const uint32_t* after =
      std::upper_bound(std::begin(STARTS), std::end(STARTS), code,
                       [](uint32_t value, uint32_t start) { return value < start >> 6; });
  return after[-1] & 63;
}

bool line_end(const Character& c) { return c.code == '\r' || c.code == '\n'; }

template <class F>
size_t run(const Text& text, size_t at, size_t end, F holds) {
  while (at < end && holds(text[at])) at++;
  return at;
}

// Behind 's, 't, 're, 've, 'm, 'll or 'd; `at` where there is none of them.
size_t contraction(const Text& text, size_t at, size_t end, bool any_case) {
  auto letter = [&](size_t i) -> uint32_t {
    if (i >= end) return 0;
    uint32_t code = text[i].code;
    if (any_case && code == 0x17f) return 's';  // a long s is one to a pattern without case
    return any_case && code >= 'A' && code <= 'Z' ? code | 32 : code;
  };
  if (text[at].code != '\'') return at;
  uint32_t first = letter(at + 1), second = letter(at + 2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
  bool two = (first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
             (first == 'l' && second == 'l');
  return two ? at + 3 : at;
}

// Behind white space that begins at `at`: the last of it stays for what follows.
size_t space(const Text& text, size_t at, size_t end) {
  size_t after = run(text, at, end, [](auto& c) { return c.classes & SPACE; });
  return after < end && after - at > 1 ? after - 1 : after;
}

size_t next_gpt2(const Text& text, size_t at, size_t end) {
  if (size_t after = contraction(text, at, end, false); after > at) return after;
  size_t first = at + (text[at].code == ' ' && at + 1 < end);
  uint8_t kind = text[first].classes & (LETTER | NUMBER | SPACE);
  if (kind & SPACE) return space(text, at, end);
  return run(text, first, end,
             [&](auto& c) { return (c.classes & (LETTER | NUMBER | SPACE)) == kind; });
}

// `numbers`: how many are a word; `letters`: the classes that words are made of.
size_t next_llama3(const Text& text, size_t at, size_t end, size_t numbers, uint8_t letters) {
  if (size_t after = contraction(text, at, end, true); after > at) return after;
  auto letter = [&](auto& c) { return c.classes & letters; };
  auto other = [&](auto& c) { return !(c.classes & (letters | NUMBER | SPACE)); };
  const Character& first = text[at];
  bool before = !line_end(first) && !(first.classes & (LETTER | NUMBER));
  if (letter(first) || (before && at + 1 < end && letter(text[at + 1])))
    return run(text, at + 1, end, letter);
  if (first.classes & NUMBER)
    return run(text, at, std::min(end, at + numbers), [](auto& c) { return c.classes & NUMBER; });
  size_t mark = at + (first.code == ' ' && at + 1 < end && other(text[at + 1]));
  if (other(text[mark])) return run(text, run(text, mark, end, other), end, line_end);
  size_t after = run(text, at, end, [](auto& c) { return c.classes & SPACE; });
  for (size_t last = after; last > at; last--)
    if (line_end(text[last - 1])) return last;
  return space(text, at, end);
}

}  // namespace

std::vector<Character> characters_of(std::string_view text) {
  Text out;
  out.reserve(text.size() + 1);
  for (size_t at = 0; at < text.size();) {
    uint32_t code = 0;
    size_t length = character(text, at, &code);
    if (!length)
      throw Fault{EDGE_ERROR_INPUT, "is not UTF-8 at byte " + std::to_string(at), "", "text"};
    out.push_back({code, uint32_t(at), classes_of(code)});
    at += length;
  }
  out.push_back({0, uint32_t(text.size()), 0});
  return out;
}

bool blank(std::string_view text) {
  Text all = characters_of(text);
  return std::all_of(all.begin(), all.end() - 1, [](auto& c) {
    return (c.classes & SPACE) || (c.code >= 0x1c && c.code <= 0x1f);
  });
}

bool composed(const Text& text) {
  return std::none_of(text.begin(), text.end() - 1, [](auto& c) { return c.classes & COMPOSES; });
}

Splitter::Splitter(const Json& step) { add(step); }

void Splitter::add(const Json& step) {
  const Json *type = step.find("type"), *inner = step.find("pretokenizers");
  std::string kind = type && type->is(Json::text) ? type->string() : "none";
  auto flag = [&](const char* name, bool usual) {
    const Json* found = step.find(name);
    return found ? found->is(Json::boolean) && found->truth() : usual;
  };
  if (kind == "Sequence" && inner && inner->is(Json::array) && inner->items().size() <= 32) {
    for (const Json& each : inner->items()) add(each);
    return;
  }
  if (kind == "Digits")
    return steps_.push_back(flag("individual_digits", false) ? each_digit : digits);
  if (kind == "ByteLevel") {
    if (flag("add_prefix_space", true)) throw std::string("ByteLevel with add_prefix_space");
    if (flag("use_regex", true)) steps_.push_back(gpt2);
    return;
  }
  if (kind != "Split") throw kind;
  const Json *pattern = step.find("pattern"), *behavior = step.find("behavior");
  const Json* regex = pattern ? pattern->find("Regex") : nullptr;
  if (!regex || !behavior || !(*behavior == Json::of("Isolated")) || flag("invert", true))
    throw std::string("Split that is not by an expression, isolated and not inverted");
  const std::pair<const char*, Step> known[] = {
      {GPT2, gpt2}, {LLAMA3, llama3}, {QWEN2, qwen2}, {QWEN35, qwen35}};
  for (auto [text, known_step] : known)
    if (*regex == Json::of(text)) return steps_.push_back(known_step);
  throw "Split by " + brief(regex->is(Json::text) ? regex->string() : "no text");
}

std::vector<Splitter::Word> Splitter::split(const Text& text, Word whole) const {
  std::vector<Word> words{whole}, cut;
  for (Step step : steps_) {
    cut.clear();
    for (Word word : words)
      for (size_t at = word.begin, next; at < word.end; at = next) {
        if (step == gpt2) {
          next = next_gpt2(text, at, word.end);
        } else if (step == digits || step == each_digit) {
          uint8_t kind = text[at].classes & DIGIT;
          next = kind && step == each_digit ? at + 1 : run(text, at, word.end, [&](auto& c) {
            return (c.classes & DIGIT) == kind;
          });
        } else {
          uint8_t letters = step == qwen35 ? LETTER | MARK : LETTER;
          next = next_llama3(text, at, word.end, step == llama3 ? 3 : 1, letters);
        }
        cut.push_back({at, next});
      }
    words.swap(cut);
  }
  return words;
}

}  // namespace edge_lib
