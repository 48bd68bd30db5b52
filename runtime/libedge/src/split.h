// A text in words, as the pre-tokenizers of a tokenizer.json cut it: those that are listed here.
#pragma once

#include <string_view>

#include "json.h"

namespace edge_lib {

// A character at `at`, and its classes.
struct Character {
  uint32_t code, at;
  uint8_t classes;
};

// The characters of UTF-8 and one for its end. Throws Fault where it is none.
std::vector<Character> characters_of(std::string_view text);

class Splitter {
 public:
  struct Word {
    size_t begin, end;  // characters
  };

  // Of a `pre_tokenizer`. Throws std::string: what is not read here.
  explicit Splitter(const Json& step);
  std::vector<Word> split(const std::vector<Character>& text, Word whole) const;

 private:
  enum Step { digits, each_digit, gpt2, llama3, qwen2, qwen35 };
  void add(const Json& step);
  std::vector<Step> steps_;
};

// Whether there is nothing but white space, as Python's strip has it.
bool blank(std::string_view text);
// Whether normalization to NFC would leave the text as it is, so far as single characters tell.
bool composed(const std::vector<Character>& text);

}  // namespace edge_lib
