// Byte-level BPE of a `tokenizer.json`, as Hugging Face's library runs it. Other models are refused
// by name.
#include <algorithm>
#include <map>
#include <unordered_map>

#include "merge.h"
#include "split.h"
#include "tokenizer.h"

namespace edge_lib {

namespace {

constexpr size_t MAX_PIECE = 4 * 4096, MAX_HOLES = 1 << 16;

const Json* named(const Json& json, const char* key) {
  const Json* found = json.find(key);
  return found && !found->is(Json::null) ? found : nullptr;
}
std::string text_of(const Json& json, const char* key) {
  const Json* found = named(json, key);
  return found && found->is(Json::text) ? found->string() : "";
}
bool truth_of(const Json& json, const char* key) {
  const Json* found = named(json, key);
  return found && found->is(Json::boolean) && found->truth();
}
const std::vector<Json>& list_of(const Json& json, const char* key) {
  static const std::vector<Json> none;
  const Json* found = named(json, key);
  return found && found->is(Json::array) ? found->items() : none;
}

// GPT-2's printable stand-ins for bytes (openai/gpt-2, encoder.py).
uint32_t stand_in(int byte) {
  auto printed = [](int b) {
    return (b >= 0x21 && b < 0x7f) || (b >= 0xa1 && b < 0xad) || b >= 0xae;
  };
  if (printed(byte)) return uint32_t(byte);
  int others = 0;
  for (int b = 0; b < byte; b++) others += !printed(b);
  return uint32_t(256 + others);
}

// Returns whether a text is `<...>` or `[...]`, as models spell control tokens.
bool marked(const std::string& text) {
  return text.size() > 2 && ((text.front() == '<' && text.back() == '>') ||
                             (text.front() == '[' && text.back() == ']'));
}

class ByteLevel : public Tokenizer {
 public:
  ByteLevel(const Json& json, const Bundle& bundle) : splitter_(part(json, "pre_tokenizer")) {
    const Json& model = part(json, "model");
    check(json, model);
    read_vocabulary(model);
    read_added(json, bundle);
    read_merges(model);
    fill_bytes(bundle);
  }

 private:
  struct Added {
    std::string text;
    bool special, strips, normalized, plain;
  };

  static const Json& part(const Json& json, const char* key) {
    const Json* found = json.find(key);
    if (!found || !found->is(Json::object)) throw std::string("no ") + key;
    return *found;
  }

  void check(const Json& json, const Json& model) {
    std::string kind = text_of(model, "type"), decoder = text_of(part(json, "decoder"), "type");
    if (kind != "BPE" && !kind.empty()) throw "the model type " + kind;
    if (decoder != "ByteLevel") throw "the decoder type " + decoder;
    for (const char* key : {"dropout", "byte_fallback"})
      if (const Json* found = named(model, key))
        if (!(found->is(Json::boolean) ? !found->truth() : found->number() == 0))
          throw std::string("BPE with ") + key;
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (!text_of(model, key).empty()) throw std::string("BPE with ") + key;
    whole_first_ = truth_of(model, "ignore_merges");
    if (const Json* normalizer = named(json, "normalizer")) {
      normalized_ = text_of(*normalizer, "type") == "NFC";
      if (!normalized_) throw "the normalizer type " + text_of(*normalizer, "type");
    }
  }

  void put(int32_t id, const std::string& text) {
    if (size_t(id) >= pieces_.size()) pieces_.resize(size_t(id) + 1);
    pieces_[size_t(id)] = text;
  }

