// A file is replaced whole or not at all, and the one before it is kept: see runtime/replace.py.
#pragma once

#include <string>
#include <vector>

namespace edge_lib {

// Puts `parts` in the place of `path`; what was there before is then at `path`~. What a killed
// process left of earlier attempts is removed. Throws std::string: why not.
void replace_file(const std::string& path, const std::vector<const std::string*>& parts);

// Removes what killed processes left of saves to `path`, and nothing that one is writing.
void clear_leftovers(const std::string& path);

}  // namespace edge_lib
