#include "tokenizer.h"

#include <algorithm>

namespace edge_lib {

namespace {

constexpr size_t MAX_TEXT = 64u << 20;   // bytes of one prompt
constexpr size_t MAX_SPECIALS = 1 << 17;
constexpr size_t MAX_SPECIAL = 4 * 256;  // bytes of one

class Bytes : public Tokenizer {
 public:
  Bytes() {
    for (int i = 0; i < 256; i++) bytes_.emplace_back(1, char(i));
  }

 private:
  void plain(std::string_view text, bool, std::vector<int32_t>& ids) const override {
    for (char byte : text) ids.push_back(uint8_t(byte));
  }
};

}  // namespace

std::unique_ptr<const Tokenizer> Tokenizer::of(const Bundle& bundle) {
  if (bundle.tokenizer == "bytes") return std::make_unique<Bytes>();
  std::string data = bundle.read(bundle.tokenizer_file, MAX_FILE),
              file = bundle.path() + "/" + bundle.tokenizer_file;
  std::unique_ptr<Tokenizer> out;
  try {
    out = (bundle.tokenizer == "sentencepiece" ? read_sentencepiece : read_tokenizer_json)(data,
                                                                                         bundle);
  } catch (const std::string& problem) {
    throw Fault{EDGE_ERROR_INPUT,
                "is not supported: " + problem + "; give the bundle a tokenizer of your own",
                file, "tokenizer"};
  }
  if (int64_t(out->bytes_.size()) != bundle.token_count)
    throw Fault{EDGE_ERROR_BUNDLE,
                "has " + std::to_string(out->bytes_.size()) + " tokens, the manifest says " +
                    std::to_string(bundle.token_count),
                file, "tokenizer.vocab_size"};
  return out;
}

bool is_named(const Bundle& bundle, int32_t id) {
  return id == bundle.bos || id == bundle.pad ||
         std::find(bundle.eos.begin(), bundle.eos.end(), id) != bundle.eos.end();
}

void Tokenizer::set_specials(std::vector<Special> specials) {
  if (specials.size() > MAX_SPECIALS) throw std::string("too many special tokens");
  std::vector<Spellings::Entry> entries;
  for (const Special& special : specials) {
    if (special.text.size() > MAX_SPECIAL) throw std::string("a special token that is too long");
    size_t id = size_t(special.id);
    if (special_ids_.size() <= id) special_ids_.resize(id + 1);
    special_ids_[id] = true;
    if (!special.text.empty()) entries.push_back({special.text, int32_t(&special - &specials[0])});
  }
  spellings_ = Spellings(std::move(entries));
  specials_ = std::move(specials);
}

int32_t Tokenizer::special(std::string_view text) const {
  int32_t index = spellings_.number(text);
  return index < 0 ? -1 : specials_[size_t(index)].id;
}

const std::string& Tokenizer::bytes(int32_t token) const {
  if (token < 0 || size_t(token) >= bytes_.size())
    throw Fault{EDGE_ERROR_INPUT,
                "token " + std::to_string(token) + " is not between 0 and " +
                    std::to_string(bytes_.size() - 1),
                "", "tokens"};
  return bytes_[size_t(token)];
}

size_t Tokenizer::longest() const {
  size_t out = 0;
  for (const std::string& each : bytes_) out = std::max(out, each.size());
  return out;
}

std::vector<int32_t> Tokenizer::within(std::string_view text) const {
  std::vector<int32_t> ids;
  std::string back;
  try {
    if (!text.empty()) plain(text, false, ids);
  } catch (const Fault&) {  // it begins or ends inside a character, or cannot be encoded
    return {};
  }
  for (int32_t id : ids) back += bytes(id);
  if (back != text) ids.clear();
  return ids;
}

std::vector<int32_t> Tokenizer::encode(const edge_part* parts, size_t count) const {
  std::vector<int32_t> ids;
  std::string stretch;
  size_t total = 0;
  auto flush = [&] {
    if (stretch.empty()) return;
    size_t from = ids.size();
    plain(stretch, !from, ids);
    stretch.clear();
    for (size_t i = from; i < ids.size(); i++)
      if (size_t(ids[i]) < special_ids_.size() && special_ids_[size_t(ids[i])])
        throw Fault{EDGE_ERROR_INPUT,
                    "contains a character that the model's tokenizer cannot encode", "", "text"};
  };
  for (size_t i = 0; i < count; i++) {
    std::string_view text(parts[i].text, parts[i].bytes);
    if ((total += text.size()) > MAX_TEXT)
      throw Fault{EDGE_ERROR_INPUT, "is longer than 64 MiB", "", "text"};
    size_t begin = 0;
    for (size_t at = 0; parts[i].trusted && at < text.size();) {
      const Spellings::Entry* longest = spellings_.longest(text.substr(at));
      if (!longest) {
        at++;
        continue;
      }
      const Special* found = &specials_[size_t(longest->number)];
      if (found->strips)
        throw Fault{EDGE_ERROR_INPUT,
                    found->text + " strips the white space around it, which is not supported", "",
                    "text"};
      stretch.append(text, begin, at - begin);
      flush();
      ids.push_back(found->id);
      begin = at += found->text.size();
    }
    stretch.append(text, begin, text.npos);
  }
  flush();
  return ids;
}

}  // namespace edge_lib
