#include "decoder.h"

#include <algorithm>

namespace edge_lib {

namespace {

constexpr size_t MAX_STOPS = 64, MAX_STOP = 4096;
const char REPLACEMENT[] = "\xef\xbf\xbd";

// Returns the length of the first character, or of the invalid sequence that one U+FFFD replaces; 0
// if more bytes are needed. From the Unicode standard, table 3-7.
size_t character_length(std::string_view text, bool* good) {
  uint8_t first = uint8_t(text[0]);
  size_t length = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  *good = false;
  if (!length || first > 0xf4) return 1;
  for (size_t i = 1; i < length; i++) {
    if (i == text.size()) return 0;
    uint8_t next = uint8_t(text[i]), low = 0x80, high = 0xbf;
    if (i == 1 && first == 0xe0) low = 0xa0;
    if (i == 1 && first == 0xed) high = 0x9f;
    if (i == 1 && first == 0xf0) low = 0x90;
    if (i == 1 && first == 0xf4) high = 0x8f;
    if (next < low || next > high) return i;
  }
  *good = true;
  return length;
}

}  // namespace

Decoder::Decoder(std::shared_ptr<const OpenBundle> opened, const edge_decoder_options& options)
    : opened_(std::move(opened)), continued_(options.continued != 0) {
  Faults faults;
  if (options.stop_count > MAX_STOPS || (options.stop_count && !options.stop))
    faults.add("stop", "must be at most 64 texts");
  for (size_t i = 0; !faults.count() && i < options.stop_count; i++) {
    std::string text = options.stop[i] ? options.stop[i] : "";
    if (text.empty() || text.size() > MAX_STOP)
      faults.add("stop", "must be texts of 1 to 4096 bytes");
    longest_stop_ = std::max(longest_stop_, text.size());
    stops_.push_back(std::move(text));
  }
  faults.refuse(EDGE_ERROR_INPUT);
  const Tokenizer& tokenizer = opened_->tokenizer();
  strip_ = tokenizer.strips_space() && !continued_;
  // each byte may become a U+FFFD of 3 bytes
  size_t most = 3 * (tokenizer.longest() + 3) + longest_stop_;
  for (std::string* each : {&bytes_, &held_, &out_}) each->reserve(most);
}

std::string_view Decoder::feed(int32_t token) {
  std::string_view bytes = opened_->tokenizer().bytes(token);
  if (strip_ && !bytes.empty()) {
    if (bytes[0] == ' ') bytes.remove_prefix(1);
    strip_ = false;
  }
  bytes_.append(bytes);
  whole_characters(false);
  return certain(false);
}

std::string_view Decoder::finish() {
  whole_characters(true);
  certain(true);
  held_.clear();
  stopped_ = false;
  strip_ = opened_->tokenizer().strips_space() && !continued_;
  return out_;
}

void Decoder::whole_characters(bool last) {
  size_t at = 0;
  while (at < bytes_.size()) {
    bool good = false;
    size_t length = character_length(std::string_view(bytes_).substr(at), &good);
    if (!length && !last) break;
    if (!length) length = bytes_.size() - at;
    if (good)
      held_.append(bytes_, at, length);
    else
      held_ += REPLACEMENT;
    at += length;
  }
  bytes_.erase(0, at);
}

std::string_view Decoder::certain(bool last) {
  size_t until = held_.size(), end = held_.npos;
  for (const std::string& stop : stops_) {
    size_t found = stopped_ ? held_.npos : held_.find(stop);
    // the stop text that ends first; of several, the longest
    if (found == held_.npos || std::pair(found + stop.size(), found) >= std::pair(end, until))
      continue;
    end = found + stop.size(), until = found;
  }
  if (stopped_) until = 0;
  stopped_ = stopped_ || end != held_.npos;
  if (!stopped_ && !last)
    for (size_t at = held_.size() - std::min(held_.size(), longest_stop_); at < until; at++)
      for (const std::string& stop : stops_)
        if (stop.compare(0, held_.size() - at, held_, at) == 0) until = std::min(until, at);
  out_.assign(held_, 0, until);
  held_.erase(0, stopped_ ? held_.size() : until);
  return out_;
}

}  // namespace edge_lib
