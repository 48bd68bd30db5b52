// Decodes tokens one at a time into text that is certain, as edge/text/stream.py does. Allocates
// nothing per token.
#pragma once

#include "engine.h"

namespace edge_lib {

class Decoder {
 public:
  // Throws Fault.
  Decoder(std::shared_ptr<const OpenBundle> opened, const edge_decoder_options& options);
  // Returns the text that is now certain, valid until the next call. Throws Fault for a wrong id.
  std::string_view feed(int32_t token);
  // Returns the text held back, and resets the decoder.
  std::string_view finish();
  bool stopped() const { return stopped_; }

 private:
  void whole_characters(bool last);
  std::string_view certain(bool last);

  std::shared_ptr<const OpenBundle> opened_;
  std::vector<std::string> stops_;
  size_t longest_stop_ = 0;
  bool continued_, strip_, stopped_ = false;
  // bytes of an unfinished character, text that may belong to a stop text, text returned last
  std::string bytes_, held_, out_;
};

}  // namespace edge_lib
