// Tokens to text, one at a time: nothing is given out before it is certain, as edge/text/stream.py
// has it. No token takes memory.
#pragma once

#include "engine.h"

namespace edge_lib {

class Decoder {
 public:
  // Throws Fault.
  Decoder(std::shared_ptr<const OpenBundle> opened, const edge_decoder_options& options);
  // The text that is certain now, until the next call. Throws Fault for no token.
  std::string_view feed(int32_t token);
  // The rest. It begins anew.
  std::string_view finish();
  bool stopped() const { return stopped_; }

 private:
  void whole_characters(bool last);
  std::string_view certain(bool last);

  std::shared_ptr<const OpenBundle> opened_;
  std::vector<std::string> stops_;
  size_t longest_stop_ = 0;
  bool continued_, strip_, stopped_ = false;
  std::string bytes_, held_, out_;  // of half a character; of half a stop text; given out
};

}  // namespace edge_lib
