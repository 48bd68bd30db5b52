// Answers that are one of several texts, token by token, as `choices` of runtime/constrain.
#pragma once

#include "engine.h"

namespace edge_lib {

class Choices {
 public:
  // Throws Fault for texts that cannot be chosen.
  Choices(std::shared_ptr<const OpenBundle> opened, const char* const* texts, size_t count);

  void begin();
  // Sets the ids that may follow: those whose bytes go on with a text, and the end tokens where a
  // text is complete. Where all texts go on alike, only the tokenizer's usual token may follow.
  void allow(uint32_t* mask, size_t words) const;
  // Takes a token. Returns whether the answer is complete; throws Fault if it may not follow.
  bool accept(int32_t token);
  // Index of the first text that the answer is, or -1.
  int32_t found() const;

 private:
  bool is_end(int32_t token) const;
  void match();
  void force(size_t i);
  size_t common_end(size_t i, size_t at, std::vector<size_t>& alike) const;
  std::vector<int32_t> usual(size_t i, size_t at, size_t end) const;
  void force_common(size_t i, size_t at, size_t end, const std::vector<size_t>& alike);

  std::shared_ptr<const OpenBundle> opened_;
  std::vector<std::string> texts_;
  std::vector<size_t> index_;  // of each text among those given
  // of each text and each of its bytes: the ids that match from there, and the one that must follow
  std::vector<std::vector<std::vector<int32_t>>> ids_;
  std::vector<std::vector<int32_t>> forced_;  // or NONE
  std::vector<bool> alive_;  // texts that begin with the answer
  size_t at_ = 0;            // bytes of the answer
};

}  // namespace edge_lib
