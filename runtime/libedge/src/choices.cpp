#include "choices.h"

#include <algorithm>
#include <unordered_map>

#include "fault.h"
#include "tokenizer.h"

namespace edge_lib {

namespace {

constexpr size_t MOST = 1000, LONGEST = 4096;  // texts, and bytes of one: bounds the tables

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

  const Tokenizer& tokenizer = opened_->tokenizer();
  std::unordered_map<std::string_view, std::vector<int32_t>> by_bytes;
  for (int32_t id = 0; id < int32_t(opened_->bundle.token_count); id++) {
    const std::string& bytes = tokenizer.bytes(id);
    if (!bytes.empty() && !is_end(id)) by_bytes[bytes].push_back(id);
  }
  for (const std::string& text : texts_) {
    auto& of_text = ids_.emplace_back(text.size());
    for (size_t at = 0; at < text.size(); at++)
      for (size_t n = 1; n <= std::min(tokenizer.longest(), text.size() - at); n++) {
        auto found = by_bytes.find(std::string_view(text).substr(at, n));
        if (found == by_bytes.end()) continue;
        of_text[at].insert(of_text[at].end(), found->second.begin(), found->second.end());
      }
  }
  begin();
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
    if (alive_[i] && texts_[i].size() == at_) return int32_t(i);
  return -1;
}

void Choices::allow(uint32_t* mask, size_t words) const {
  auto add = [&](int32_t id) {
    if (size_t(id) / 32 < words) mask[id / 32] |= uint32_t(1) << (id % 32);
  };
  for (size_t i = 0; i < texts_.size(); i++)
    if (alive_[i] && at_ < texts_[i].size())
      for (int32_t id : ids_[i][at_]) add(id);
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
