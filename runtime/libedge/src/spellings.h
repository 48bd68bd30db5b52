// Texts, each with a number, found at the beginning of another text. A tokenizer may have thousands
// of added tokens, and looks for them at every character of a prompt.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace edge_lib {

class Spellings {
 public:
  struct Entry {
    std::string text;  // not empty
    int32_t number;
    int32_t inner = -1;  // index of the longest other text that this one begins with
  };

  Spellings() = default;
  // Of equal texts the first counts.
  explicit Spellings(std::vector<Entry> entries) : sorted_(std::move(entries)) {
    auto less = [](const Entry& a, const Entry& b) { return a.text < b.text; };
    auto same = [](const Entry& a, const Entry& b) { return a.text == b.text; };
    std::stable_sort(sorted_.begin(), sorted_.end(), less);
    sorted_.erase(std::unique(sorted_.begin(), sorted_.end(), same), sorted_.end());
    int32_t outer = -1;
    for (size_t i = 0; i < sorted_.size(); i++) {
      while (outer >= 0 && !begins(sorted_[i].text, sorted_[size_t(outer)].text))
        outer = sorted_[size_t(outer)].inner;
      sorted_[i].inner = outer, outer = int32_t(i);
    }
  }

  // Returns the longest text that `text` begins with, or null.
  const Entry* longest(std::string_view text) const {
    // all that `text` begins with, begin the last text that is not behind it
    auto after = std::upper_bound(
        sorted_.begin(), sorted_.end(), text,
        [](std::string_view value, const Entry& entry) { return value < entry.text; });
    if (after == sorted_.begin()) return nullptr;
    const Entry* entry = &*(after - 1);
    size_t common = 0, most = std::min(text.size(), entry->text.size());
    while (common < most && text[common] == entry->text[common]) common++;
    while (entry->text.size() > common) {
      if (entry->inner < 0) return nullptr;
      entry = &sorted_[size_t(entry->inner)];
    }
    return entry;
  }

  // Returns the number of a text, or -1.
  int32_t number(std::string_view text) const {
    const Entry* found = longest(text);
    return found && found->text.size() == text.size() ? found->number : -1;
  }

 private:
  static bool begins(std::string_view text, std::string_view with) {
    return text.substr(0, with.size()) == with;
  }
  std::vector<Entry> sorted_;
};

}  // namespace edge_lib
