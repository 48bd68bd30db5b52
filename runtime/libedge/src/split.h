// Splits text into words, as the supported pre-tokenizers of a tokenizer.json do.
#pragma once

#include <string_view>

#include "json.h"

namespace edge_lib {

// A character, its offset in bytes and its classes.
struct Character {
  uint32_t code, at;
  uint8_t classes;
};

// Returns the characters of UTF-8 and a final one for the end. Throws Fault if it is not UTF-8.
std::vector<Character> characters_of(std::string_view text);

class Splitter {
 public:
  struct Word {
    size_t begin, end;  // indices of characters
  };

  // Reads a `pre_tokenizer`. Throws std::string, the part that is not supported.
  explicit Splitter(const Json& step);
  std::vector<Word> split(const std::vector<Character>& text, Word whole) const;

 private:
  enum Step { digits, each_digit, gpt2, llama3, qwen2, qwen35 };
  void add(const Json& step);
  std::vector<Step> steps_;
};

// Returns whether the text is only white space, as defined by Python's strip.
bool blank(std::string_view text);
// Returns whether no single character could be changed by normalization to NFC.
bool composed(const std::vector<Character>& text);

}  // namespace edge_lib
