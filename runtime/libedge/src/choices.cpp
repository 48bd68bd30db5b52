#include "choices.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "fault.h"
#include "tokenizer.h"

namespace edge_lib {

namespace {

constexpr size_t MOST = 1000, LONGEST = 4096;  // texts, and bytes of one: bounds the tables
constexpr int32_t NONE = -1;

}  // namespace

Choices::Choices(std::shared_ptr<const OpenBundle> opened, const char* const* texts, size_t count)
    : opened_(std::move(opened)) {
  if (!texts) throw Fault{EDGE_ERROR_INPUT, "is NULL", "", "texts"};
  if (!count || count > MOST)
    throw Fault{EDGE_ERROR_INPUT, "must have 1 to " + std::to_string(MOST) + " texts", "", "texts"};
  Faults faults;
  for (size_t i = 0; i < count; i++) {
    std::string name = "texts." + std::to_string(i);
    if (!texts[i])
      faults.add(name, "is NULL");
    else if (texts_.emplace_back(texts[i]); texts_.back().empty())
      faults.add(name, "is empty");
    else if (texts_.back().size() > LONGEST)
      faults.add(name, "is longer than " + std::to_string(LONGEST) + " bytes");
  }
  faults.refuse(EDGE_ERROR_INPUT);
  for (size_t i = 0; i < count; i++) index_.push_back(i);
  if (opened_->tokenizer().strips_space()) {
    // The space before the first word is not shown: it is optional, and required if a text itself
    // begins with a space.
    bool required = false;
    for (const std::string& text : texts_) required |= text[0] == ' ';
    for (size_t i = 0; i < count; i++) {
      std::string spaced = " " + texts_[i];
      if (required) {
        texts_[i] = std::move(spaced);
      } else {
        texts_.push_back(std::move(spaced));
        index_.push_back(i);
      }
    }
  }
  match();
  forced_.reserve(texts_.size());
  for (size_t i = 0; i < texts_.size(); i++) force(i);
  begin();
}

void Choices::match() {
  const Tokenizer& tokenizer = opened_->tokenizer();
  const size_t longest = tokenizer.longest();
  std::unordered_map<std::string_view, std::vector<int32_t>> by_bytes;
  for (int32_t id = 0; id < int32_t(opened_->bundle.token_count); id++) {
    const std::string& bytes = tokenizer.bytes(id);
    if (!bytes.empty() && !is_end(id)) by_bytes[bytes].push_back(id);
  }
  for (const std::string& text : texts_) {
    auto& of_text = ids_.emplace_back(text.size());
    for (size_t at = 0; at < text.size(); at++)
      for (size_t n = 1; n <= std::min(longest, text.size() - at); n++) {
        auto found = by_bytes.find(std::string_view(text).substr(at, n));
        if (found == by_bytes.end()) continue;
        of_text[at].insert(of_text[at].end(), found->second.begin(), found->second.end());
      }
  }
}

// Finds the tokens that must follow in text i, after any answer that the texts before it allow.
void Choices::force(size_t i) {
  const Tokenizer& tokenizer = opened_->tokenizer();
  const size_t size = texts_[i].size();
  forced_.emplace_back(size, NONE);
  std::vector<bool> reached(size);  // after which an answer's token may begin
  std::vector<size_t> alike(texts_.size());  // texts with the first `at` bytes of this one
  std::iota(alike.begin(), alike.end(), size_t(0));
  reached[0] = true;
  for (size_t at = 0, end = 0, next = 0; at < size; at++) {
    if (at == next) next = std::max(at + 1, end = common_end(i, at, alike));
    if (!reached[at]) continue;
    int32_t& forced = forced_[i][at];
    if (at < end && alike[0] != i)
      forced = forced_[alike[0]][at];
    else if (at < end && forced == NONE)
      force_common(i, at, end, alike);
    auto reach = [&](int32_t id) {
      size_t to = at + tokenizer.bytes(id).size();
      if (to < size) reached[to] = true;
    };
    if (forced != NONE)
      reach(forced);
    else
      for (int32_t id : ids_[i][at]) reach(id);
  }
}

// Keeps those of `alike` that have the first `at` bytes of text i. Returns how far all of them are
// the same; `at` if one of them ends there.
size_t Choices::common_end(size_t i, size_t at, std::vector<size_t>& alike) const {
  const std::string& text = texts_[i];
  auto differs = [&](size_t j) { return texts_[j].compare(0, at, text, 0, at) != 0; };
  alike.erase(std::remove_if(alike.begin(), alike.end(), differs), alike.end());
  size_t end = text.size();
  for (size_t j : alike) {
    const std::string& other = texts_[j];
    size_t same = at;
    while (same < std::min(end, other.size()) && other[same] == text[same]) same++;
    end = same;
  }
  return end;
}

// Forces the usual tokens of the bytes from `at` to `end`, which all texts in `alike` have. The last
// ones are left out if another token goes on from there beyond `end`.
void Choices::force_common(size_t i, size_t at, size_t end, const std::vector<size_t>& alike) {
  const Tokenizer& tokenizer = opened_->tokenizer();
  std::vector<int32_t> ids = usual(i, at, end);
  size_t last = at, kept = ids.size();
  for (int32_t id : ids) last += tokenizer.bytes(id).size();
  for (size_t n = ids.size(), from = last; n-- > 0;) {
    from -= tokenizer.bytes(ids[n]).size();
    for (size_t j : alike)
      for (int32_t id : ids_[j][from])
        if (tokenizer.bytes(id).size() > end - from) kept = n;
  }
  for (size_t n = 0; n < kept; n++) {
    forced_[i][at] = ids[n];
    at += tokenizer.bytes(ids[n]).size();
  }
}

// Returns the tokenizer's ids of a part of text i, or the longest matches, one after the other, where
// the part begins or ends inside a character.
std::vector<int32_t> Choices::usual(size_t i, size_t at, size_t end) const {
  const Tokenizer& tokenizer = opened_->tokenizer();
  std::vector<int32_t> ids = tokenizer.within(std::string_view(texts_[i]).substr(at, end - at));
  const bool exact = !ids.empty();
  while (!exact && at < end) {
    int32_t longest = NONE;  // ids of a place are in order of length
    for (int32_t id : ids_[i][at])
      if (at + tokenizer.bytes(id).size() <= end) longest = id;
    if (longest == NONE) break;
    ids.push_back(longest);
    at += tokenizer.bytes(longest).size();
  }
  return ids;
}

void Choices::begin() {
  alive_.assign(texts_.size(), true);
  at_ = 0;
}

bool Choices::is_end(int32_t token) const {
  const auto& eos = opened_->bundle.eos;
  return std::find(eos.begin(), eos.end(), token) != eos.end();
}

int32_t Choices::found() const {
  for (size_t i = 0; i < texts_.size(); i++)
    if (alive_[i] && texts_[i].size() == at_) return int32_t(index_[i]);
  return -1;
}

void Choices::allow(uint32_t* mask, size_t words) const {
  auto add = [&](int32_t id) {
    if (size_t(id) / 32 < words) mask[id / 32] |= uint32_t(1) << (id % 32);
  };
  for (size_t i = 0; i < texts_.size(); i++)
    if (alive_[i] && at_ < texts_[i].size()) {
      if (forced_[i][at_] != NONE)
        add(forced_[i][at_]);
      else
        for (int32_t id : ids_[i][at_]) add(id);
    }
  if (found() >= 0)
    for (int32_t id : opened_->bundle.eos) add(id);
}

bool Choices::accept(int32_t token) {
  if (is_end(token) && found() >= 0) return true;
  const std::string& bytes = opened_->tokenizer().bytes(token);
  size_t left = 0;
  bool more = false;
  for (size_t i = 0; i < texts_.size(); i++) {
    alive_[i] = alive_[i] && !bytes.empty() && !texts_[i].compare(at_, bytes.size(), bytes);
    left += alive_[i];
    more |= alive_[i] && texts_[i].size() > at_ + bytes.size();
  }
  at_ += bytes.size();
  if (!left)
    throw Fault{EDGE_ERROR_INPUT, "token " + std::to_string(token) + " goes on with no text", "",
                "choices"};
  return !more;
}

}  // namespace edge_lib
