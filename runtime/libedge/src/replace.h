// Atomic replacement of a file, keeping the previous version: see edge/replace.py.
#pragma once

#include <string>
#include <vector>

namespace edge_lib {

// Replaces `path` by the concatenated `parts`, and keeps the old file as `path`~. Removes files
// left by killed processes. Throws std::string, the reason of a failure.
void replace_file(const std::string& path, const std::vector<const std::string*>& parts);

// Removes files left by killed processes that saved to `path`, but none that is being written.
void clear_leftovers(const std::string& path);

}  // namespace edge_lib
