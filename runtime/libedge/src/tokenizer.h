// Text to tokens and back, as edge/text has it: typed text never becomes a special token, and every
// token stands for fixed bytes. What is not read here is refused by its name.
#pragma once

#include <memory>

#include "bundle.h"

namespace edge_lib {

class Tokenizer {
 public:
  // Throws Fault: the file is damaged, or of a form that is not read here.
  static std::unique_ptr<const Tokenizer> of(const Bundle& bundle);
  virtual ~Tokenizer() = default;

  // Ids of a prompt in parts, without `bos`. Plain and trusted text between two special tokens is
  // one stretch. Throws Fault.
  std::vector<int32_t> encode(const edge_part* parts, size_t count) const;
  // What an id stands for in a text: nothing for control tokens. Throws Fault out of range.
  const std::string& bytes(int32_t token) const;
  // The special token that is written so, or -1.
  int32_t special(std::string_view text) const;
  size_t longest() const;                // of `bytes`
  bool strips_space() const { return strips_space_; }  // a text begins with one that was put there

 protected:
  struct Special {
    std::string text;
    int32_t id;
    bool strips;  // white space around it, which is not done here
  };
  // Of text that is not empty. `first`: nothing comes before it.
  virtual void plain(std::string_view text, bool first, std::vector<int32_t>& ids) const = 0;
  void add_special(const std::string& text, int32_t id, bool strips);

  std::vector<std::string> bytes_;  // by id
  bool strips_space_ = false;

 private:
  const Special* special_at(std::string_view text, size_t at) const;
  std::vector<Special> specials_;
  std::vector<bool> special_ids_;  // by id, as far as there are any
};

// Of a SentencePiece model of the kind BPE, and of a tokenizer.json. Throw std::string: what is
// wrong, or not read here.
std::unique_ptr<Tokenizer> read_sentencepiece(const std::string& data, const Bundle& bundle);
std::unique_ptr<Tokenizer> read_tokenizer_json(const std::string& data, const Bundle& bundle);

// Of `bos`, `eos` and `pad`, which are special whatever the file says.
bool is_named(const Bundle& bundle, int32_t id);

}  // namespace edge_lib
