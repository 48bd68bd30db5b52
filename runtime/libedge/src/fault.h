// Errors: a Fault inside the library, an edge_error outside.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../include/edge.h"

namespace edge_lib {

struct Fault {
  edge_status status;
  std::string message, file, field;
};

// Shortens `text` for a message.
std::string brief(const std::string& text, size_t most = 60);

// Writes as many whole characters of `text` as fit, then a zero. Control characters become `?`,
// because messages contain untrusted names and may reach a terminal.
void print(char* target, size_t room, std::string_view text);

// Collects the faults of one input, to report all of them at once.
class Faults {
 public:
  void add(const std::string& field, const std::string& message);
  size_t count() const { return found_.size() + more_; }
  const std::string& first() const { return found_[0].second; }
  // Throws a Fault if there are faults: the first one's field, and the messages of all.
  void refuse(edge_status status, const std::string& file = "") const;

 private:
  std::vector<std::pair<std::string, std::string>> found_;
  size_t more_ = 0;
};

}  // namespace edge_lib
