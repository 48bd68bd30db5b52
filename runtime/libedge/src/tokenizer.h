// Tokenizers, as in edge/text: typed text never becomes a special token, and every token stands for
// fixed bytes. Unsupported features are refused by name.
#pragma once

#include <memory>

#include "bundle.h"
#include "spellings.h"

namespace edge_lib {

class Tokenizer {
 public:
  // Throws Fault if the file is damaged or not supported.
  static std::unique_ptr<const Tokenizer> of(const Bundle& bundle);
  // Returns the program's own, for a bundle. Throws Fault if it is not usable or the file is damaged.
  static std::unique_ptr<const Tokenizer> of(const Bundle& bundle, const edge_tokenizer& own);
  virtual ~Tokenizer() = default;

  // Returns the ids of a prompt in parts, without `bos`. All text between two special tokens is
  // encoded as one, across parts. Throws Fault.
  std::vector<int32_t> encode(const edge_part* parts, size_t count) const;
  // Returns the ids of text within an answer, to which no leading space is added; none if it has no
  // ids with exactly its bytes.
  std::vector<int32_t> within(std::string_view text) const;
  // Returns the bytes of a token, none for control tokens. Throws Fault if it is out of range.
  const std::string& bytes(int32_t token) const;
  // Returns the id of the special token written as `text`, or -1.
  int32_t special(std::string_view text) const;
  size_t longest() const;                // maximum length of `bytes`
  bool strips_space() const { return strips_space_; }  // encoding prepends a space

 protected:
  struct Special {
    std::string text;
    int32_t id;
    bool strips;  // it absorbs white space around it, which is not supported
  };
  // Encodes text that is not empty. `first`: nothing precedes it.
  virtual void plain(std::string_view text, bool first, std::vector<int32_t>& ids) const = 0;
  // Throws std::string, which limit the special tokens exceed. Of equal texts the first counts.
  void set_specials(std::vector<Special> specials);

  std::vector<std::string> bytes_;  // by id
  bool strips_space_ = false;

 private:
  std::vector<Special> specials_;
  Spellings spellings_;  // of `specials_`, by index
  std::vector<bool> special_ids_;  // by id, up to the last special token
};

// Read a SentencePiece BPE model, and a tokenizer.json. Throw std::string, what is wrong or not
// supported.
std::unique_ptr<Tokenizer> read_sentencepiece(const std::string& data, const Bundle& bundle);
std::unique_ptr<Tokenizer> read_tokenizer_json(const std::string& data, const Bundle& bundle);

// Returns whether an id is `bos`, `eos` or `pad`, which are special whatever the file says.
bool is_named(const Bundle& bundle, int32_t id);

}  // namespace edge_lib
