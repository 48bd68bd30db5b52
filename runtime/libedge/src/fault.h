// What is refused: thrown inside the library, an edge_error outside.
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

// `text` as it may stand in a message: of what is too long, the beginning.
std::string brief(const std::string& text, size_t most = 60);

// Writes as much of `text` as there is room for, with a zero behind it: whole characters, and a `?`
// for what would steer a terminal. Names in messages are a stranger's.
void print(char* target, size_t room, std::string_view text);

// Everything that is wrong with one input, so that all of it is told at once.
class Faults {
 public:
  void add(const std::string& field, const std::string& message);
  size_t count() const { return found_.size() + more_; }
  const std::string& first() const { return found_[0].second; }
  // Throws where there are faults: the first with its field, then the others.
  void refuse(edge_status status, const std::string& file = "") const;

 private:
  std::vector<std::pair<std::string, std::string>> found_;
  size_t more_ = 0;
};

}  // namespace edge_lib
