#include "fault.h"

namespace edge_lib {

namespace {
constexpr size_t LISTED = 900;  // characters of a list of faults; what does not fit is counted
constexpr size_t KEPT = 64;
}  // namespace

std::string brief(const std::string& text, size_t most) {
  return text.size() <= most ? text : text.substr(0, most) + "...";
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
