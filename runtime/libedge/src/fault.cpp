#include "fault.h"

#include <algorithm>
#include <cstdint>

namespace edge_lib {

namespace {
constexpr size_t LISTED = 900;  // characters of a list of faults; the rest are only counted
constexpr size_t KEPT = 64;     // faults
}  // namespace

std::string brief(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  while (most && uint8_t(text[most]) >> 6 == 2) most--;  // cut between characters
  return text.substr(0, most) + "...";
}

void print(char* target, size_t room, std::string_view text) {
  size_t size = std::min(text.size(), room - 1);
  while (size && size < text.size() && uint8_t(text[size]) >> 6 == 2) size--;
  for (size_t i = 0; i < size; i++) {
    // U+0080 to U+009F, of two bytes, are control characters too
    bool control = uint8_t(text[i]) < ' ' || text[i] == 0x7f ||
                   (i && text[i - 1] == '\xc2' && uint8_t(text[i]) < 0xa0);
    target[i] = control ? '?' : text[i];
    if (control && uint8_t(text[i]) >= 0x80) target[i - 1] = '?';
  }
  target[size] = 0;
}

void Faults::add(const std::string& field, const std::string& message) {
  if (found_.size() < KEPT)
    found_.emplace_back(brief(field, 200), message);
  else
    more_++;
}

void Faults::refuse(edge_status status, const std::string& file) const {
  if (found_.empty()) return;
  std::string message = found_[0].second;
  size_t told = 1;
  for (; told < found_.size(); told++) {
    std::string more = "; " + found_[told].first + ": " + found_[told].second;
    if (message.size() + more.size() > LISTED) break;
    message += more;
  }
  if (size_t left = count() - told) message += "; and " + std::to_string(left) + " more";
  throw Fault{status, message, file, found_[0].first};
}

}  // namespace edge_lib
