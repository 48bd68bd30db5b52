// The tokenizer that a program gives a bundle (edge_bundle_use_tokenizer).
#include <algorithm>

#include "tokenizer.h"

namespace edge_lib {

namespace {

constexpr size_t MAX_PIECE = 4 * 4096, MAX_COUNT = 1 << 28;

class Own : public Tokenizer {
 public:
  Own(const edge_tokenizer& own, const Bundle& bundle) : own_(own) {
    Faults faults;
    if (!own.encode) faults.add("tokenizer.encode", "is NULL");
    if (!own.token) faults.add("tokenizer.token", "is NULL");
    if (own.special_count && !own.specials) faults.add("tokenizer.specials", "is NULL");
    faults.refuse(EDGE_ERROR_INPUT);
    strips_space_ = own.strips_space != 0;
    own_.specials = nullptr, own_.special_count = 0;  // copied, and perhaps gone after this call
    read_specials(own, bundle);
    for (int32_t id = 0; id < int32_t(bundle.token_count); id++) read_token(id, bundle);
  }

 private:
  void read_specials(const edge_tokenizer& own, const Bundle& bundle) {
    std::vector<Special> specials;
    Faults faults;
    for (size_t i = 0; i < own.special_count; i++) {
      const edge_special& each = own.specials[i];
      std::string text = each.text ? each.text : "", at = "tokenizer.specials." + std::to_string(i);
      if (text.empty()) faults.add(at + ".text", "is empty");
      if (each.id < 0 || each.id >= bundle.token_count)
        faults.add(at + ".id", "is not between 0 and " + std::to_string(bundle.token_count - 1));
      specials.push_back({std::move(text), each.id, false});
    }
    faults.refuse(EDGE_ERROR_INPUT);
    // special even where the program does not spell them
    for (int32_t id = 0; id < int32_t(bundle.token_count); id++)
      if (is_named(bundle, id)) specials.push_back({"", id, false});
    try {
      set_specials(std::move(specials));
    } catch (const std::string& problem) {
      throw Fault{EDGE_ERROR_INPUT, "has " + problem, "", "tokenizer.specials"};
    }
  }

  void read_token(int32_t id, const Bundle& bundle) {
    const char* text = nullptr;
    size_t count = 0;
    std::string of = " for token " + std::to_string(id);
    if (int result = own_.token(own_.user, id, &text, &count))
      throw Fault{EDGE_ERROR_INPUT, "returned " + std::to_string(result) + of, "",
                  "tokenizer.token"};
    if (count > MAX_PIECE || (count && !text))
      throw Fault{EDGE_ERROR_INPUT,
                  "gave " + (text ? std::to_string(count) : "no") + " bytes" + of + ", at most " +
                      std::to_string(MAX_PIECE) + " allowed",
                  "", "tokenizer.token"};
    bytes_.emplace_back(is_named(bundle, id) ? "" : std::string(text ? text : "", count));
  }

  void plain(std::string_view text, bool first, std::vector<int32_t>& ids) const override {
    uint32_t code;
    for (size_t at = 0, length; at < text.size(); at += length)
      if (!(length = character(text, at, &code)))
        throw Fault{EDGE_ERROR_INPUT, "is not UTF-8 at byte " + std::to_string(at), "", "text"};
    const size_t from = ids.size();
    size_t room = text.size() + 8, count = 0;
    for (bool again : {false, true}) {
      ids.resize(from + room);
      if (int result = own_.encode(own_.user, text.data(), text.size(), first, ids.data() + from,
                                   room, &count))
        throw Fault{EDGE_ERROR_INPUT,
                    "cannot be encoded: the program's tokenizer returned " + std::to_string(result),
                    "", "text"};
      if (count <= room) break;
      if (again || count > MAX_COUNT)
        throw Fault{EDGE_ERROR_INPUT,
                    "asked for room for " + std::to_string(count) + " tokens, after room for " +
                        std::to_string(room),
                    "", "tokenizer.encode"};
      room = count;
    }
    ids.resize(from + count);
    for (size_t i = from; i < ids.size(); i++)
      if (ids[i] < 0 || size_t(ids[i]) >= bytes_.size())
        throw Fault{EDGE_ERROR_INPUT,
                    "gave token " + std::to_string(ids[i]) + ", which is not between 0 and " +
                        std::to_string(bytes_.size() - 1),
                    "", "tokenizer.encode"};
  }

  edge_tokenizer own_;
};

}  // namespace

std::unique_ptr<const Tokenizer> Tokenizer::of(const Bundle& bundle, const edge_tokenizer& own) {
  if (!bundle.tokenizer_file.empty()) bundle.read(bundle.tokenizer_file, MAX_FILE);
  return std::make_unique<Own>(own, bundle);
}

}  // namespace edge_lib