  void read_vocabulary(const Json& model) {
    const Json& vocabulary = part(model, "vocab");
    size_t count = vocabulary.keys().size();
    for (size_t i = 0; i < count; i++) {
      const Json& id = vocabulary.items()[i];
      const std::string& text = vocabulary.keys()[i];
      if (!id.is(Json::integer) || id.whole() < 0 || id.whole() >= int64_t(count + MAX_HOLES))
        throw "a piece without a valid id: " + brief(text);
      if (text.size() > MAX_PIECE) throw "a piece of " + std::to_string(text.size()) + " bytes";
      if (size_t(id.whole()) < pieces_.size() && !pieces_[size_t(id.whole())].empty())
        throw "two pieces with the same id: " + brief(text);
      put(int32_t(id.whole()), text);
      ids_[text] = int32_t(id.whole());
    }
    for (int byte = 0; byte < 256; byte++) {
      append_utf8(spelled_[byte], stand_in(byte));
      auto found = ids_.find(spelled_[byte]);
      symbols_[byte] = found == ids_.end() ? -1 : found->second;
      // without an unknown token, the library drops such bytes
      if (symbols_[byte] < 0 && named(model, "unk_token"))
        throw "no piece for the byte " + std::to_string(byte);
    }
  }

  void read_added(const Json& json, const Bundle& bundle) {
    size_t most = pieces_.size() + MAX_HOLES;
    for (const Json& token : list_of(json, "added_tokens")) {
      const Json* id = token.find("id");
      std::string text = text_of(token, "content");
      if (!id || !id->is(Json::integer) || id->whole() < 0 || id->whole() >= int64_t(most) ||
          text.empty() || text.size() > MAX_PIECE)
        throw std::string("an added token without a valid text or id");
      auto known = ids_.find(text);
      if (known != ids_.end() && known->second != id->whole())
        throw "an added token with another id than its piece: " + brief(text);
      if (known == ids_.end()) put(int32_t(id->whole()), text);
      bool strips = truth_of(token, "lstrip") || truth_of(token, "rstrip");
      bool special = truth_of(token, "special") || is_named(bundle, int32_t(id->whole()));
      bool plain = !special && !marked(text);
      if (plain && (strips || truth_of(token, "single_word")))
        throw "an added token that depends on the text around it: " + brief(text);
      added_[int32_t(id->whole())] = {text, special, strips, truth_of(token, "normalized"), plain};
    }
    std::vector<Special> specials;
    for (size_t i = 0; i < pieces_.size(); i++) {
      auto found = added_.find(int32_t(i));
      bool there = found != added_.end();
      if (pieces_[i].empty() || !(is_named(bundle, int32_t(i)) || (there && !found->second.plain)))
        continue;
      specials.push_back({pieces_[i], int32_t(i), there && found->second.strips});
      ids_.erase(pieces_[i]);  // typed text never becomes this piece
    }
    set_specials(std::move(specials));
    for (bool normalized : {false, true}) {
      std::vector<Spellings::Entry> plain;
      for (const auto& [id, token] : added_)
        if (token.plain && token.normalized == normalized) plain.push_back({token.text, id});
      plain_[normalized] = Spellings(std::move(plain));
    }
  }

  void read_merges(const Json& model) {
    double rank = 0;
    for (const Json& merge : list_of(model, "merges")) {
      std::string left, right;
      if (merge.is(Json::text)) {
        size_t space = std::min(merge.string().find(' '), merge.string().size());
        left = merge.string().substr(0, space);
        right = merge.string().substr(std::min(space + 1, merge.string().size()));
      } else if (merge.is(Json::array) && merge.items().size() == 2 &&
                 merge.items()[0].is(Json::text) && merge.items()[1].is(Json::text)) {
        left = merge.items()[0].string(), right = merge.items()[1].string();
      }
      auto one = ids_.find(left), two = ids_.find(right), both = ids_.find(left + right);
      if (one != ids_.end() && two != ids_.end() && both != ids_.end())
        merges_[pair(one->second, two->second)] = {rank, both->second};
      else if (special(left) < 0 && special(right) < 0 && special(left + right) < 0)
        throw "a merge of unknown pieces: " + brief(left + " " + right);
      rank++;
    }
  }

  void fill_bytes(const Bundle& bundle) {
    std::unordered_map<uint32_t, char> alphabet;
    for (int byte = 0; byte < 256; byte++) alphabet[stand_in(byte)] = char(byte);
    for (size_t i = 0; i < pieces_.size(); i++) {
      const std::string& piece = pieces_[i];
      auto found = added_.find(int32_t(i));
      bool there = found != added_.end(), fits = !there;
      std::string out;
      for (const Character& each : characters_of(piece)) {
        if (each.at == piece.size()) break;
        auto byte = alphabet.find(each.code);
        fits = fits && byte != alphabet.end();
        if (fits) out += byte->second;
      }
      bool hidden = is_named(bundle, int32_t(i)) || (there && found->second.special);
      bytes_.push_back(hidden ? "" : fits ? out : piece);
    }
  }

  static uint64_t pair(int32_t left, int32_t right) {
    return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
  }

  void plain(std::string_view text, bool, std::vector<int32_t>& ids) const override {
    auto characters = characters_of(text);
    if (normalized_ && !composed(characters))
      throw Fault{EDGE_ERROR_INPUT,
                  "has combining characters, which the tokenizer would compose: send composed "
                  "text",
                  "", "text"};
    // added tokens match before or after normalization, which changes nothing here
    std::vector<std::pair<Splitter::Word, int32_t>> parts{{{0, characters.size() - 1}, -1}}, cut;
    for (bool normalized : {false, true}) {
      cut.clear();
      for (auto [word, id] : parts)
        if (id < 0)
          cut_added(text, characters, word, normalized, cut);
        else
          cut.push_back({word, id});
      parts.swap(cut);
    }
    for (auto [range, id] : parts) {
      if (id >= 0) {
        ids.push_back(id);
        continue;
      }
      for (auto [begin, end] : splitter_.split(characters, range))
        encode_word(text.substr(characters[begin].at, characters[end].at - characters[begin].at),
                    ids);
    }
  }

  void cut_added(std::string_view text, const std::vector<Character>& characters,
                 Splitter::Word word, bool normalized,
                 std::vector<std::pair<Splitter::Word, int32_t>>& out) const {
    size_t begin = word.begin, limit = characters[word.end].at;
    for (size_t at = word.begin; at < word.end;) {
      std::string_view rest = text.substr(characters[at].at, limit - characters[at].at);
      const Spellings::Entry* best = plain_[normalized].longest(rest);
      if (!best) {
        at++;
        continue;
      }
      if (begin < at) out.push_back({{begin, at}, -1});
      size_t end = characters[at].at + best->text.size();
      while (characters[at].at < end) at++;
      out.push_back({{begin, at}, best->number});
      begin = at;
    }
    if (begin < word.end) out.push_back({{begin, word.end}, -1});
  }

  void encode_word(std::string_view word, std::vector<int32_t>& ids) const {
    if (whole_first_) {
      std::string spelled;
      for (char byte : word) spelled += spelled_[uint8_t(byte)];
      auto found = ids_.find(spelled);
      if (found != ids_.end()) return ids.push_back(found->second);
    }
    std::vector<Symbol> symbols;
    for (size_t i = 0; i < word.size(); i++)
      if (symbols_[uint8_t(word[i])] >= 0)
        symbols.push_back({i, i + 1, symbols_[uint8_t(word[i])]});
    auto order = merged(symbols, [&](const Symbol& left, const Symbol& right, Merge* out) {
      auto found = merges_.find(pair(left.id, right.id));
      if (found == merges_.end()) return false;
      *out = found->second;
      return true;
    });
    for (int32_t index : order) ids.push_back(symbols[size_t(index)].id);
  }

  Splitter splitter_;
  std::vector<std::string> pieces_;  // by id; "" if unused
  std::unordered_map<std::string, int32_t> ids_;
  std::map<int32_t, Added> added_;
  Spellings plain_[2];  // added tokens found in any text, before and after normalization
  std::unordered_map<uint64_t, Merge> merges_;
  std::string spelled_[256];
  int32_t symbols_[256];
  bool whole_first_ = false, normalized_ = false;
};

}  // namespace

std::unique_ptr<Tokenizer> read_tokenizer_json(const std::string& data, const Bundle& bundle) {
  Json json = parse_json(data);
  if (!json.is(Json::object)) throw std::string("no object");
  return std::make_unique<ByteLevel>(json, bundle);
}

}  // namespace edge_lib
